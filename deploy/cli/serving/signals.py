"""Signals that end a command which serves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event


@contextmanager
def restored_signal_handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def wait_for_signal() -> Event:
    """Wait for SIGINT or SIGTERM; returns an event that the next signal sets."""
    stop, stop_now = Event(), Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: (stop_now if stop.is_set() else stop).set())
    stop.wait()
    return stop_now


def ignore_signals() -> None:
    """Ignore further signals, so that the shutdown completes."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
