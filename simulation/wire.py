"""The network between the orchestrator and simulated engines.

Knows engines and their distance; must not know replicas, leases or sessions. A subclass injects faults
(`simulation.chaos.faults`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from core.records import DraftReply, DraftRequest, VerifyReply, VerifyRequest
from simulation.engines import HopLaw, SimEngine
from simulation.engines.base import until

TICK_S = 1e-9
"""Seconds between two ordered messages that would arrive at the same time. Events at one time have no defined order."""

Request = TypeVar("Request", bound=VerifyRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


class Wire:
    """A wire that only delays messages."""

    def __init__(self, hop: HopLaw, random: Random) -> None:
        self._hop = hop
        self._random = random
        self._due_s: dict[tuple[str, bool], float] = {}
        """Arrival time of the last ordered message, by session and direction."""
        self._frames: dict[tuple[str, bool], tuple[float, float]] = {}
        """(send time, travel time) of the last frame in seconds, by engine and direction."""

    async def call(
        self, engine: SimEngine[Request, Reply], batch: Sequence[Request], take: Callable[[Reply], None]
    ) -> None:
        """Send the requests; `take` gets the replies of each pass as they arrive. Raises: WorkerLost."""
        await asyncio.sleep(self._frame_s(engine.engine_id, is_back=False))
        loop = asyncio.get_running_loop()
        await _exchange(engine, batch, take, lambda: loop.time() + self._frame_s(engine.engine_id, is_back=True))

    async def grow(self, engine: SimEngine[Request, Reply], request: Request, take: Callable[[Reply], None]) -> None:
        """Like `call`, for one request. As on a link, messages of a session stay in order. Raises: WorkerLost."""
        session = request.stamp.lease
        await asyncio.sleep(self._arrival_s(session, is_back=False) - asyncio.get_running_loop().time())
        await _exchange(engine, [request], take, lambda: self._arrival_s(session, is_back=True))

    def _arrival_s(self, session: str, *, is_back: bool) -> float:
        """Arrival time of an ordered message that is sent now."""
        at_s = asyncio.get_running_loop().time() + self._hop.one_way_s(self._random)
        due_s = self._due_s[session, is_back] = max(at_s, self._due_s.get((session, is_back), 0.0) + TICK_S)
        return due_s

    def _frame_s(self, engine_id: str, *, is_back: bool) -> float:
        """Seconds that a frame sent now travels.

        Messages sent at the same time share a frame. On a link, all replies of a step are one frame.
        """
        now_s = asyncio.get_running_loop().time()
        sent_s, takes_s = self._frames.get((engine_id, is_back), (-math.inf, 0.0))
        if now_s > sent_s:  # a frame does not overtake another
            takes_s = max(self._hop.one_way_s(self._random), sent_s + takes_s - now_s)
            self._frames[engine_id, is_back] = now_s, takes_s
        return takes_s

    async def travel(self) -> None:
        await asyncio.sleep(self._hop.one_way_s(self._random))

    async def drain(self) -> None:
        """Wait for messages that are still travelling. This wire has none."""

    async def grant(self, kind: str, session: str) -> None:  # noqa: ARG002
        """Ask for a lease: a round trip. Raises: Unavailable."""
        await self.travel()
        await self.travel()


async def _exchange(
    engine: SimEngine[Request, Reply],
    batch: Sequence[Request],
    take: Callable[[Reply], None],
    arrival_s: Callable[[], float],
) -> None:
    """Hand each reply to `take` at its `arrival_s`, and return after the last. Raises: WorkerLost."""
    loop, last_s = asyncio.get_running_loop(), 0.0
    arrivals: list[asyncio.TimerHandle] = []

    def send(reply: Reply) -> None:
        nonlocal last_s
        last_s = arrival_s()
        arrivals.append(loop.call_at(last_s, take, reply))

    try:
        await engine.exchange(batch, send)
        await until(last_s)
    finally:  # a caller that has left gets no more replies
        for arrival in arrivals:
            arrival.cancel()
