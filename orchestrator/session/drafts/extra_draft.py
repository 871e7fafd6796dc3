"""A draft beside the first: it has a lease, a draft tree and a policy of its own, and guesses for the first one's tree.

To the session's tree an extra draft is a guesser whose guesses come of an engine. What it says has chances of its own,
calibrated by what became of what it said at every place of the text, verified or not. A draft that is lost takes along
what it had guessed for the next block, and nothing of the others'. Where drafts sample there are none: a block's draws
are of one q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.speculation import EMPTY_PART, EXTRA_DRAFT, ROOT, UNRANKED, Guesses, Part
from orchestrator.policy import Shape, TreePolicy
from orchestrator.session import messages as m
from orchestrator.session.drafts.draft_side import DraftSide
from orchestrator.session.engine_view import SessionText
from orchestrator.session.guess import Guess
from orchestrator.session.pair import Pair
from orchestrator.session.statistics import Statistics
from orchestrator.session.verdicts import Judged

MENTIONED = 1
"""Rank of an extra draft's nodes as its own policy sees a block: there, but no first candidate to learn from."""


class ExtraDraft(DraftSide):
    """An extra draft of one session."""

    def __init__(self, text: SessionText, pair: Pair, policy: TreePolicy, number: int) -> None:
        super().__init__(text, pair, policy, Statistics(is_traced=False), number)
        self.source = f"{EXTRA_DRAFT}{number + 1}"

    def follow(self, judged: Judged, max_depth: int) -> list[m.Command]:
        """What a verdict changes for it."""
        for place, token in enumerate(judged.tokens):
            self._learn(judged.tokens[:place], token)
        found = self.blocks.reroot(judged.tokens)
        seen = judged.seen(found, late_hit=self.blocks.late_hit)
        self._policy.observe_round(replace(seen, shape=self._own_shape(judged.guess)))
        return self.begin_round(max_depth, judged.received_s)

    def _learn(self, before: Sequence[int], token: int) -> None:
        """What it had said below these tokens, where it had told of anything."""
        first = self.blocks.tree.unverified(before, EMPTY_PART)
        if first is not None:
            self._policy.observe_guess(first[1], first[0] == token)

    def _own_shape(self, guess: Guess) -> Shape:
        ranks = tuple(MENTIONED if source == self.source else UNRANKED for source in guess.sources)
        return replace(guess.shape, ranks=ranks)

    def guesses(self, max_depth: int, max_nodes: int) -> Guesses:
        """Its likeliest nodes, as a guesser names them."""
        best = self.blocks.tree.best(min(max_nodes, self._policy.max_nodes), min(max_depth, self._policy.max_depth))
        return Guesses(best.parents, self.blocks.tree.block(best).tokens, _chances(best))


def _chances(part: Part) -> tuple[float, ...]:
    """Of each node, if the text gets to its parent."""
    path_prob = part.path_prob.tolist()
    above = [1.0 if parent == ROOT else path_prob[parent] for parent in part.parents]
    return tuple(min(1.0, own / before) for own, before in zip(path_prob, above, strict=True))
