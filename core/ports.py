"""The interfaces that the orchestrator needs from outside.

`deploy` answers over Ray, tests answer with fakes, a simulator with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from core.records import DraftReply, DraftRequest, DraftUpdate, Grammar, TargetRequest, VerifyReply
from core.speculation import Guesses


class TargetPort(Protocol):
    """One target engine."""

    async def verify(
        self, batch: Sequence[TargetRequest], take: Callable[[VerifyReply], None]
    ) -> Sequence[VerifyReply]:
        """One reply for each request, in order, when all have come; `take` gets each as it comes, if the way there can
        tell.

        Raises: WorkerLost when the engine is gone, and as `take`.
        """

    async def release(self, sessions: Sequence[str]) -> None:
        """Free what these sessions hold; unknown ones are ignored."""


class DraftPort(Protocol):
    """One draft engine."""

    async def draft(self, batch: Sequence[DraftRequest]) -> Sequence[DraftReply]:
        """One reply for each request, in order. Raises: WorkerLost when the engine is gone."""

    async def grow(self, request: DraftRequest, take: Callable[[DraftUpdate], None]) -> DraftReply:
        """Grow the draft tree continuously and call `take` after each pass.

        The reply ends it: a later message has replaced it, or `Missing`. Raises: WorkerLost when the engine is gone.
        """

    async def release(self, sessions: Sequence[str]) -> None:
        """Free what these sessions hold; unknown ones are ignored."""


Port_co = TypeVar("Port_co", covariant=True)


class Lease(Protocol[Port_co]):
    """A session's lease of one engine, from grant to release."""

    @property
    def name(self) -> str:
        """The session's name on the engine; each lease has another, so that the end of one cannot free the next."""

    @property
    def engine_id(self) -> str:
        """Names the engine's incarnation: equal ids mean that requests may share a call."""

    @property
    def epoch(self) -> int:
        """Part of the stamp of every message; a restarted engine has another one."""

    @property
    def port(self) -> Port_co: ...

    def release(self) -> None:
        """End the lease; returns at once, may be called twice, and survives the caller's cancellation."""


class Leases(Protocol):
    """Grants leases on engines."""

    async def take_target(self, session: str, tokens: Sequence[int] = ()) -> Lease[TargetPort]:
        """If possible on a replica that has computed a prefix of `tokens`.

        Raises: Unavailable when no replica grants a lease in time.
        """

    async def take_draft(self, session: str, tokens: Sequence[int] = (), draft: int = 0) -> Lease[DraftPort]:
        """On an engine of the draft with this number, of those that the service has.

        Raises: Unavailable when there is no such draft, or none of its engines grants a lease in time.
        """


class Forced(Protocol):
    """What the grammar, or the template, of one output forces."""

    def after(self, output: Sequence[int], max_depth: int) -> Guesses:
        """What must follow `output`, at most `max_depth` tokens in a row; `output` only grows from one question to the
        next. It never waits: nothing is forced until the grammar has been compiled. Raises: BadGuesserInput
        where it does not compile, or cannot be followed.
        """


class Grammars(Protocol):
    """Compiles grammars beside the event loop, for one vocabulary."""

    def forced(self, grammar: Grammar, *, is_binding: bool = True) -> Forced:
        """Of a new output; returns at once. One that it does not bind may leave it: then nothing is forced any more."""


class Clock(Protocol):
    """The clock, so that tests can replace it."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""

    async def sleep(self, duration_s: float) -> None: ...
