"""What things cost at the moment, in seconds and in tokens that the time would have yielded.

Knows curves of costs and how many sessions share an engine; must not know how either was learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.costs.curve import Curve

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Rows that one session may have in a pass of the draft; those further down its list are hardly ever needed."""
SHARED_SESSIONS = 2.0
"""From here on sessions meet in the passes of an engine."""


@dataclass(frozen=True, slots=True)
class Economy:
    """Passes and wires, by rows."""

    verify_pass_s: Curve
    draft_pass_s: Curve
    verify_wire_s: float
    draft_wire_s: float
    num_verifying: float = 1.0
    """Sessions that share a pass of the target."""
    num_drafting: float = 1.0
    """Sessions that share a pass of the draft."""
    branch_s: float = 0.0
    """What a branch adds to a pass of the target."""
    _verify_times: list[NDArray[np.float64]] = field(default_factory=list, init=False, repr=False, compare=False)
    """What `verify_times` has found."""
    _rows_worth: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """What `rows_worth` has."""

    @property
    def is_shared(self) -> bool:
        """Whether sessions meet in the passes of the target."""
        return self.num_verifying >= SHARED_SESSIONS

    def verify_s(self, nodes: float, branches: float = 0.0) -> float:
        """A round trip to the target with a block of `nodes` nodes, when all send such a block."""
        pass_s = self.verify_pass_s(self.num_verifying * (nodes + 1.0)) + self.num_verifying * branches * self.branch_s
        return pass_s + self.verify_wire_s

    def verify_times(self, max_nodes: int) -> NDArray[np.float64]:
        """The same for blocks of 0 to `max_nodes` nodes, without branches."""
        known = self._verify_times
        if not known or len(known[-1]) <= max_nodes:
            known[:] = [np.array([self.verify_s(float(nodes)) for nodes in range(max_nodes + 1)])]
        return known[-1][: max_nodes + 1]

    def draft_s(self, rows: tuple[int, ...]) -> float:
        """A round trip to the draft for one pass an entry, each with that number of rows of each session."""
        return sum(self.draft_pass_s(self.num_drafting * row) for row in rows if row) + self.draft_wire_s

    def in_turn_s(self, nodes: float, rows: tuple[int, ...], branches: float = 0.0) -> float:
        """A round that drafts in passes of so many rows, and then verifies a block of so many nodes."""
        return self.verify_s(nodes, branches) + self.draft_s(rows)

    def rows_worth(self) -> int:
        """Rows a session that yield most for the time of a pass: the r-th likeliest is needed about 1/r as often."""
        if not self._rows_worth:
            per_s = [math.log1p(2.0 * rows) / self.draft_pass_s(self.num_drafting * rows) for rows in WIDTHS]
            self._rows_worth.append(WIDTHS[per_s.index(max(per_s))])
        return self._rows_worth[0]
