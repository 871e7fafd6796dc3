"""Gathers the requests of many sessions into one call per engine.

While one call is in flight the next gathers, so the size of a batch follows the load by itself and a lone session waits
for nobody. Long suffixes (prefill) are sent on their own: an engine answers a call when its last request is done, and
decoding must not wait for somebody's prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from core.errors import WorkerLost
from core.records import DraftReply, DraftRequest, VerifyReply, VerifyRequest

PREFILL_SUFFIX_TOKENS = 32
"""A suffix longer than this is prefill."""

Request = TypeVar("Request", bound=VerifyRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


class Gatherer(Generic[Request, Reply]):
    """The calls to one engine. `deliver` is told each reply, or that the engine was lost with this request."""

    def __init__(
        self,
        call: Callable[[Sequence[Request]], Awaitable[Sequence[Reply]]],
        deliver: Callable[[Request, Reply | WorkerLost], None],
    ) -> None:
        self._call = call
        self._deliver = deliver
        self._waiting: list[Request] = []
        self._decoding: asyncio.Task[None] | None = None
        self._prefilling: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self._decoding is None and not self._prefilling

    def put(self, request: Request) -> None:
        """Send with the next call."""
        if len(request.suffix) > PREFILL_SUFFIX_TOKENS:
            task = asyncio.ensure_future(self._send([request]))
            self._prefilling.add(task)
            task.add_done_callback(self._prefilling.discard)
            return
        self._waiting.append(request)
        if self._decoding is None:
            self._decoding = asyncio.ensure_future(self._send_gathered())

    async def _send_gathered(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # one turn of the loop, so that all that is ready by now joins this call
                batch, self._waiting = self._waiting, []
                await self._send(batch)
        finally:
            self._decoding = None

    async def _send(self, batch: Sequence[Request]) -> None:
        try:
            replies = await self._call(batch)
        except WorkerLost as lost:
            for request in batch:
                self._deliver(request, lost)
            return
        for request, reply in zip(batch, replies, strict=True):
            self._deliver(request, reply)
