"""Chooses blocks from a session's draft tree: the next to verify, and those the target may continue with.

Knows the draft tree and the policy. Must not know engines, leases or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from core.speculation import DRAFT, EMPTY_PART, ROOT, Guesses, Part, SpeculationTree, TokenTree, num_branches
from orchestrator.policy import Found, Shape, TreePolicy
from orchestrator.session.sourced_block import NO_BLOCK, Offer, SourcedBlock

MAX_KEPT_NODES = 64
"""Number of a head's earlier guesses that stay until it has corrected them."""


class BlockChooser:
    """The draft tree of one session, and the last block taken from it."""

    def __init__(self, policy: TreePolicy, *, is_sampled: bool) -> None:
        """`is_sampled`: whether the draft samples. Its draws can then be used for one block only."""
        self._policy = policy
        self._is_sampled = is_sampled
        self.reset()

    def __repr__(self) -> str:
        return f"<BlockChooser {self.tree}, {len(self.taken)} taken>"

    def reset(self) -> None:
        self.tree = SpeculationTree(self._policy.max_grown_depth, is_sampled=self._is_sampled)
        self.taken = EMPTY_PART
        """The last block, as a part of the tree."""
        self._is_missed = False
        """Whether the draft had no nodes below the root at the time of the last verdict."""
        self.late_hit: bool | None = None
        """`RoundOutcome.late_hit` of the last verdict."""
        self._has_kept = False
        """Whether the tree has guesses that the draft made before the last verdict (`restart`)."""
        self._num_drawn = 0
        """Length of the chain that a guesser has drawn for the next block. The tree then has no other nodes."""

    def restart(self) -> None:
        """Like `reset`, but nodes of the draft that the policy keeps stay as guesses until the next verdict."""
        part = self._policy.kept(self.tree, MAX_KEPT_NODES)
        kept, is_missed, late_hit = guesses_of(self.tree, part), self._is_missed, self.late_hit
        self.reset()
        self._is_missed, self.late_hit, self._has_kept = is_missed, late_hit, len(kept) > 0
        self.tree.add_guesses(kept, DRAFT)

    @property
    def has_drafted(self) -> bool:
        """Whether there are guesses of the draft below the root."""
        return self._has_kept or self.tree.has_drafted

    # Verdicts

    def unverified(self, tokens: Sequence[int]) -> tuple[float, bool] | None:
        """`RoundOutcome.unverified` of a verdict that commits `tokens`."""
        first = None if self._is_sampled else self.tree.unverified(tokens[:-1], self.taken)
        return None if first is None else (first[1], first[0] == tokens[-1])

    def reroot(self, tokens: Sequence[int]) -> Found:
        """Make the last of these committed tokens the root. Return whether a node of the draft is left below it."""
        if self._is_sampled:  # the target's own token is drawn independently of the draft's tokens
            self.reset()
            return Found.NOT_ASKED
        had_nodes = self.tree.has_drafted
        self.late_hit = self.tree.is_only_drafted(tokens[0]) if self._is_missed and had_nodes else None
        self.tree.reroot(tokens)
        self.taken, self._has_kept = EMPTY_PART, False
        if not had_nodes or self._policy.is_in_turn:
            return Found.NOT_ASKED
        self._is_missed = not self.tree.has_drafted
        return Found.MISS if self._is_missed else Found.HIT

    # Blocks

    def add_guesses(self, source: str, guesses: Guesses) -> None:
        """Add a guesser's proposals; they last until the next verdict."""
        self.tree.add_guesses(guesses, source)
        self._num_drawn = len(guesses.distributions)

    def block(self, max_depth: int, max_nodes: int) -> SourcedBlock:
        """Return the nodes of the tree that the policy chooses for verification."""
        self.taken = part = self._part(max_depth, max_nodes)
        return self._sourced(part) if len(part) else NO_BLOCK

    def _sourced(self, part: Part) -> SourcedBlock:
        tree = self.tree.block(part)
        return SourcedBlock(tree, Shape(tree.parents, part.ranks, part.confidences), part.sources)

    def _part(self, max_depth: int, max_nodes: int) -> Part:
        if self._num_drawn:  # cutting the chain here would depend on the drawn tokens
            return self.tree.best(self._num_drawn, self._num_drawn)
        has_draws = self._is_sampled and self.tree.has_drafted
        choose = self._keep_draws if has_draws else partial(self._policy.choose, self.tree)
        part = choose(max_nodes, max_depth)
        if self._is_sampled and not (has_draws and self._policy.draws_trees):  # lookups are not draws
            part = part.straight()
        return part

    def _keep_draws(self, max_nodes: int, max_depth: int) -> Part:
        if self._policy.draws_trees:
            return self._policy.choose_draws(self.tree, max_nodes, max_depth)
        chain = self.tree.first_chain(min(max_nodes, max_depth))
        confidences, num = chain.confidences, 0
        while num < len(chain) and self._policy.keeps(confidences[: num + 1]):
            num += 1
        return chain.head(num)

    def offer(self, block: TokenTree, max_depth: int, max_nodes: int) -> Offer | None:
        """Return the next blocks for the likeliest outcomes of `block`, which is being verified.

        The policy chooses the block of each outcome. An outcome without a block is offered only if a plain step is
        worth it. None if there is nothing to offer, or if the tree has changed since `block` was taken.
        """
        policy, taken = self._policy, self.taken
        is_plain = policy.is_worth_a_plain_step(len(taken)) or policy.goes_on_plainly(self.tree)
        is_open = is_plain and taken.depth < max_depth
        if len(taken) != len(block) or not (policy.num_outcomes or is_open):
            return None
        whole = taken
        for outcome in self.tree.outcomes(taken, policy.num_outcomes):
            if outcome.depth <= max_depth:
                part = policy.choose(outcome.below, max_nodes, max_depth - outcome.depth)
                if len(part) or is_plain:
                    whole = whole.with_below(outcome.end, outcome.top).with_below(len(whole), part)
        return Offer(self._sourced(whole), len(taken), is_open)

    def continue_with(self, block: SourcedBlock) -> None:
        """Follow the target, which has taken an offer and verifies this block without being asked."""
        self.taken = self.tree.part_of(block.tree) or EMPTY_PART

    def why(self, max_depth: int) -> str:
        """Return why the last block was chosen. `max_depth`: the depth that it could have had."""
        if max_depth < 1:
            return "one token is left"
        return self._policy.why_block(tuple(self.taken.path_prob), num_branches(self.taken.parents), self.tree)


def guesses_of(tree: SpeculationTree, part: Part) -> Guesses:
    """Nodes of a tree in the form of a guesser's proposals."""
    path_prob = part.path_prob.tolist()
    above = [1.0 if parent == ROOT else path_prob[parent] for parent in part.parents]
    chances = tuple(min(1.0, own / before) for own, before in zip(path_prob, above, strict=True))
    return Guesses(part.parents, tree.block(part).tokens, chances)
