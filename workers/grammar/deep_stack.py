"""Calls a function with a stack for deep recursion.

llguidance follows rules that refer to each other by recursion. In a thread's usual 8 MiB, a chain of 3,000 short rules
or of 1,400 schemas overflows the stack, which ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 256 * 2**20
"""Address space; only touched pages take memory. Each level takes 3 to 6 kilobytes of stack and at least 7 bytes of a
grammar, which has at most `MAX_GRAMMAR_BYTES`."""
_starting = threading.Lock()
"""`threading.stack_size` is global: it applies to every thread that starts before it is reset."""

Result = TypeVar("Result")


def call_deeply(function: Callable[[], Result]) -> Result:
    """Run `function` in a thread with a large stack; returns what it returns, raises what it raises."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            done.set_exception(error)

    thread = threading.Thread(target=run, name="deep stack")
    with _starting:
        usual_bytes = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual_bytes)
    thread.join()
    return done.result()
