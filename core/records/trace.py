"""Engine calls of a stream, to show where the time goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.records.engine import Timing


class Call(StrEnum):
    VERIFY = "verify"
    BLOCK = "block"
    GROWTH = "growth"
    """One pass of a draft that grows continuously."""
    PREFILL = "prefill"
    """Prefill of the draft. The target's prefill is the verification of an empty block."""


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """A block that the target verified, and its verdict."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Index of each token's parent, or -1 for the last committed token."""
    sources: tuple[str, ...]
    """Name of each token's guesser."""
    path: tuple[int, ...]
    """Indices of the accepted tokens, in order."""
    next_token: int
    """The target's own token after them."""


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One answered engine call of a stream."""

    call: Call
    sent_s: float
    """Seconds since the start of the stream, by the orchestrator's clock. The same holds for `received_s`."""
    received_s: float
    num_guesses: int
    """Number of nodes verified or grown."""
    num_used: int = 0
    """Verification: number of accepted nodes. Growth: number of nodes in the next block, if this was the last call
    before it."""
    timing: Timing | None = None
    verified: VerifiedBlock | None = None
    """Only for a verification."""
