"""What goes into a session (events) and what comes out of it (commands).

A session does no I/O: `dispatch.runner` turns what happens into events, and carries the commands out. A record that can
mean one thing only is a command by itself: a `VerifyRequest` and a `Continuation` go to the leased target, a
`DraftRequest` to the draft whose lease its stamp names, a `Chunk` to the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import OutriderError
from core.records import (
    Chunk,
    Continuation,
    DraftReply,
    DraftRequest,
    DraftUpdate,
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
    """On the orchestrator's clock, as is `received_s`."""
    received_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The leased target engine is gone."""

    epoch: int
    reason: str
    is_planned: bool = False
    """It was to stop, and is left: not a failure, and not counted as one."""


@dataclass(frozen=True, slots=True)
class DraftLeased:
    """A lease on a draft engine was granted."""

    name: str
    epoch: int
    draft: int = 0
    """Which of the service's drafts, here and in the messages below: 0 is the first."""


@dataclass(frozen=True, slots=True)
class DraftNotLeased:
    """No engine of a draft granted a lease."""

    draft: int = 0


@dataclass(frozen=True, slots=True)
class DraftReplied:
    """The draft answered a DraftRequest; where growth does not end by itself, DraftGrew came after each pass."""

    reply: DraftReply
    sent_s: float = 0.0
    received_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftGrew:
    """The draft tells what has grown."""

    draft_update: DraftUpdate
    received_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftLate:
    """The draft has not answered this request in time."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class DraftLost:
    """The leased draft engine is gone."""

    epoch: int
    draft: int = 0


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The stream is to end now: cancelled, past its deadline, or without a target. The error is for the client."""

    error: OutriderError


DraftEvent = DraftLeased | DraftNotLeased | DraftReplied | DraftGrew | DraftLate | DraftLost
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
    """When `timeout_s` passes without growth, say DraftLate."""

    stamp: Stamp
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """End the stream with this error."""

    error: OutriderError


@dataclass(frozen=True, slots=True)
class ReleaseTarget:
    """Give the target's lease back."""


@dataclass(frozen=True, slots=True)
class ReleaseDraft:
    """Give the draft's lease back."""

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
