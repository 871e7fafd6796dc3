"""Long work in a thread beside the event loop, with a bound on the waiting work.

Knows threads; must not know the work. It helps with functions that release the interpreter's lock, as tokenizers do;
others are short, or bounded by their caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from core.errors import Overloaded

SHORT_BYTES = 16_384
"""Work on at most this input, in bytes, runs at once: a few milliseconds."""
LONG_BYTES = SHORT_BYTES + 1
"""Input, in bytes, to state for work that takes longer than its input suggests."""
MAX_WAITING_BYTES = 16 * 2**20
"""Most input of all waiting and running work, in bytes; further work is refused."""
RETRY_S = 1.0

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Offload:
    """One thread for long work, in order of arrival."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0

    async def run(
        self, num_bytes: int, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """The result of `function`; `num_bytes` is the size of its input.

        Work whose caller is cancelled before it begins is left out.
        Raises: Overloaded when too much is waiting.
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
