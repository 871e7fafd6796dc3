"""Runs long functions in a thread beside the event loop, with a limit on the waiting work.

Knows threads; must not know the functions. It helps with functions that release the GIL, as tokenizers do; others must
be short, or limited by their caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from core.errors import Overloaded

SHORT_BYTES = 16_384
"""Work on at most this many bytes of input runs immediately on the event loop: it takes a few milliseconds."""
LONG_BYTES = SHORT_BYTES + 1
"""Input size to declare for work that takes long although its input is short."""
MAX_WAITING_BYTES = 16 * 2**20
"""Most input bytes of all waiting and running work; further work is refused."""
RETRY_S = 1.0

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Offload:
    """One thread for long work, first come, first served."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def run(
        self, num_bytes: int, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """The result of `function`; `num_bytes` is the size of its input.

        Work is skipped if its caller is cancelled before it begins.
        Raises: Overloaded if too much work is waiting.
        """
        if num_bytes <= SHORT_BYTES:
            return function(*args, **kwargs)
        if self._waiting_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise Overloaded(f"too many long prompts are waiting; try again in {RETRY_S:g} s", RETRY_S)
        self._waiting_bytes += num_bytes
        try:
            future = self._thread.submit(function, *args, **kwargs)
            return await asyncio.wrap_future(future)
        finally:
            self._waiting_bytes -= num_bytes
