"""Observed costs of an engine: its passes and the way to it; and estimated durations of rounds.

Knows seconds, rows and branches; must not know what a pass is for.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from core.costs.pass_cost import NUM_RECENT, Curve, PassCost
from core.records import Timing
from core.speculation import Floats

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Possible numbers of rows of one session in a pass of the draft. Worth 1.06 against always 8 (`bench ablation`,
docs/adr/control)."""


class EngineCost:
    """Observed costs of one kind of engine: its passes, and the round trip to it."""

    def __init__(self, prior_s: float) -> None:
        self.passes = PassCost(prior_s)
        self._wires: deque[float] = deque([0.001], maxlen=NUM_RECENT)
        self._guessing: deque[float] = deque([0.0], maxlen=NUM_RECENT)
        self._last: Timing | None = None

    def __repr__(self) -> str:
        return f"<EngineCost {self.passes}, wire {self.wire_s * 1e3:.1f} ms>"

    @property
    def wire_s(self) -> float:
        """Seconds of a round trip on the wire and in the batcher.

        The lower quartile of recent round trips, since many of them may have waited behind a prompt.
        """
        return sorted(self._wires)[len(self._wires) // 4]

    @property
    def guessing_s(self) -> float:
        """Seconds that the head in the engine takes after a pass; 0 unless most recent calls asked it."""
        return median(self._guessing)

    def observe(self, timing: Timing, elapsed_s: float, branches: float = 0.0, *, is_call: bool = True) -> None:
        """Record one answered call; or, if not `is_call`, the engine's work since its last answer.

        `branches` is the number of branches in its passes, 0 if other sessions shared the passes. Sessions that share a
        pass report the same timing, which is counted once. A timing that claims more than `elapsed_s` plus one wire
        time is ignored; the wire time allows for a late previous answer. The head's time is none of the passes': it is
        spent for any number of guesses, and would be taken for the price of the first (`guessing_s`).
        """
        within_s, passes_s = timing.waited_s + timing.computed_s, timing.computed_s - timing.guessing_s
        is_possible = min(timing.waited_s, timing.guessing_s, passes_s) >= 0 and within_s <= elapsed_s + self.wire_s
        if timing.num_passes < 1 or not is_possible:
            return
        if is_call:
            self._wires.append(max(0.0, elapsed_s - within_s))
            self._guessing.append(timing.guessing_s)
        if self._last is None or not _is_same(timing, self._last):
            self.passes.observe(timing.num_rows / timing.num_passes, passes_s / timing.num_passes, branches)
        self._last = timing


def _is_same(one: Timing, other: Timing) -> bool:
    """Whether two answers report the same passes."""
    is_same_work = (one.num_rows, one.num_passes) == (other.num_rows, other.num_passes)
    return is_same_work and math.isclose(one.computed_s, other.computed_s, rel_tol=1e-9)


@dataclass(frozen=True)
class CostModel:
    """Estimated durations of passes and rounds, at one moment."""

    verify_pass_s: Curve
    draft_pass_s: Curve
    verify_wire_s: float
    draft_wire_s: float
    num_verifying: float = 1.0
    """Number of sessions that share a pass of the target."""
    num_drafting: float = 1.0
    """Number of sessions that share a pass of the draft."""
    branch_s: float = 0.0
    """Seconds that a branch adds to a pass of the target."""
    guessing_s: float = 0.0
    """Seconds that the target's head takes before each verdict, for any number of guesses."""

    @property
    def is_shared(self) -> bool:
        """Whether several sessions share the passes of the target."""
        return self.num_verifying >= 2.0

    def verify_s(self, nodes: float, branches: float = 0.0) -> float:
        """Seconds of a round trip to the target with a block of `nodes` nodes, if all sessions send such a block."""
        pass_s = self.verify_pass_s(self.num_verifying * (nodes + 1.0)) + self.num_verifying * branches * self.branch_s
        return pass_s + self._beside_pass_s

    @property
    def _beside_pass_s(self) -> float:
        return self.guessing_s + self.verify_wire_s

    def verify_times(self, num_nodes: int) -> Floats:
        """Return `verify_s` of blocks of 0 to `num_nodes` nodes without branches.  # [num_nodes + 1]"""
        known = self._verify_times
        for nodes in range(len(known), num_nodes + 1):
            known.append(self.verify_s(nodes))
        return np.array(known[: num_nodes + 1])

    @cached_property
    def _verify_times(self) -> list[float]:
        return []

    @cached_property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding, which does not ask the target's head."""
        return 1.0 / (self.verify_s(0) - self.guessing_s)

    def draft_s(self, rows: float, num_passes: int) -> float:
        """Seconds of a round trip to the draft for `num_passes` passes with `rows` rows of each session."""
        return num_passes * self.draft_pass_s(self.num_drafting * rows) + self.draft_wire_s

    def turn_s(self, nodes: float, rows: float, num_passes: int) -> float:
        """Seconds of a round without pipelining: `num_passes` passes of the draft, then a block of `nodes` nodes.

        A pass of the draft has `rows` rows of each session.

        Sessions that share passes split into groups, which are verified one after another. The estimate uses as many
        groups as it takes to hide the drafting of one group behind the verification of the others.
        """
        if not self.is_shared:
            return self.verify_s(nodes) + self.draft_s(rows, num_passes)
        groups, most = 1, int(self.num_verifying)
        hidden_s, drafting_s = 0.0, math.inf
        while hidden_s < drafting_s and groups < most:
            groups += 1
            group_s = self.verify_pass_s(self.num_verifying / groups * (nodes + 1.0)) + self._beside_pass_s
            drafting_s = num_passes * self.draft_pass_s(self.num_drafting / groups * rows) + self.draft_wire_s
            hidden_s = (groups - 1) * group_s
        return group_s + max(hidden_s, drafting_s)

    @cached_property
    def rows_worth(self) -> int:
        """Rows per session and pass of the draft with the most yield per second.

        The r-th likeliest row is assumed to be needed 1/r as often as the first.
        """
        return max(WIDTHS, key=lambda rows: math.log1p(2.0 * rows) / self.draft_pass_s(self.num_drafting * rows))
