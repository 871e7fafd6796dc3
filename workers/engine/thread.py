"""Runs an engine on its own thread, so that its callers' event loops stay free.

Only this thread touches the engine, so the engine needs no locks. Orders arrive through a queue. Each reply goes to the
receiver of the request with its stamp, as soon as the step that completes it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from core.errors import WorkerLost
from core.records import (
    Adapter,
    Continuation,
    DraftReply,
    DraftRequest,
    Refused,
    Stamp,
    VerifyReply,
    VerifyRequest,
    is_last,
)
from workers.engine.base import Engine
from workers.engine.target import TargetEngine

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=VerifyRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)
Result = TypeVar("Result")

EXPIRY_PERIOD_S = 5.0
"""Interval between checks for silent sessions, in seconds."""
WORKING_PERIOD_S = 1.0
"""Interval between progress reports to waiting callers, in seconds; reports are sent when a step ends."""
IDLE_S = 0.25
"""The engine is idle if no order arrives for this time: longer than a stream pauses between two of its rounds."""


class Receiver(Protocol):
    """Receives the replies to posted requests. Called on the engine's thread: no method may block or raise."""

    def take(self, replies: Sequence[Any]) -> None:
        """Handle the replies completed by one step."""
        ...

    def working(self, stamps: Sequence[Stamp]) -> None:
        """The engine is running, and the requests with these stamps have no last reply yet.

        Called about once a second, between steps.
        """
        ...

    def lose(self, end: WorkerLost) -> None:
        """The engine has ended; open requests get no reply."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class _Inbox:
    """A Receiver that passes replies to one caller's event loop, waking it once per step."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    received: asyncio.Queue[Sequence[Any] | WorkerLost] = field(default_factory=asyncio.Queue)

    def take(self, replies: Sequence[Any]) -> None:
        self._put(replies)

    def working(self, stamps: Sequence[Stamp]) -> None:
        """Does nothing: callers in this process have no reply timeout."""

    def lose(self, end: WorkerLost) -> None:
        self._put(end)

    def _put(self, received: Sequence[Any] | WorkerLost) -> None:
        with suppress(RuntimeError):  # the loop is closed: its caller is gone, others still get replies
            self.loop.call_soon_threadsafe(self.received.put_nowait, received)

    async def next_replies(self) -> Sequence[Any]:
        """Replies of the next step that has any. Raises: WorkerLost."""
        received = await self.received.get()
        if isinstance(received, WorkerLost):
            raise received
        return received


Order = tuple[Callable[[], None], Callable[[WorkerLost], None]]
"""Work for the engine's thread, and a callback for when the engine ends before the work is done."""


class EngineLoop(Generic[Request, Reply]):
    """Runs one engine until `close`. Several event loops may share it."""

    def __init__(self, engine: Engine[Request, Reply]) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._offers: queue.SimpleQueue[Order] = queue.SimpleQueue()
        """Offered continuations; useful only until the current step ends."""
        if isinstance(engine, TargetEngine):
            engine.take_offers = self._take_offers
        self._open: dict[Stamp, Receiver] = {}
        """Receivers of the requests without a last reply."""
        self._reported_s = 0.0
        """Time of the last progress report to waiting callers."""
        self._next_expiry_s = monotonic() + EXPIRY_PERIOD_S
        self._may_build = True
        """Whether the engine may have something to build while it is idle."""
        self._lock = threading.Lock()
        self._end: WorkerLost | None = None
        self._ended: Future[None] = Future()
        """Resolved when the thread is about to end."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def exchange(self, batch: Sequence[Request], take: Callable[[Any], None]) -> None:
        """Send requests and pass each reply to `take`; see `core.ports.EnginePort`. Raises: WorkerLost."""
        inbox, num_open = _Inbox(), len({request.stamp for request in batch})
        self.post(batch, inbox)
        while num_open:
            for reply in await inbox.next_replies():
                num_open -= is_last(reply)
                take(reply)

    def post(self, batch: Sequence[Request], receiver: Receiver) -> None:
        """Send each reply to these requests to `receiver` as soon as it is ready.

        Thread-safe. Raises: WorkerLost.
        """
        arrived_s = monotonic()
        offers = [request for request in batch if isinstance(request, Continuation)]
        others = [request for request in batch if not isinstance(request, Continuation)]
        if others:
            self._order(lambda: self._add(others, receiver, arrived_s), receiver.lose)
        if offers:
            self._offers.put((lambda: self._add(offers, receiver), receiver.lose))
            self._order(self._take_offers, receiver.lose)  # in case no step is running

    async def release(self, sessions: Sequence[str]) -> None:
        """Free these sessions before the next step. Raises: WorkerLost."""
        await self.ask(lambda engine: engine.release(sessions))

    async def ask(self, question: Callable[[Engine[Request, Reply]], Result]) -> Result:
        """Call `question` on the engine's thread between two steps and return its result. Raises: WorkerLost."""
        future: Future[Result] = Future()
        self._order(lambda: self._answer(question, future), lambda end: _fail(future, end))
        return await asyncio.wrap_future(future)

    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Read an adapter beside the steps, then serve it. Returns it with its digest. Raises: OutriderError."""
        target = self._target
        weights = await asyncio.to_thread(target.read_adapter, adapter)
        return await self.ask(lambda _: target.add_adapter(weights))

    async def drop_adapter(self, digest: str) -> bool:
        """Call `TargetEngine.drop_adapter`. Raises: WorkerLost."""
        target = self._target
        return await self.ask(lambda _: target.drop_adapter(digest))

    @property
    def _target(self) -> TargetEngine:
        assert isinstance(self._engine, TargetEngine), "only targets have adapters"
        return self._engine

    async def until_end(self) -> NoReturn:
        """Wait until the engine has failed or is closed. Raises: WorkerLost, with the cause."""
        await asyncio.shield(asyncio.wrap_future(self._ended))
        assert self._end is not None, "the thread runs until the end is known"
        raise self._end

    async def close(self) -> None:
        """Let the current step end, then stop the thread; open calls raise WorkerLost."""
        self._shut(WorkerLost("the engine was closed"))
        self._orders.put(None)
        ended = asyncio.wrap_future(self._ended)  # at interpreter exit, no executor can wait for the thread
        await asyncio.shield(ended)  # one caller's cancellation must not affect others
        self._thread.join()

    def _order(self, run: Callable[[], None], lose: Callable[[WorkerLost], None]) -> None:
        with self._lock:
            if self._end is not None:
                raise self._end
            self._orders.put((run, lose))

    def _shut(self, end: WorkerLost) -> None:
        """Reject further orders; those already queued are the last."""
        with self._lock:
            self._end = self._end or end

    # On the engine's thread

    def _run(self) -> None:
        try:
            while self._end is None:
                has_orders = self._take_orders()
                self._expire_if_due()
                if self._engine.has_work:
                    self._step()
                    self._engine.build_more(is_idle=False)
                elif not has_orders and self._may_build:
                    self._may_build = self._engine.build_more(is_idle=True)
                self._tell_working()
        except Exception as failure:
            logger.exception("the engine failed")
            self._shut(WorkerLost(f"the engine failed: {failure}"))
        self._turn_away_the_rest()
        self._ended.set_result(None)

    def _take_orders(self) -> bool:
        """Run the queued orders; wait for one if there is no other work. Returns whether there was one."""
        is_idle = not self._engine.has_work
        longest_s = IDLE_S if self._may_build else WORKING_PERIOD_S if self._open else EXPIRY_PERIOD_S
        try:
            order = self._orders.get(block=is_idle, timeout=longest_s if is_idle else None)
        except queue.Empty:
            return False
        with suppress(queue.Empty):
            while order is not None:
                run, _ = order
                run()
                order = self._orders.get_nowait()
        return True

    def _expire_if_due(self) -> None:
        """Expire silent sessions at a fixed interval rather than when idle: an engine may be busy for hours."""
        if monotonic() >= self._next_expiry_s:
            self._next_expiry_s = monotonic() + EXPIRY_PERIOD_S
            self._engine.expire()

    def _take_offers(self) -> None:
        """Take the offers received so far."""
        try:
            while True:
                run, _ = self._offers.get_nowait()
                run()
        except queue.Empty:
            pass

    def _add(self, batch: Sequence[Request], receiver: Receiver, arrived_s: float | None = None) -> None:
        """`arrived_s`: time of the order; None if the reply excludes the time in the queue."""
        for request in batch:
            if (first := self._open.get(request.stamp)) is not None:  # a duplicate is answered once
                if first is not receiver:
                    receiver.take([Refused(request.stamp, "another caller has sent this message")])
                continue
            self._open[request.stamp] = receiver
            self._engine.add(request, arrived_s)

    def _answer(self, question: Callable[[Engine[Request, Reply]], Result], future: Future[Result]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(question(self._engine))
        except Exception as error:  # noqa: BLE001  the caller handles it, not this thread
            future.set_exception(error)

    def _step(self) -> None:
        ready: dict[Receiver, list[Any]] = {}
        for reply in self._engine.step():
            receiver = self._open.pop(reply.stamp) if is_last(reply) else self._open[reply.stamp]
            ready.setdefault(receiver, []).append(reply)
        for receiver, replies in ready.items():
            receiver.take(replies)

    def _tell_working(self) -> None:
        """Report to each caller its open requests, so that a long wait does not look like a hung engine."""
        now_s = monotonic()
        if now_s < self._reported_s + WORKING_PERIOD_S:
            return
        self._reported_s = now_s
        waiting: dict[Receiver, list[Stamp]] = {}
        for stamp, receiver in self._open.items():
            waiting.setdefault(receiver, []).append(stamp)
        for receiver, stamps in waiting.items():
            receiver.working(stamps)

    def _turn_away_the_rest(self) -> None:
        assert self._end is not None, "the thread runs until the end is known"
        waiting: set[Callable[[WorkerLost], None]] = {receiver.lose for receiver in self._open.values()}
        while not self._orders.empty():
            order = self._orders.get_nowait()
            if order is not None:
                _, lose = order
                waiting.add(lose)
        for lose in waiting:
            lose(self._end)
        self._open.clear()


def _fail(future: Future[Any], error: WorkerLost) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
