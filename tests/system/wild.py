"""Policies that decide by dice: blocks of any shape, cut anywhere, drafts that rest or come too late.

No rule that a policy may follow can change the output, so dice stand for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from core.config import SpeculationConfig
from core.records import GenerationRequest
from core.speculation.calibration import USUAL_TAIL
from core.speculation.growth import Measure, TreeSpec
from core.speculation.token_tree import ROOT
from orchestrator.policy.named import NamedPolicy
from orchestrator.policy.policy import ControlReport, RoundOutcome
from orchestrator.policy.shared_estimates import SharedEstimates

MAX_NODES = 24
PATIENT = SpeculationConfig(draft_retry_s=0.01, breaker_rounds=10**6)
"""No breaker: dice are often impatient, and a draft that is given back guesses nothing."""


class WildPolicy(NamedPolicy):
    """The dice of one session."""

    measure = Measure.MARGIN

    def __init__(
        self, random: Random, request: GenerationRequest, config: SpeculationConfig, known: SharedEstimates
    ) -> None:
        super().__init__(request, config, known)
        self.random = random
        self.rounds: list[RoundOutcome] = []

    @property
    def timeout_s(self) -> float:
        return self.random.choice((0.0, 0.003, *[5.0] * 20))

    def wants_turn(self) -> bool:
        return self.random.random() < 0.9

    def _going_on(self, depth: int) -> TreeSpec:
        return TreeSpec(self.random.randrange(1, 9), depth, calibration=self._calibration, tail=USUAL_TAIL)

    def _in_turn(self, depth: int) -> TreeSpec:
        num_passes = self.random.randrange(1, 6)
        return TreeSpec(self.random.randrange(1, 9), depth, tail=USUAL_TAIL, num_passes=num_passes)

    def _drawn_tree(self, depth: int) -> TreeSpec:
        self._num_drawn = self.random.randrange(0, MAX_NODES)
        tail = USUAL_TAIL[: self.random.randrange(4)]
        num_passes = self.random.randrange(1, depth + 1)
        calibration = (self.random.uniform(-2.0, 2.0), 0.0)
        rows = self.random.randrange(1, 9)
        return TreeSpec(rows, depth, calibration=calibration, tail=tail, num_passes=num_passes, fanout=1 + len(tail))

    def _chain(self, depth: int) -> TreeSpec:
        return super()._chain(self.random.randrange(1, depth + 1))

    def choose(self, tree, max_nodes, max_depth):
        """Any of those that have grown, each with all above it."""
        part, chosen = tree.best(1000, min(max_depth, self.max_depth)), list[int]()
        for place, parent in enumerate(part.parents):
            is_fitting = parent in (ROOT, *chosen) and len(chosen) < min(max_nodes, MAX_NODES)
            if is_fitting and self.random.random() < 0.8:
                chosen.append(place)
        return part.take(chosen)

    def keeps(self, confidences):
        """A rule may look at all that it is shown."""
        return self.random.random() < 0.5 + 0.5 * confidences[-1]

    def is_worth_drawing(self, path_prob):
        """The rule looks at what was said up to the guess in question."""
        return len(path_prob) <= self.max_depth and self.random.random() < 0.5 + 0.5 * path_prob[-1]

    def is_worth_waiting(self, num_passes: int, has_drafted: bool) -> bool:
        return self.random.random() < 0.5

    @property
    def wants_rest(self) -> bool:
        return self.random.random() < 0.02

    def observe_round(self, seen: RoundOutcome) -> None:
        super().observe_round(seen)
        self.rounds.append(seen)


@dataclass
class WildPolicies:
    """Dice for every session, all from one seed."""

    seed: int
    max_depth: int = 6
    policies: list[WildPolicy] = field(default_factory=list)
    known: SharedEstimates = field(default_factory=lambda: SharedEstimates())

    def policy(self, request: GenerationRequest) -> WildPolicy:
        depth = self.max_depth if request.max_draft_tokens is None else request.max_draft_tokens
        random = Random(f"{self.seed} {len(self.policies)}")
        config = SpeculationConfig(max_draft_tokens=depth, pipelining=random.random() < 0.7)
        self.policies.append(WildPolicy(random, request, config, self.known))
        return self.policies[-1]

    def report(self) -> ControlReport:
        return ControlReport("wild", len(self.policies), 0, 0, "dice", (), 0.0)
