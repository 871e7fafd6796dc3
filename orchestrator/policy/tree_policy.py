"""A policy's decisions for one session, in three layers: growth, choice and offers. Also learns from outcomes.

Knows shapes, probabilities, costs and times; must not know tokens. The policies are in `adaptive` and `named`.
"""

from __future__ import annotations

from abc import abstractmethod

from core.speculation import ROOT, Measure, num_branches
from orchestrator.policy.mode_choice import MeasuredRound
from orchestrator.policy.offers import Offers
from orchestrator.policy.policy import Found, RoundOutcome


class TreePolicy(Offers):
    """One session's policy. No method blocks."""

    why = ""
    """The policy's reason, shown in reports."""

    def observe_round(self, outcome: RoundOutcome) -> None:
        known, shape, timing = self._known, outcome.shape, outcome.timing
        self._goes_plainly = None
        known.observe_verdict(timing)
        if outcome.found is not Found.NOT_ASKED:
            known.hits.observe(outcome.found is Found.HIT)
        if timing is not None:
            is_alone = (timing.num_rows, timing.num_passes) == (1 + len(shape), 1)
            branches = num_branches(shape.parents) if is_alone else 0
            known.verify.observe(timing, outcome.elapsed_s, branches, is_call=not outcome.is_continued)
        first = {shape.parents[node]: node for node, rank in enumerate(shape.ranks) if rank == 0}
        judged = [node for parent in (ROOT, *outcome.path) if (node := first.get(parent)) is not None]
        for node in judged:
            self.observe_guess(shape.confidence[node], node in outcome.path)
        if outcome.unverified is not None:
            self.observe_guess(*outcome.unverified)

    def observe_guess(self, confidence: float, is_accepted: bool) -> None:
        """Record whether the draft's first candidate at one position was the committed token."""
        self._learned.accepted.observe(is_accepted)
        if self.measure is Measure.MARGIN:
            self._learned.calibration.observe(confidence, is_accepted)

    @abstractmethod
    def observe_interval(self, round_: MeasuredRound) -> None:
        """Record one round, from verdict to verdict."""
