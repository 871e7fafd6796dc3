"""The input of a policy, and its report for people.

A policy decides for one session how far and how wide to guess (`tree_policy`). It sees shapes, ranks, confidences and
times. No token id reaches it: so any rule can drop a guess because of q but never because of the drawn token, which in
rejection and block mode would change the output's law (docs/exactness.md, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from core.records import Timing
from core.speculation import UNRANKED


class Found(StrEnum):
    """Whether the next block was ready when the verdict came."""

    HIT = "hit"
    MISS = "miss"
    """No node of the draft is below the end of the verdict."""
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Shape:
    """A block as a policy sees it; node by node, parents first, likelier ones earlier. All empty: no guesses."""

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    """The draft's rank of each node among its siblings; 0 for a draw, `UNRANKED` for a node that is not the draft's."""
    confidence: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_looked_up(self) -> int:
        """Number of guesses that are not the draft's."""
        return self.ranks.count(UNRANKED)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """One verdict."""

    shape: Shape
    """The block that was verified."""
    path: tuple[int, ...]
    """The accepted nodes."""
    found: Found
    elapsed_s: float
    """Seconds from sending the block, or from the verdict with which the target continued, to this verdict."""
    timing: Timing | None
    is_continued: bool = False
    """Whether the target continued with it by itself: then no message travelled."""
    unverified: tuple[float, bool] | None = None
    """The draft's margin for its first candidate at the end of the path, and whether that was the token, if the block
    did not have it. So the estimates learn about a draft whose guesses are never verified.
    """
    late_hit: bool | None = None
    """Where the draft had told of nothing when the round began, and of something since: whether of the next token, and
    no guesser had."""
    gained: int | None = None
    """Where the block had questions of a guesser, the accepted guesses that were its own."""


@dataclass(frozen=True, slots=True)
class ControlReport:
    """The present estimates and choices of one orchestrator's policies, for people."""

    policy: str
    num_sessions: int
    draft_tokens: int
    """Depth in tokens of the blocks that are being drafted; 0 while the draft rests."""
    block_tokens: int
    reason: str
    """The reason of the last change, with the figures that decided it."""
    acceptance: tuple[float, ...]
    """Estimated chance of each position of a chain, given that those before it were accepted."""
    hit_rate: float
    verify_s: Mapping[int, float] = field(default_factory=dict)
    """Estimated time of a target pass, by rows."""
    draft_s: Mapping[int, float] = field(default_factory=dict)
    """Estimated time of a draft pass, by rows."""
    wire_s: float = 0.0
    branch_s: float = 0.0
    """Estimated time that each branch of a block adds to a target pass, beside that of its rows."""
    num_changes: int = 0
