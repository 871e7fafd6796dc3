"""Chooses blocks from a session's draft tree: the one to verify next, and those that the target may continue with.

Knows the draft tree and the policy. Must not know engines, leases or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from core.speculation import EMPTY_PART, Guesses, Part, SpeculationTree, TokenTree, num_branches
from orchestrator.policy import Explanation, Found, Shape, TreePolicy
from orchestrator.session.guess import NO_GUESS, Guess, Offer


class BlockChooser:
    """The draft tree of one session, and the block that was taken from it last."""

    def __init__(self, policy: TreePolicy, explanation: Explanation | None, *, is_drawn: bool) -> None:
        """`is_drawn`: whether the draft samples. Its draws are then of use for one block only."""
        self._policy = policy
        self._explanation = explanation
        self._is_drawn = is_drawn
        self.reset()

    def __repr__(self) -> str:
        return f"<BlockChooser {self.tree}, {len(self._taken)} taken>"

    def reset(self) -> None:
        """Start with an empty tree."""
        self.tree = SpeculationTree(self._policy.max_grown_depth, is_drawn=self._is_drawn)
        self._taken = EMPTY_PART
        self._is_missed = False
        """Whether the draft knew nothing below the root when it became the root."""
        self.late_hit: bool | None = None
        """`RoundOutcome.late_hit` of the last verdict."""
        self._num_drawn = 0
        """Guesses in a row that a guesser has drawn for the next block; nothing else is in the tree then."""

    # Verdicts

    def unverified(self, tokens: Sequence[int]) -> tuple[float, bool] | None:
        """`RoundOutcome.unverified` of a verdict that commits `tokens`."""
        first = None if self._is_drawn else self.tree.unverified(tokens[:-1], self._taken)
        return None if first is None else (first[1], first[0] == tokens[-1])

    def reroot(self, tokens: Sequence[int]) -> Found:
        """Make the last of these committed tokens the root; whether any node of the draft is left below it."""
        if self._is_drawn:  # the target's own token is a draw of its own, and says nothing of what the draft drew
            self.reset()
            return Found.NOT_ASKED
        had_nodes = self.tree.has_drafted
        self.late_hit = self.tree.has_told_alone(tokens[0]) if self._is_missed and had_nodes else None
        self.tree.reroot(tokens)
        self._taken = EMPTY_PART
        if not had_nodes or self._policy.is_in_turn:
            return Found.NOT_ASKED
        self._is_missed = not self.tree.has_drafted
        return Found.MISS if self._is_missed else Found.HIT

    # Blocks

    def add_guesses(self, source: str, guesses: Guesses) -> None:
        """Add the proposals of a guesser, until the next verdict."""
        self.tree.guess(guesses, source)
        self._num_drawn = len(guesses.laws)

    def block(self, max_depth: int, max_nodes: int) -> Guess:
        """The nodes of the tree that the policy chooses for verification."""
        self._taken = part = self._part(max_depth, max_nodes)
        return self._guess(part) if len(part) else NO_GUESS

    def _guess(self, part: Part) -> Guess:
        block = self.tree.block(part)
        return Guess(block, Shape(block.parents, part.ranks, part.confidences), part.sources)

    def _part(self, max_depth: int, max_nodes: int) -> Part:
        if self._num_drawn:  # to cut it now would be to look at its draws
            return self.tree.best(self._num_drawn, self._num_drawn)
        is_drawn = self._is_drawn and self.tree.has_drafted
        choose = self._keep_draws if is_drawn else partial(self._policy.choose, self.tree)
        part = choose(max_nodes, max_depth)
        if self._is_drawn and not (is_drawn and self._policy.draws_trees):  # what is looked up was not drawn
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
        """The next blocks for the likeliest outcomes of `block`, which is being verified.

        Each with the block that the policy chooses there; those where it chooses none only if a plain step is worth it.
        None where there is nothing to offer, or the tree has changed since `block` was taken.
        """
        policy, taken = self._policy, self._taken
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
        return Offer(self._guess(whole), len(taken), is_open)

    def continue_with(self, guess: Guess) -> None:
        """The target verifies this block without being asked: an offer that it has taken."""
        self._taken = self.tree.part_of(guess.block) or EMPTY_PART
        if self._explanation is not None:
            self._explanation.goes_on(self._taken.depth, self._taken.sources)

    def explain(self, max_depth: int) -> None:
        """Say why the block that was taken last was chosen; it could have had `max_depth` guesses in a row."""
        if self._explanation is None:
            return
        taken = self._taken
        path_prob, branches = tuple(taken.path_prob), num_branches(taken.parents)
        is_last = max_depth < 1
        reason = "one token is left" if is_last else self._policy.why_block(path_prob, branches, self.tree)
        self._explanation.verifies(taken.depth, taken.sources, reason)
