"""A session whose draft grows steadily: blocks are taken out of one tree, and a verdict makes another node its root.

Knows the order of a round. Must not know how a tree grows, nor what a node is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from core.config import SpeculationConfig
from core.records import GenerationRequest, Verdict
from core.speculation.guesses import Guesser
from core.trees import UNRANKED
from orchestrator import messages as m
from orchestrator.detokenize import IncrementalDetokenizer
from orchestrator.guess import NO_GUESS, Followed, Guess
from orchestrator.lookup import LookupGuesser
from orchestrator.pair import Pair
from orchestrator.session import Session
from orchestrator.states import Target, Trigger
from orchestrator.steady_drafting import SteadyDrafting
from orchestrator.tree_pilot import TreePilot


def new_guessers(config: SpeculationConfig, pilot: TreePilot) -> tuple[Guesser, ...]:
    """Those that one session has beside its draft. A new one is one more here, and its file."""
    return (LookupGuesser(pilot.lookups, pilot.max_depth),) if config.lookup else ()


class SteadySession(Session):
    """As `Session`, but for where blocks come from: nothing is asked for, and what has grown is what there is."""

    def __init__(
        self,
        request: GenerationRequest,
        pair: Pair,
        pilot: TreePilot,
        detokenizer: IncrementalDetokenizer,
        session_id: str,
    ) -> None:
        super().__init__(request, pair, pilot, detokenizer, session_id)
        self._margin = pilot
        self._growth = SteadyDrafting(self._completion, pilot, self.stats)
        self._guessers: Sequence[Guesser] = new_guessers(pair.speculation, pilot)
        self._now_s = 0.0
        """Of the event that is handled."""
        self._verdict_s: float | None = None
        """When the last verdict came; None where what follows is no whole round."""
        self._handlers |= {
            m.DraftPlaced: self._on_draft_placed,
            m.DraftGrew: self._on_draft_grew,
            m.DraftReplied: self._on_draft_replied,
            m.DraftLate: self._on_draft_late,
        }

    @property
    def _drafting(self) -> SteadyDrafting:
        return self._growth

    # Decisions

    def _go_on(self) -> list[m.Command]:
        match self._machine.state:
            case Target.IDLE:
                told = self._reroot()
                for guesser in self._guessers:
                    self._growth.ask(guesser)
                return [*self._send_or_wait(is_waiting=False), *told]
            case Target.AWAITING_BLOCK:
                return self._send_or_wait(is_waiting=True)
        return []

    def _reroot(self) -> list[m.Command]:
        """What the last verdict changes for the tree, the pilot and the draft."""
        judged, self._judged = self._judged, None
        if judged is None:
            return []
        verdict, tokens = judged.verdict, judged.guess.block.tokens
        committed = (*(tokens[node] for node in verdict.path), verdict.next_token)
        ranks = judged.guess.shape.ranks
        num_drafted = sum(1 for _ in takewhile(lambda node: ranks[node] != UNRANKED, verdict.path))
        found, rank, num_listed = self._growth.reroot(committed, num_drafted)
        for guesser in self._guessers:
            guesser.saw(committed)
        self.stats.record_found(found)
        self._tell_pilot(judged, found, Followed(NO_GUESS, rank, num_listed))
        if self._growth.is_silent:
            return self._growth.lose()
        return self._growth.rest() if self._growth.wants_rest else self._growth.take_turn(self._max_depth)

    def _send_or_wait(self, *, is_waiting: bool) -> list[m.Command]:
        """Have the best block verified, unless what comes next is worth the wait."""
        block = self._growth.block(self._max_depth, max(self._pair.target.kv_cache_tokens - len(self._log), 0))
        wait = self._growth.patience(self._now_s, self._max_depth) if self._max_depth > 0 else None
        if wait is None:
            return self._send_block(block, is_waiting=is_waiting)
        if not is_waiting:
            self._machine.fire(Trigger.DRAFT)
        return [wait]

    def _send_block(self, block: Guess, *, is_waiting: bool) -> list[m.Command]:
        if is_waiting:
            self._machine.fire(Trigger.BLOCK if len(block) else Trigger.NO_BLOCK)
        self._growth.used(block)
        return self._send(block)

    # Events

    def _on_target_placed(self, event: m.TargetPlaced) -> list[m.Command]:
        self._verdict_s = None
        return super()._on_target_placed(event)

    def _on_verdict(self, verdict: Verdict, event: m.TargetReplied) -> list[m.Command]:
        self._now_s = event.received_s
        if self._verdict_s is not None:
            self._margin.saw_interval(len(verdict.path) + 1, event.received_s - self._verdict_s)
        self._verdict_s = event.received_s
        return super()._on_verdict(verdict, event)

    def _on_draft_placed(self, event: m.DraftPlaced) -> list[m.Command]:
        return [*self._growth.placed(event.name, event.epoch), *self._go_on()]

    def _on_draft_grew(self, event: m.DraftGrew) -> list[m.Command]:
        self._now_s = event.received_s
        return [*self._growth.grew(event), *self._go_on()]

    def _on_draft_replied(self, event: m.DraftReplied) -> list[m.Command]:
        self._now_s = event.received_s
        return [*self._growth.ended(event), *self._go_on()]

    def _on_draft_late(self, event: m.DraftLate) -> list[m.Command]:
        return [*self._growth.late(event.stamp), *self._go_on()]
