"""Gathers the requests of many sessions into few calls to an engine.

While the allowed number of calls is in flight, new requests gather for the next one. The batch size thus follows the
load, and a lone session never waits. Each reply goes to its session on arrival. The first reply of a call means that
its pass is over: requests that are ready then go with the next call, and a request that needs more passes delays no
other. Offers that follow from one pass go in one call for all its sessions. Long suffixes (prefill) and first messages
are sent alone, since they wait for more than a pass: for prefill, grammar compilation, or room in a full KV cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from core.config import DECODE_TOKENS
from core.errors import WorkerLost
from core.records import (
    Continuation,
    DraftReply,
    DraftRequest,
    Stamp,
    TargetRequest,
    VerifyReply,
    VerifyRequest,
    is_last,
)

logger = logging.getLogger(__name__)

FOREIGN = "the engine's replies do not belong to the requests"

Request = TypeVar("Request", bound=TargetRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


def _nothing() -> None:
    """Do nothing, for a request that was sent alone."""


class Batcher(Generic[Request, Reply]):
    """The calls to one engine. `deliver` gets each request with each of its replies, or with the loss of the engine."""

    def __init__(
        self,
        exchange: Callable[[Sequence[Request], Callable[[Reply], None]], Awaitable[None]],
        deliver: Callable[[Request, Reply | WorkerLost], None],
        max_calls: int | None = 1,
        is_joint: Callable[[Request], bool] = lambda _: False,
    ) -> None:
        """`max_calls`: maximum number of gathered calls without a reply; None sets no limit. `is_joint`: whether a
        request is joint. The last replies to the joint requests of a call are delivered together.
        """
        self._exchange = exchange
        self._deliver = deliver
        self._max_calls = max_calls
        self._is_joint = is_joint
        self._open: dict[Stamp, Request] = {}
        """Requests without a last reply."""
        self._waiting: list[Request] = []
        self._offers: list[Request] = []
        """Offers that have not been sent yet."""
        self._is_offering = False
        """Whether a task is about to send the offers."""
        self._is_gathering = False
        """Whether a task is about to send the waiting requests."""
        self._num_decoding = 0
        self._num_starting = 0
        """Number of requests that are sent alone as soon as their tasks begin."""
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, request: Request) -> None:
        """Send a request with the next call, or alone if it may need passes of its own."""
        if isinstance(request, Continuation):
            self._offers.append(request)
            if not self._is_offering:
                self._is_offering = True
                self._spawn(self._gather_offers())
            return
        if _is_sent_alone(request) and not self._has_waiting(request.stamp.lease):
            self._num_starting += 1
            self._spawn(self._send_alone(request))
            return
        self._waiting.append(request)
        is_free = self._max_calls is None or self._num_decoding < self._max_calls
        if not self._is_gathering and is_free:
            self._is_gathering = True
            self._spawn(self._gather())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task and keep a reference to it, since the event loop holds tasks weakly."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _has_waiting(self, session: str) -> bool:
        return any(request.stamp.lease == session for request in self._waiting)

    async def _send_alone(self, request: Request) -> None:
        self._num_starting -= 1
        await self._send([request])

    async def _keep_order(self) -> None:
        """Let requests that are sent alone go first, because a session's messages must arrive in order: a later one
        continues what an earlier one began, such as the numbers of a draft's nodes."""
        while self._num_starting:  # noqa: ASYNC110  the tasks that change it have been scheduled
            await asyncio.sleep(0)

    async def _gather(self) -> None:
        """Yield to the event loop once, so that every request that is ready joins this call."""
        await asyncio.sleep(0)
        await self._send_waiting()

    def _observe_pass(self) -> None:
        """Handle the first reply of a call: its pass is over.

        Sessions answered together with it enqueue their next requests before this task sends, and this task runs before
        the tasks that those sessions wake.
        """
        self._num_decoding -= 1
        if not self._is_gathering:
            self._is_gathering = True
            self._spawn(self._send_waiting())

    async def _send_waiting(self) -> None:
        await self._keep_order()
        self._is_gathering = False
        if not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        self._num_decoding += 1
        if self._offers:
            self._spawn(self._send_offers())  # starts after this message has been sent
        await self._send(batch, self._observe_pass)

    async def _gather_offers(self) -> None:
        """Send the offers that follow from the verdicts of a pass in one call."""
        await self._keep_order()
        self._is_offering = False
        await self._send_offers()

    async def _send_offers(self) -> None:
        """Send the offers, except those of sessions whose message still waits: no offer may overtake its base."""
        waiting = {request.stamp.lease for request in self._waiting}
        offers = [offer for offer in self._offers if offer.stamp.lease not in waiting]
        self._offers = [offer for offer in self._offers if offer.stamp.lease in waiting]
        if offers:
            await self._send(offers)

    async def _send(self, batch: Sequence[Request], saw_pass: Callable[[], None] = _nothing) -> None:
        """Send a call. Each request gets an answer even if the call fails, since sessions wait for it. `saw_pass` is
        called before the first reply is delivered.
        """
        self._open.update({request.stamp: request for request in batch})
        joint = {request.stamp for request in batch if self._is_joint(request)}
        held_back: list[Reply] = []
        has_answered = False

        def take(reply: Reply) -> None:
            nonlocal has_answered
            if not has_answered:
                has_answered = True
                saw_pass()
            if reply.stamp not in joint or not is_last(reply):
                self._take(reply)
                return
            joint.remove(reply.stamp)
            held_back.append(reply)
            if not joint:
                for each in held_back:
                    self._take(each)

        try:
            await self._exchange(batch, take)
            end = WorkerLost("it has not answered each of its requests")
        except WorkerLost as lost:
            end = lost
        except (Exception, asyncio.CancelledError) as error:  # only the call can be cancelled, not this task
            logger.exception("a call with %d requests failed", len(batch))
            end = WorkerLost(f"the call failed: {error!r}")
        if not has_answered:
            has_answered = True
            saw_pass()
        for request in batch:
            if self._open.pop(request.stamp, None) is not None:
                self._deliver(request, end)

    def _take(self, reply: Reply) -> None:
        """Deliver a reply. Raises: WorkerLost if it matches no open request."""
        request = self._open.get(reply.stamp)
        if request is None:
            raise WorkerLost(FOREIGN)
        if is_last(reply):
            del self._open[reply.stamp]
        self._deliver(request, reply)


def _is_sent_alone(request: VerifyRequest | DraftRequest) -> bool:
    """Whether a request needs its own passes: a long suffix, or a first message."""
    return request.base.num_tokens == 0 or len(request.suffix) > DECODE_TOKENS
