"""What the orchestrator asks of the outside world.

`deploy` answers over Ray, tests answer with fakes, a simulator with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from core.records import DraftReply, DraftRequest, DraftUpdate, TargetRequest, VerifyReply


class TargetPort(Protocol):
    """One target engine."""

    async def verify(self, batch: Sequence[TargetRequest]) -> Sequence[VerifyReply]:
        """One reply for each request, in order. Raises: WorkerLost when the engine is gone."""
        ...

    async def release(self, sessions: Sequence[str]) -> None:
        """Free what these sessions hold; unknown ones are ignored."""
        ...


class DraftPort(Protocol):
    """One draft engine."""

    async def draft(self, batch: Sequence[DraftRequest]) -> Sequence[DraftReply]:
        """One reply for each request, in order. Raises: WorkerLost when the engine is gone."""
        ...

    async def grow(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> DraftReply:
        """Have the draft grow continuously, and `take` told after each pass. The reply comes when that has ended:
        overtaken by a later message, or `Missing`. Raises: WorkerLost when the engine is gone.
        """
        ...

    async def release(self, sessions: Sequence[str]) -> None:
        """Free what these sessions hold; unknown ones are ignored."""
        ...


Port_co = TypeVar("Port_co", covariant=True)


class Lease(Protocol[Port_co]):
    """A session's place on one engine, from grant to release."""

    @property
    def name(self) -> str:
        """What the engine calls the session; another for each lease, so that the end of one cannot free the next."""
        ...

    @property
    def engine_id(self) -> str:
        """Names the engine's incarnation: equal ids mean that requests may share a call."""
        ...

    @property
    def epoch(self) -> int:
        """Goes into the stamp of every message; a restarted engine has another one."""
        ...

    @property
    def port(self) -> Port_co: ...

    def release(self) -> None:
        """Give the place back; returns at once, may be called twice, and survives the caller's cancellation."""
        ...


class Leases(Protocol):
    """Where places on engines come from."""

    async def take_target(self, session: str, tokens: Sequence[int] = ()) -> Lease[TargetPort]:
        """If possible on a replica that has computed what `tokens` begin with.

        Raises: Unavailable when no replica grants a place in time.
        """
        ...

    async def take_draft(self, session: str, tokens: Sequence[int] = ()) -> Lease[DraftPort]:
        """Raises: Unavailable when there is no draft, or none grants a place in time."""
        ...


class Clock(Protocol):
    """Time, so that tests can own it."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        ...

    async def sleep(self, duration_s: float) -> None: ...
