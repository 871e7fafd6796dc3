"""Interfaces of the orchestrator to engines, leases, grammars and the clock.

`deploy` implements them over Ray, tests with fakes, and the simulator with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from core.records import Adapter, DraftReply, DraftRequest, Grammar, TargetRequest, VerifyReply
from core.speculation import Guesses

Request_contra = TypeVar("Request_contra", contravariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)
Port_co = TypeVar("Port_co", covariant=True)


class EnginePort(Protocol[Request_contra, Reply_co]):
    """An engine, for the sessions that have leased it. A reply belongs to the request with the same stamp."""

    async def exchange(self, batch: Sequence[Request_contra], take: Callable[[Reply_co], None]) -> None:
        """Send the requests. `take` gets each reply on arrival. Return when every request has its last one (`is_last`).

        Raises: WorkerLost when the engine is gone, and whatever `take` raises. No further reply arrives then.
        """

    async def release(self, sessions: Sequence[str]) -> None:
        """Free the state of these sessions; unknown sessions are ignored."""


TargetPort = EnginePort[TargetRequest, VerifyReply]
DraftPort = EnginePort[DraftRequest, DraftReply]


class Lease(Protocol[Port_co]):
    """A session's lease of one engine, from grant to release."""

    @property
    def name(self) -> str:
        """The session's name on the engine, unique per lease: releasing one lease cannot free the next."""

    @property
    def engine_id(self) -> str:
        """Identifies the engine's incarnation. Requests to engines with equal ids may share a call."""

    @property
    def epoch(self) -> int:
        """Part of the stamp of every message; changes when the engine restarts."""

    @property
    def port(self) -> Port_co: ...

    def release(self) -> None:
        """End the lease. Returns at once, may be called twice, and survives the caller's cancellation."""


class Leases(Protocol):
    async def take_target(
        self, session: str, tokens: Sequence[int] = (), adapter: Adapter | None = None
    ) -> Lease[TargetPort]:
        """Lease a target, preferably a replica that has already computed a prefix of `tokens`.

        With an `adapter`, the engine has loaded it. Raises: Unavailable when no replica grants a lease in time.
        """

    async def take_draft(self, session: str, tokens: Sequence[int] = (), draft: int = 0) -> Lease[DraftPort]:
        """Lease an engine of the draft model with index `draft` among the service's drafts.

        Raises: Unavailable when there is no such draft, or none of its engines grants a lease in time.
        """


class ForcedTokens(Protocol):
    """Tokens that the grammar or template of one output forces."""

    def after(self, output: Sequence[int], max_depth: int) -> Guesses:
        """Return the tokens that must follow `output`: at most `max_depth`, in a row.

        `output` only grows between calls. Never waits: no token is forced until the grammar has been compiled. Raises:
        BadGuesserInput if the grammar does not compile or cannot be followed.
        """


class Grammars(Protocol):
    """Compiles grammars outside the event loop, for one vocabulary."""

    def forced(self, grammar: Grammar, *, is_binding: bool = True) -> ForcedTokens:
        """Return the forced tokens of a new output, without waiting for compilation. With `is_binding` false the output
        may leave the grammar; nothing is forced from there on.
        """


class Clock(Protocol):
    """Time; simulated in tests."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""

    async def sleep(self, duration_s: float) -> None: ...
