"""Input of a policy, and its report. The policies themselves are in `adaptive` and `named`.

A policy decides for one session how deep and how wide to draft (`tree_policy`). It sees shapes, ranks, confidences and
times, never token ids. A rule can therefore drop a guess because of q but never because of the drawn token, which in
rejection and block mode would change the output's distribution (docs/exactness.md, section 4).
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
    """The draft has no node below the end of the verdict."""
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a block: its nodes, parents first, likelier ones earlier. Empty without guesses."""

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    """Rank of each node among the draft's siblings; 0 for a draw, `UNRANKED` for a node from another source."""
    confidence: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_looked_up(self) -> int:
        """Number of guesses from other sources than the draft."""
        return self.ranks.count(UNRANKED)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """Outcome of one verdict."""

    shape: Shape
    """Block that was verified."""
    path: tuple[int, ...]
    """Accepted nodes."""
    found: Found
    elapsed_s: float
    """Seconds from sending the block, or from the verdict after which the target continued, to this verdict."""
    timing: Timing | None
    is_continued: bool = False
    """Whether the target continued with the block by itself, without a message."""
    unverified: tuple[float, bool] | None = None
    """The draft's margin for its first candidate after the path, and whether the candidate was the next token. Set if
    the block did not contain the candidate, so that estimates also cover drafts whose guesses are never verified."""
    late_hit: bool | None = None
    """Whether the draft proposed the next token, though late, and no guesser did. None unless the draft had no nodes
    when the round began and sent some later."""
    gained: int | None = None
    """Number of accepted guesses of the source that asked questions; None without questions."""


@dataclass(frozen=True, slots=True)
class ControlReport:
    """Current estimates and choices of one orchestrator's policies."""

    policy: str
    num_sessions: int
    draft_tokens: int
    """Depth in tokens of the current blocks; 0 while the draft rests."""
    block_tokens: int
    reason: str
    """Reason of the last change, with the figures that decided it."""
    acceptance: tuple[float, ...]
    """Estimated chance that each position of a chain is accepted, given that the earlier ones were."""
    hit_rate: float
    verify_s: Mapping[int, float] = field(default_factory=dict)
    """Estimated seconds of a target pass, by rows."""
    draft_s: Mapping[int, float] = field(default_factory=dict)
    """Estimated seconds of a draft pass, by rows."""
    wire_s: float = 0.0
    branch_s: float = 0.0
    """Estimated seconds that each branch of a block adds to a target pass, besides its rows."""
    num_changes: int = 0
