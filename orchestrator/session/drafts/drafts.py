"""All drafts of one session: the first, whose tree collects all guesses, and the extra drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from core.records import Features
from orchestrator.policy import MeasuredRound, TreePolicy
from orchestrator.session import messages as m
from orchestrator.session.drafts.draft_side import DraftSide
from orchestrator.session.drafts.extra_draft import ExtraDraft
from orchestrator.session.drafts.feature_log import FeatureLog
from orchestrator.session.engine_view import SessionText
from orchestrator.session.pair import Pair
from orchestrator.session.recorder import Recorder
from orchestrator.session.sourced_block import SourcedBlock
from orchestrator.session.verdicts import JudgedBlock

logger = logging.getLogger(__name__)


class Drafts:
    """The drafts of one session. Sampling uses only the first, because the draws of a block come from one q."""

    def __init__(self, text: SessionText, pair: Pair, policies: Sequence[TreePolicy], recorder: Recorder) -> None:
        """`policies`: one for the first draft, then one for each extra draft."""
        self._policies = policies
        for policy in policies[1:]:
            policy.follow(policies[0])
        self._first = DraftSide(text, pair, policies[0], recorder)
        extra = [] if text.spec.needs_q else enumerate(policies[1:], 1)
        self._extra = [ExtraDraft(text, pair, policy, recorder, number) for number, policy in extra]
        self._all: list[DraftSide] = [self._first, *self._extra]
        self._log, self._features = text.log, FeatureLog()
        self._feature_width = pair.target.feature_width
        self._has_warned = False
        for draft in self._all:
            draft.features = self._features
        self.blocks = self._first.blocks

    def __repr__(self) -> str:
        return f"<Drafts {self._all}>"

    @property
    def need_features(self) -> bool:
        """Whether a draft is a head, which reads the target's features."""
        return any(draft.reads_features for draft in self._all)

    @property
    def lack_features(self) -> bool:
        """Whether a draft reads features of the text, and those of the tokens before the last are not all known."""
        return any(draft.reads_prefix for draft in self._all) and self._features.end < len(self._log) - 1

    def begin(self) -> list[m.Command]:
        """Request a lease on each draft."""
        return [command for draft in self._all for command in draft.begin()]

    def handle(self, event: m.DraftEvent) -> list[m.Command]:
        """Pass the event to the draft that sent it."""
        commands = self._pass_on(event)
        self._note_silence()
        return commands

    def _pass_on(self, event: m.DraftEvent) -> list[m.Command]:
        match event:
            case m.DraftLeased():
                return self._all[event.draft].leased(event.name, event.epoch)
            case m.DraftNotLeased():
                return [self._all[event.draft].lease_later()]
            case m.DraftLost():
                return self._all[event.draft].lost(event.epoch)
            case m.DraftReplied():
                return self._by_lease(event.reply.stamp.lease).replied(event)
            case m.DraftLate():
                return self._by_lease(event.stamp.lease).late(event.stamp)

    def _by_lease(self, name: str) -> DraftSide:
        return next((draft for draft in self._extra if draft.has_lease(name)), self._first)

    def begin_round(self, judged: JudgedBlock, max_depth: int) -> list[m.Command]:
        """Continue each draft after a verdict. The first draft's tree and policy have already seen the verdict."""
        if judged.verdict.features is not None:
            self._learn_features(judged.verdict.features)
        to_extra = [command for draft in self._extra for command in draft.follow(judged, max_depth)]
        commands = [*self._first.begin_round(max_depth, judged.received_s), *to_extra]
        self._note_silence()
        return commands

    def _learn_features(self, features: Features) -> None:
        """Keep a verdict's features, unless they cannot be those of its tokens. Heads then go on after the gap."""
        problem = features.problem(self._feature_width, len(self._log) - 1)
        if problem is None and not features.is_finite:
            problem = "some are NaN or infinite"
        if problem is None:
            self._features.add(features)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("a verdict's features are left out, and the like from now on: %s", problem)

    def _note_silence(self) -> None:
        """Tell the first policy, which decides for the session, whether all drafts are silent."""
        self._policies[0].observe_silence(is_silent=all(draft.is_silent for draft in self._all))

    def used(self, block: SourcedBlock) -> None:
        self._first.used(block)

    def add_guesses(self, max_depth: int, max_nodes: int) -> None:
        """Add the extra drafts' guesses to the first draft's tree."""
        for draft in self._extra:
            if max_depth > 0 and draft.blocks.tree.has_drafted:
                self.blocks.add_guesses(draft.source, draft.guesses(max_depth, max_nodes))

    def growth_timeout(self) -> m.Await | None:
        """Return the wait for growth of the first draft, or of an extra one if the first does not grow."""
        return next((draft for draft in self._all if draft.is_growing), self._first).growth_timeout()

    def observe_interval(self, round_: MeasuredRound) -> None:
        """Report one round, from verdict to verdict, to every policy."""
        for policy in self._policies:
            policy.observe_interval(round_)

    def close(self) -> list[m.Command]:
        self.close_policies()
        for draft in self._all:
            draft.close()
        return [draft.release() for draft in self._all]

    def close_policies(self) -> None:
        """Release what the policies share with other sessions. Idempotent."""
        for policy in self._policies:
            policy.close()
