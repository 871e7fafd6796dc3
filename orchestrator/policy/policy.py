"""What a policy is told, and what it tells people.

A policy decides for one session how far and how wide to guess (`tree_policy`). It sees shapes, ranks,
confidences and times. No token id reaches it: so a rule of its own, whatever it may be, can drop a guess for what q
looked like but never for what was drawn, which in rejection and block mode would change the output's law
(docs/exactness.md, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from core.records import Timing
from core.speculation import UNRANKED


class Found(StrEnum):
    """What became of the wish to have the next block ready when the verdict came."""

    HIT = "hit"
    MISS = "miss"
    """Nothing that the draft has told of is below the verdict's end."""
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Shape:
    """A block as a policy sees it; node by node, parents first, likelier ones earlier. All empty: no guesses."""

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    """The draft's, of each node among its siblings; 0 for what it drew, `UNRANKED` where it told of no such node."""
    confidence: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_looked_up(self) -> int:
        """Guesses that are not the draft's."""
        return self.ranks.count(UNRANKED)


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One verdict."""

    shape: Shape
    """What was verified."""
    path: tuple[int, ...]
    """Accepted nodes."""
    found: Found
    elapsed_s: float
    """From sending the block, or from the verdict with which the target went on with it, to having this one."""
    timing: Timing | None
    is_continued: bool = False
    """Whether the target went on with it by itself: then nothing travelled."""
    unverified: tuple[float, bool] | None = None
    """How sure the draft was of its first candidate where the path ended, and whether that was the token; where the
    block did not have it. So a draft is learned about that is never believed.
    """


@dataclass(frozen=True, slots=True)
class ControlReport:
    """What one orchestrator's policies know and do at the moment, for people."""

    policy: str
    num_sessions: int
    draft_tokens: int
    """Depth of the blocks that are being drafted; 0 while the draft rests."""
    block_tokens: int
    reason: str
    """Why the last change was made, with the figures that decided it."""
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
