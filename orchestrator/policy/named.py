"""Named policies: simple rules, used as baselines and by request.

The draft grows as in other policies; a rule says what to verify and whether to wait. Knows shapes and settings; must
not know tokens. A rule looks at q and never at the drawn token, so it can also be used if drafts sample
(docs/exactness.md, section 4).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

from core.config import SpeculationConfig
from core.records import GenerationRequest
from core.speculation import Measure, Part, TreeSpec
from orchestrator.policy.choice import TreeView
from orchestrator.policy.mode_choice import MeasuredRound
from orchestrator.policy.policy import RoundOutcome
from orchestrator.policy.shared_estimates import SharedEstimates
from orchestrator.policy.tree_policy import TreePolicy

FIRST_GAMMA = 4
"""Initial gamma of the heuristic. Source: transformers' schedule."""
DRAFT_CALIBRATION = (0.0, 1.0)
"""Calibration that takes the draft's margins as probabilities."""
FLAT_CALIBRATION = (3.0, 0.0)
"""Calibration that gives each first candidate a probability of 0.95. The draft then grows chains below many outcomes of
a block."""


@dataclass(frozen=True, slots=True)
class EndCondition:
    """Conditions that end a chain early."""

    why: str
    measure: Measure = Measure.MARGIN
    min_confidence: float = 0.0
    """Minimum value of `measure`: the chain ends at the first node where the draft is less confident."""
    min_path_prob: float = 0.0
    """Minimum path probability, the product of `measure` along the chain. The chain ends before the first guess below
    it."""

    def num_kept(self, confidences: Sequence[float]) -> int:
        """Return the number of a chain's guesses to verify. `confidences`: the draft's confidence before each guess."""
        pairs = zip(confidences, accumulate(confidences, operator.mul), strict=True)
        return sum(1 for _ in takewhile(lambda at: at[0] >= self.min_confidence and at[1] >= self.min_path_prob, pairs))


def end_condition_of(config: SpeculationConfig) -> EndCondition:
    """Return the rule of the configured policy. "static_tree" has chains if the draft samples."""
    least, floor, entropy = config.min_confidence, config.min_path_probability, config.max_entropy
    match config.policy:
        case "confidence":
            return EndCondition(f"while the largest probability of q is at least {least:g}", Measure.CONFIDENCE, least)
        case "entropy":
            return EndCondition(
                f"while the entropy of q is at most {entropy:g} nats", Measure.ENTROPY, math.exp(-entropy)
            )
        case "path_probability":
            return EndCondition(f"while the product of the draft's chances is at least {floor:g}", min_path_prob=floor)
        case "heuristic":
            return EndCondition("to begin with; +2 after a block that was accepted whole, -1 otherwise")
    return EndCondition("always")


class NamedPolicy(TreePolicy):
    """Common part of the named policies. Without draft guesses they use prompt lookup's."""

    _is_whole = False
    """Whether the last chosen block satisfies the rule, or cannot grow any more."""

    def choose(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        depth, nodes = min(self.gamma, max_depth), min(max_nodes, self.max_nodes)
        chosen = self._chosen(tree, nodes, depth)
        return chosen if len(chosen) or tree.has_drafted else tree.best(nodes, depth)

    def why_block(self, _path_prob: Sequence[float], _branches: int, _tree: TreeView) -> str:
        return f"policy {self.why}"

    def is_worth_asking(self, _num_nodes: int, _num_with: int) -> bool:
        return True

    def is_worth_waiting(self, num_passes: int, _has_drafted: bool) -> bool:
        return not self._is_whole and num_passes <= self.gamma

    def observe_interval(self, round_: MeasuredRound) -> None:
        """Do nothing: a fixed rule does not depend on the speed."""

    def _chosen(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        raise NotImplementedError


class ChainPolicy(NamedPolicy):
    """A chain of the draft's first candidates, as long as the rule allows."""

    _takes_trees = False

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, known: SharedEstimates) -> None:
        super().__init__(request, config, known)
        self._end_condition = end_condition_of(config)
        self.measure, self.why = self._end_condition.measure, self._end_condition.why
        self._is_heuristic = config.policy == "heuristic"
        self._gamma = min(FIRST_GAMMA, self.max_depth) if self._is_heuristic else self.max_depth
        self.max_nodes = self.max_depth

    @property
    def gamma(self) -> int:
        return self._gamma

    @property
    def _calibration(self) -> tuple[float, float]:
        return DRAFT_CALIBRATION if self._end_condition.min_path_prob and self.is_in_turn else FLAT_CALIBRATION

    def _chosen(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        max_guesses = min(max_nodes, max_depth)
        chain = tree.first_chain(max_guesses)
        num_kept = self._end_condition.num_kept(chain.confidences)
        self._is_whole = num_kept < len(chain) or len(chain) == max_guesses
        return chain.head(num_kept)

    def kept(self, tree: TreeView, max_nodes: int) -> Part:
        chain = tree.first_chain(min(max_nodes, self.max_grown_depth))
        return chain.head(self._end_condition.num_kept(chain.confidences))

    def keeps(self, confidences: Sequence[float]) -> bool:
        return len(confidences) <= self.gamma and self._end_condition.num_kept(confidences) == len(confidences)

    def _chain(self, depth: int) -> TreeSpec:
        return super()._chain(min(depth, self.gamma))

    def _in_turn(self, depth: int) -> TreeSpec:
        chain, end = self._chain(depth), self._end_condition
        return replace(
            chain, calibration=self._calibration, min_path_prob=end.min_path_prob, min_confidence=end.min_confidence
        )

    def observe_round(self, outcome: RoundOutcome) -> None:
        """Record the outcome; the heuristic adapts gamma to the verdict on the draft's guesses."""
        super().observe_round(outcome)
        num_guesses, num_accepted = len(outcome.shape) - outcome.shape.num_looked_up, len(outcome.path)
        if not (self._is_heuristic and num_guesses):
            return
        before = self.gamma
        self._gamma = max(1, min(before + (2 if num_accepted == num_guesses else -1), self.max_depth))
        if self.gamma != before:
            why = f"gamma {before} -> {self.gamma}, {num_accepted} of {num_guesses} guesses were accepted"
            self._known.note(f"{self.kind}: {why}", self.gamma, self.gamma)


class StaticTreePolicy(NamedPolicy):
    """Always the `max_block_tokens` likeliest nodes of the draft's tree, by the draft's own probabilities.

    Nothing is learned or searched. Source: EAGLE-2's trees (Li et al. 2024, arXiv 2406.16858).
    """

    why = "always the likeliest nodes, as many as a block may have"
    _calibration = DRAFT_CALIBRATION

    def _chosen(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        nodes = tree.best(max_nodes, max_depth).drafted()
        self._is_whole = len(nodes) == max_nodes
        return nodes
