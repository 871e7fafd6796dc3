"""Events (into a session) and commands (out of a session).

A session does no I/O: `dispatch.runner` creates the events and executes the commands. A record with only one meaning is
a command by itself: a `VerifyRequest` and a `Continuation` go to the leased target, a `DraftRequest` to the draft whose
lease its stamp names, a `Chunk` to the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import OutriderError
from core.records import (
    Chunk,
    Continuation,
    DraftReply,
    DraftRequest,
    Stamp,
    VerifyReply,
    VerifyRequest,
)

# Events


@dataclass(frozen=True, slots=True)
class TargetLeased:
    """A lease on a target engine was granted."""

    name: str
    epoch: int


@dataclass(frozen=True, slots=True)
class TargetReplied:
    """The target answered a VerifyRequest."""

    reply: VerifyReply
    sent_s: float = 0.0
    """Seconds on the orchestrator's clock, like `received_s`."""
    received_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The leased target engine is gone."""

    epoch: int
    reason: str
    is_planned: bool = False
    """Whether the engine was shutting down as planned. Then the loss is not counted as a failure."""


@dataclass(frozen=True, slots=True)
class DraftLeased:
    """A lease on a draft engine was granted."""

    name: str
    epoch: int
    draft: int = 0
    """Number of the draft, here and in the messages below: 0 is the first."""


@dataclass(frozen=True, slots=True)
class DraftNotLeased:
    """No engine of a draft granted a lease."""

    draft: int = 0


@dataclass(frozen=True, slots=True)
class DraftReplied:
    """The draft sent new nodes, or ended a DraftRequest without them."""

    reply: DraftReply
    sent_s: float = 0.0
    received_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftLate:
    """The draft has not answered this request before the timeout."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class DraftLost:
    """The leased draft engine is gone."""

    epoch: int
    draft: int = 0


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The stream must end now: cancelled, past its deadline, or without a target. The client gets the error."""

    error: OutriderError


DraftEvent = DraftLeased | DraftNotLeased | DraftReplied | DraftLate | DraftLost
Event = TargetLeased | TargetReplied | TargetLost | DraftEvent | Abandoned

# Commands


@dataclass(frozen=True, slots=True)
class LeaseTarget:
    """Take a lease on a target."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseDraft:
    """Take a lease on a draft."""

    delay_s: float = 0.0
    draft: int = 0


@dataclass(frozen=True, slots=True)
class Await:
    """Deliver DraftLate if `timeout_s` passes without growth."""

    stamp: Stamp
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """End the stream with this error."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class ReleaseTarget:
    """Release the lease on the target."""


@dataclass(frozen=True, slots=True)
class ReleaseDraft:
    """Release the lease on the draft."""

    draft: int = 0


Command = (
    LeaseTarget
    | LeaseDraft
    | VerifyRequest
    | Continuation
    | DraftRequest
    | Await
    | Chunk
    | Fail
    | ReleaseTarget
    | ReleaseDraft
)
