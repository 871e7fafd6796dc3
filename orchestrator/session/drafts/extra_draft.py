"""An extra draft: it has its own lease, draft tree and policy, and proposes guesses for the first draft's tree.

The session's tree treats an extra draft as a guesser that runs on an engine. Its guesses have their own probabilities,
calibrated by every committed token, verified or not. A lost draft takes its own guesses for the next block with it, not
those of other drafts. Sampling uses no extra drafts, because a block's draws come from one q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.speculation import EMPTY_PART, EXTRA_DRAFT, UNRANKED, Guesses
from orchestrator.policy import Shape, TreePolicy
from orchestrator.session import messages as m
from orchestrator.session.drafts.block_chooser import guesses_of
from orchestrator.session.drafts.draft_side import DraftSide
from orchestrator.session.engine_view import SessionText
from orchestrator.session.pair import Pair
from orchestrator.session.recorder import Recorder
from orchestrator.session.sourced_block import SourcedBlock
from orchestrator.session.verdicts import JudgedBlock

MENTIONED = 1
"""Rank given to an extra draft's nodes in the block that its own policy sees: present, but not a first candidate, so
not used for calibration."""


class ExtraDraft(DraftSide):
    def __init__(self, text: SessionText, pair: Pair, policy: TreePolicy, recorder: Recorder, number: int) -> None:
        self.source = f"{EXTRA_DRAFT}{number + 1}"
        super().__init__(text, pair, policy, recorder.for_extra_draft(self.source), number)

    def follow(self, judged: JudgedBlock, max_depth: int) -> list[m.Command]:
        """Apply a verdict: calibrate on each committed token, then re-root the tree and start the next round."""
        for index, token in enumerate(judged.tokens):
            self._learn(judged.tokens[:index], token)
        found = self.blocks.reroot(judged.tokens)
        outcome = judged.outcome(found, late_hit=self.blocks.late_hit)
        self._policy.observe_round(replace(outcome, shape=self._own_shape(judged.block)))
        return self.begin_round(max_depth, judged.received_s)

    def _learn(self, before: Sequence[int], token: int) -> None:
        """Calibrate the policy on this draft's first candidate after the tokens `before`, if there was one."""
        first = self.blocks.tree.unverified(before, EMPTY_PART)
        if first is not None:
            self._policy.observe_guess(first[1], first[0] == token)

    def _own_shape(self, block: SourcedBlock) -> Shape:
        ranks = tuple(MENTIONED if source == self.source else UNRANKED for source in block.sources)
        return replace(block.shape, ranks=ranks)

    def guesses(self, max_depth: int, max_nodes: int) -> Guesses:
        """Return the likeliest nodes in the form of a guesser's proposals."""
        best = self.blocks.tree.best(min(max_nodes, self._policy.max_nodes), min(max_depth, self._policy.max_depth))
        return guesses_of(self.blocks.tree, best)
