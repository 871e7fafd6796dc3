"""Choice: which nodes of the draft tree to verify, and whether to wait for more of them.

Knows shapes and probabilities; must not know tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from core.speculation import Part
from orchestrator.policy.growth import Growth


class TreeView(Protocol):
    """The shape of a draft tree, without tokens; implemented by `core.speculation.SpeculationTree`."""

    @property
    def has_drafted(self) -> bool: ...

    def best(self, num_nodes: int, max_depth: int) -> Part: ...

    def first_chain(self, max_depth: int) -> Part: ...


class Choice(Growth, ABC):
    """Chooses among the nodes that have grown."""

    @property
    def rate(self) -> float:
        """Price of a second, in tokens."""
        return self._known.rate(self.kind)

    @abstractmethod
    def choose(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        """Return the nodes to verify next, parents first. If the draft samples, `keeps` is used instead."""

    @abstractmethod
    def why_block(self, path_prob: Sequence[float], branches: int, tree: TreeView) -> str:
        """Return why these nodes are verified, with the figures that decided it. `branches`: number of branches."""

    def kept(self, tree: TreeView, max_nodes: int) -> Part:
        """Return the nodes of a head that stay until it has corrected them."""
        return tree.best(max_nodes, self.max_grown_depth)

    def choose_draws(self, tree: TreeView, max_nodes: int, max_depth: int) -> Part:
        """Return the nodes to verify in a tree of draws. Their probabilities depend on position alone, so no draw
        affects the choice."""
        return tree.best(min(max_nodes, self._num_drawn), min(max_depth, self.max_depth))

    def keeps(self, confidences: Sequence[float]) -> bool:
        """Whether to verify the last draw of this chain, given that the earlier ones are verified.

        Later values depend on the draw. Dropping it because of them would bias the output (docs/exactness.md, section
        4), so they are not passed.
        """
        return len(confidences) <= self.max_nodes

    def is_worth_drawing(self, path_prob: Sequence[float]) -> bool:
        """Whether a guesser should draw one more guess for the next block, the last in `path_prob`.

        Each value is a path probability, estimated before that guess was drawn. Nothing is cut later.
        """
        return len(path_prob) <= min(self.gamma, self.max_nodes)

    @abstractmethod
    def is_worth_asking(self, num_nodes: int, num_with: int) -> bool:
        """Whether a guesser's questions are worth their rows: `num_with` nodes instead of `num_nodes`."""

    @abstractmethod
    def is_worth_waiting(self, num_passes: int, has_drafted: bool) -> bool:
        """Whether to wait for the draft's next pass instead of verifying the block just chosen.

        The draft has made `num_passes` since it got the last verdict. `has_drafted`: whether it has reported a node
        that may be verified. Called only in continuous drafting.
        """

    def why_wait(self) -> str:
        return "the block is to be drafted first" if self.is_in_turn else "the policy wants a longer block"
