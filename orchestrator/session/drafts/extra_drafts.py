"""The drafts beside the first: each has its lease, its draft tree and its policy, and guesses for the first one's tree.

To the session's tree an extra draft is a guesser whose guesses come of an engine. What it says has chances of its own,
calibrated by what became of what it said at every place of the text, verified or not. A draft that is lost takes along
what it had guessed for the next block, and nothing of the others'. Where drafts sample there are none: a block's draws
are of one q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.records import SequenceSpec
from core.speculation import DRAFT, EMPTY_PART, EXTRA_DRAFT, ROOT, UNRANKED, Guesses, Part
from core.text import TokenLog
from orchestrator.policy import Shape, TreePolicy
from orchestrator.session import messages as m
from orchestrator.session.drafts.block_chooser import BlockChooser
from orchestrator.session.drafts.draft_side import DraftSide
from orchestrator.session.guess import Guess
from orchestrator.session.pair import Pair
from orchestrator.session.statistics import Statistics
from orchestrator.session.verdicts import Judged

MENTIONED = 1
"""Rank of an extra draft's nodes as its own policy sees a block: there, but no first candidate to learn from."""


def source_of(number: int) -> str:
    """The name under which a draft's guesses are counted; the first one's is that of the draft engine."""
    return DRAFT if number == 0 else f"{EXTRA_DRAFT}{number + 1}"


class ExtraDraft(DraftSide):
    """One of them."""

    def __init__(
        self, session_id: str, pair: Pair, log: TokenLog, spec: SequenceSpec, policy: TreePolicy, number: int
    ) -> None:
        own = replace(pair, draft=pair.extra_drafts[number - 1])
        super().__init__(f"{session_id}/{number}", own, log, spec, policy, Statistics(is_traced=False), number)
        self.source = source_of(number)

    def follow(self, judged: Judged, max_depth: int) -> list[m.Command]:
        """What a verdict changes for it."""
        for place, token in enumerate(judged.tokens):
            self._learn(judged.tokens[:place], token)
        found = self.blocks.reroot(judged.tokens)
        self._policy.saw_round(replace(judged.seen(found), shape=self._own_shape(judged.guess)))
        return self.begin_round(max_depth)

    def _learn(self, before: Sequence[int], token: int) -> None:
        """What it had said below these tokens, where it had told of anything."""
        first = self.blocks.tree.unverified(before, EMPTY_PART)
        if first is not None:
            self._policy.saw_guess(first[1], first[0] == token)

    def _own_shape(self, guess: Guess) -> Shape:
        ranks = tuple(MENTIONED if source == self.source else UNRANKED for source in guess.sources)
        return replace(guess.shape, ranks=ranks)

    def guesses(self, max_depth: int, max_nodes: int) -> Guesses:
        """Its likeliest nodes, as a guesser names them."""
        best = self.blocks.tree.best(min(max_nodes, self._policy.max_nodes), min(max_depth, self._policy.max_depth))
        return Guesses(best.parents, self.blocks.tree.block(best).tokens, _chances(best))

    def saw_interval(self, num_tokens: int, elapsed_s: float) -> None:
        """One round, from verdict to verdict."""
        self._policy.saw_interval(num_tokens, elapsed_s)

    def end(self) -> m.Command:
        """The session has ended."""
        self.close()
        return self.release()

    def let_go(self) -> None:
        """Of what its policy shares with others."""
        self._policy.close()


def _chances(part: Part) -> tuple[float, ...]:
    """Of each node, if the text gets to its parent."""
    path_prob = part.path_prob.tolist()
    above = [1.0 if parent == ROOT else path_prob[parent] for parent in part.parents]
    return tuple(min(1.0, own / before) for own, before in zip(path_prob, above, strict=True))


class ExtraDrafts:
    """All of them, of one session."""

    def __init__(
        self, session_id: str, pair: Pair, log: TokenLog, spec: SequenceSpec, policies: Sequence[TreePolicy]
    ) -> None:
        """`policies`: one for each of the pair's, in order."""
        numbered = [] if spec.needs_q else list(enumerate(policies, 1))
        self._drafts = [ExtraDraft(session_id, pair, log, spec, policy, number) for number, policy in numbered]
        self._unused = policies if spec.needs_q else ()

    def __repr__(self) -> str:
        return f"<ExtraDrafts {self._drafts}>"

    def begin(self) -> list[m.Command]:
        """Ask for a place on each that there is."""
        return [command for draft in self._drafts for command in draft.begin()]

    def numbered(self, number: int) -> DraftSide | None:
        """The one with this number."""
        return next((draft for draft in self._drafts if draft.number == number), None)

    def named(self, lease: str) -> DraftSide | None:
        """The one that calls the session so."""
        return next((draft for draft in self._drafts if draft.has_lease(lease)), None)

    @property
    def growing(self) -> DraftSide | None:
        """The first that grows for the session."""
        return next((draft for draft in self._drafts if draft.is_growing), None)

    def follow(self, judged: Judged, max_depth: int) -> list[m.Command]:
        """What a verdict changes for each."""
        return [command for draft in self._drafts for command in draft.follow(judged, max_depth)]

    def tell(self, first: BlockChooser, max_depth: int, max_nodes: int) -> None:
        """Add what each guesses to the first draft's tree."""
        for draft in self._drafts:
            if max_depth > 0 and draft.blocks.tree.has_drafted:
                first.add_guesses(draft.source, draft.guesses(max_depth, max_nodes))

    def saw_interval(self, num_tokens: int, elapsed_s: float) -> None:
        """One round, from verdict to verdict."""
        for draft in self._drafts:
            draft.saw_interval(num_tokens, elapsed_s)

    @property
    def num_failures(self) -> int:
        """Of all of them."""
        return sum(draft.stats.num_draft_failures for draft in self._drafts)

    def num_guessed(self, guess: Guess) -> int:
        """Nodes of a block that of all drafts only these have told of."""
        own = {draft.source for draft in self._drafts}
        nodes = zip(guess.sources, guess.shape.ranks, strict=True) if own else ()
        return sum(source in own and rank == UNRANKED for source, rank in nodes)

    def end(self) -> list[m.Command]:
        """The session has ended."""
        ended: list[m.Command] = [draft.end() for draft in self._drafts]
        self.let_go()
        return ended

    def let_go(self) -> None:
        """Of what their policies share with others; twice is once."""
        for draft in self._drafts:
            draft.let_go()
        for policy in self._unused:
            policy.close()
