"""The named policies over a session's tree: simple rules, for those who want them and to compare with.

How the draft grows is the same as for all others; a rule says what is verified, and whether to wait. Knows shapes and
settings; must not know tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from core.config import SpeculationConfig
from core.records import GenerationRequest
from core.speculation import Measure, Part, Steady
from orchestrator.policy.learning import USUAL_TAIL
from orchestrator.policy.policy import RoundSeen
from orchestrator.policy.rules import RULES
from orchestrator.policy.shared_estimates import Doing, Knowledge
from orchestrator.policy.tree_policy import TreePilot, TreeView

OWN = (0.0, 1.0)
"""Chances that are the draft's own leads, taken as they are."""
ALIKE = (3.0, 0.0)
"""Each first candidate is right with a chance of 0.95: so a draft grows chains, below many outcomes of a block."""


class NamedPilot(TreePilot):
    """What they share: without the draft's guesses they take what is looked up."""

    _is_whole = False
    """Whether the block that was chosen last is as the rule wants it, or as it will ever be."""

    def choose(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        depth, nodes = min(self._gamma, max_depth), min(max_nodes, self.max_nodes)
        chosen = self._chosen(tree, nodes, depth)
        if len(chosen) or tree.has_drafted:
            return chosen
        return tree.best(min(nodes, self.num_to_look_up(max_depth)), max_depth)

    def is_worth_waiting(self, tree: TreeView, max_depth: int, next_s: float, num_passes: int) -> bool:  # noqa: ARG002
        return not self._is_whole and num_passes <= self._gamma

    @property
    def _gamma(self) -> int:
        return self._max_depth

    def _chosen(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        raise NotImplementedError


class ChainPilot(NamedPilot):
    """A chain of the draft's first candidates, as long as the rule says."""

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        self.measure: Measure = RULES[config.policy].measure
        super().__init__(request, config, knowledge)
        self._rule = RULES[config.policy](self._max_depth, config)
        if self._max_depth:
            knowledge.begin(self.doing, f"{self.kind}: gamma {self._gamma}, {self._rule.why}")

    @property
    def doing(self) -> Doing:
        return Doing(self._gamma, self._gamma)

    @property
    def max_nodes(self) -> int:
        return self._max_depth

    @property
    def _gamma(self) -> int:
        return self._rule.gamma

    @property
    def _sureness(self) -> tuple[float, float]:
        return ALIKE

    def _chosen(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        chain = tree.first_chain(min(max_nodes, max_depth))
        num_kept = self._rule.num_kept(chain.leads)
        self._is_whole = num_kept < len(chain) or len(chain) == min(max_nodes, max_depth)
        return chain.head(num_kept)

    def keeps(self, leads: Sequence[float]) -> bool:
        return len(leads) <= self._gamma and self._rule.num_kept(leads) == len(leads)

    def _chain(self, depth: int) -> Steady:
        return super()._chain(min(depth, self._gamma))

    def _in_turn(self, depth: int) -> Steady:
        depth, rule = min(depth, self._gamma), self._rule
        self._asked_rows = (1,) * depth
        return Steady(
            1,
            depth,
            rule.min_reach,
            OWN if rule.min_reach else ALIKE,
            num_passes=depth,
            fanout=1,
            measure=rule.measure,
            min_sureness=rule.min_sureness,
        )

    def saw_round(self, seen: RoundSeen) -> None:
        super().saw_round(seen)
        num_guesses = len(seen.shape) - seen.shape.num_looked_up
        before = self._gamma
        if num_guesses:
            self._rule.saw(num_guesses, len(seen.path))
        if self._gamma != before:
            reason = f"gamma {before} -> {self._gamma}, {len(seen.path)} of {num_guesses} guesses were accepted"
            self._known.change(self.doing, f"{self.kind}: {reason}")


class StaticTreePilot(NamedPilot):
    """Always the `max_block_tokens` likeliest nodes of the draft's tree, by the draft's own chances.

    Nothing is learned or searched. Source: EAGLE-2's trees (Li et al. 2024, arXiv 2406.16858).
    """

    measure = Measure.LEAD

    def __init__(self, request: GenerationRequest, config: SpeculationConfig, knowledge: Knowledge) -> None:
        super().__init__(request, config, knowledge)
        if self._max_depth:
            why = f"always the {self.max_nodes} likeliest nodes, at most {self._max_depth} deep"
            knowledge.begin(self.doing, f"{self.kind}: gamma {self._max_depth}, {why}")

    def _chosen(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        nodes = tree.best(max_nodes, max_depth).drafted()
        self._is_whole = len(nodes) == max_nodes
        return nodes

    def _in_turn(self, depth: int) -> Steady:
        """As many rows a pass as the tree is wide on average."""
        rows = math.ceil(self.max_nodes / depth)
        self._asked_rows = (rows,) * depth
        return Steady(rows, depth, sureness=OWN, tail=USUAL_TAIL, num_passes=depth)

    @property
    def _sureness(self) -> tuple[float, float]:
        return OWN
