"""The calls of a stream to its engines, which show where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.records.engine import Timing


class Call(StrEnum):
    """The kind of a call to an engine."""

    VERIFY = "verify"
    BLOCK = "block"
    GROWTH = "growth"
    """One pass of a draft that grows continuously."""
    PREFILL = "prefill"
    """Prefill of the draft; the target's prefill is the verification of an empty block."""


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """What the target verified, and what it said of it."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Of each token: the index of its parent, or -1 for the token that was committed last."""
    sources: tuple[str, ...]
    """Of each token: the name of its guesser."""
    path: tuple[int, ...]
    """Indices of the accepted tokens, in their order."""
    next_token: int
    """The target's own token behind them."""


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One answered call of a stream to an engine."""

    call: Call
    sent_s: float
    """Seconds since the stream began, on the orchestrator's clock, like `received_s`."""
    received_s: float
    num_guesses: int
    """Number of nodes verified or grown."""
    num_used: int = 0
    """Number of verified nodes that were accepted; of growth, the nodes in the next block, if this was the last call
    before it."""
    timing: Timing | None = None
    verified: VerifiedBlock | None = None
    """Of a verification alone."""
