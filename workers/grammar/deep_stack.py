"""A call with room for deep recursion.

llguidance goes through rules that name one another by recursion: in a thread's usual 8 MiB a chain of 3,000 short
rules, or of 1,400 schemas, overflows the stack, which ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 256 * 2**20
"""Address space, of which only what is touched takes memory. A level takes 3 to 6 kilobytes of it, and at least 7 bytes
of a grammar, which has at most `MAX_GRAMMAR_BYTES`."""
_starting = threading.Lock()
"""The size is the process's, for all threads that start meanwhile."""

Result = TypeVar("Result")


def call_deeply(function: Callable[[], Result]) -> Result:
    """What `function` returns or raises, in a thread of its own that has a large stack."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised by whoever waits
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
