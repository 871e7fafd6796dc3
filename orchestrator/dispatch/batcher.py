"""Gathers the requests of many sessions into few calls to an engine.

While the allowed number of calls is in flight the next one gathers requests, so the batch size follows the load and a
lone session never waits. Long suffixes (prefill) are sent on their own: an engine answers a call when its last request
is done, and decoding must not wait for a prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from core.config import DECODE_TOKENS
from core.errors import WorkerLost
from core.records import Continuation, DraftReply, DraftRequest, TargetRequest, VerifyReply

logger = logging.getLogger(__name__)


Request = TypeVar("Request", bound=TargetRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


class Batcher(Generic[Request, Reply]):
    """The calls to one engine. `deliver` gets each reply, or the loss of the engine with this request."""

    def __init__(
        self,
        call: Callable[[Sequence[Request]], Awaitable[Sequence[Reply]]],
        deliver: Callable[[Request, Reply | WorkerLost], None],
        max_calls: int = 1,
    ) -> None:
        self._call = call
        self._deliver = deliver
        self._max_calls = max_calls
        self._waiting: list[Request] = []
        self._offers: list[Request] = []
        """Sessions whose message waits."""
        self._num_decoding = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, request: Request) -> None:
        """Send with the next call; a long text or a continuation by itself, since others would wait for its answer."""
        is_offer, session = isinstance(request, Continuation), request.stamp.session
        if is_offer and any(each.stamp.session == session for each in self._waiting):
            self._offers.append(request)
            return
        if isinstance(request, Continuation) or len(request.suffix) > DECODE_TOKENS:
            self._spawn(self._send([request]))
            return
        self._waiting.append(request)
        if len(self._waiting) == 1 and self._num_decoding < self._max_calls:
            self._num_decoding += 1
            self._spawn(self._send_gathered())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Strong references: the event loop holds tasks weakly."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_gathered(self) -> None:
        try:
            await asyncio.sleep(0)  # one turn of the loop, so that every request that is ready by now joins this call
            while self._waiting:  # unless another call of this engine took it meanwhile
                batch, self._waiting = self._waiting, []
                self._send_offers()
                await self._send(batch)  # the sessions of these replies have put their next requests
        finally:
            self._num_decoding -= 1  # here and not in a callback: the next `put` must see it

    def _send_offers(self) -> None:
        """After the messages that they continue, which are sent before these tasks begin."""
        offers, self._offers = self._offers, []
        for offer in offers:
            self._spawn(self._send([offer]))

    async def _send(self, batch: Sequence[Request]) -> None:
        for request, answer in zip(batch, await self._answers(batch), strict=True):
            self._deliver(request, answer)

    async def _answers(self, batch: Sequence[Request]) -> Sequence[Reply | WorkerLost]:
        """One answer for each request, also where the call fails: sessions wait for it."""
        try:
            replies = await self._call(batch)
        except WorkerLost as lost:
            return [lost] * len(batch)
        except (Exception, asyncio.CancelledError) as error:  # nobody cancels these tasks: it comes from the call
            logger.exception("a call with %d requests failed", len(batch))
            return [WorkerLost(f"the call failed: {error!r}")] * len(batch)
        if [reply.stamp for reply in replies] != [request.stamp for request in batch]:
            return [WorkerLost("the engine's replies do not belong to the requests")] * len(batch)
        return replies
