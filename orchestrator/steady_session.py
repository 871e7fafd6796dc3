"""A session whose draft grows steadily: blocks are taken out of one tree, and a verdict makes another node its root.

Knows the order of a round. Must not know how a tree grows, nor what a node is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.config import SpeculationConfig
from core.records import Continuation, GenerationRequest, Refused, Stamp, Verdict
from core.speculation.guesses import Guesser
from core.trees import ROOT
from orchestrator import messages as m
from orchestrator.detokenize import IncrementalDetokenizer
from orchestrator.guess import Guess, Offer
from orchestrator.lookup import LookupGuesser
from orchestrator.pair import Pair
from orchestrator.session import Judged, Session
from orchestrator.states import Target, Trigger
from orchestrator.steady_drafting import SteadyDrafting
from orchestrator.tree_pilot import TreePilot


def new_guessers(config: SpeculationConfig, pilot: TreePilot) -> tuple[Guesser, ...]:
    """Those that one session has beside its draft. A new one is one more here, and its file."""
    return (LookupGuesser(pilot.lookups, pilot.max_depth),) if config.lookup else ()


class SteadySession(Session):
    """As `Session`, but for where blocks come from: out of what has grown."""

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
        self._is_drawn = self._completion.spec.needs_q
        self._offers: dict[int, tuple[Stamp, Offer]] = {}
        """By their rounds: what the target may go on with after the verdict that is awaited."""
        self._last_offer: Offer | None = None
        self._early: m.TargetReplied | None = None
        """The verdict on an offer, of which it is not known yet that the target has gone on with it."""
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
                judged = self._judged
                told = self._reroot()
                if not self._is_drawn:
                    self._look_up()
                if judged is not None and judged.verdict.continued:
                    return [*self._continue_after(judged), *told]
                return [*self._send_or_wait(is_waiting=False), *told]
            case Target.AWAITING_BLOCK:
                return self._send_or_wait(is_waiting=True)
            case Target.VERIFYING if not self._is_drawn:  # draws are sent by the session alone
                return self._offer()
        return []

    def _continue_after(self, judged: Judged) -> list[m.Command]:
        """The target has gone on with what it was offered."""
        stamp, offer = self._offers[judged.verdict.continued]
        guess = offer.follow(judged.end, judged.verdict.next_token)
        assert guess is not None, "a verdict that goes on with anything else is a problem"
        self._offers.clear()
        self._last_offer = None
        self._growth.went_on(guess)
        self._guess, self._is_continued = guess, True
        self._machine.fire(Trigger.VERIFY)
        self._held.go_on(stamp)
        return self._go_on()

    def _offer(self) -> list[m.Command]:
        """What the target may go on with after the verdict that is awaited; the last offer counts."""
        offer = self._growth.offer(self._guess.block, self._max_depth, self._max_nodes)
        awaited = self._held.awaiting
        if offer is None or offer.is_empty or offer == self._last_offer or awaited is None:
            return []
        self._last_offer = offer
        stamp = self._held.next_stamp()
        self._offers[stamp.round] = stamp, offer
        return [m.Continue(Continuation(stamp, awaited.round, offer.tree, offer.is_open))]

    def _verify(self) -> m.Command:
        self._is_continued = False
        self._forget_offers()
        return super()._verify()

    def _forget_offers(self) -> None:
        self._offers.clear()
        self._early = self._last_offer = None

    def _reroot(self) -> list[m.Command]:
        """What the last verdict changes for the tree, the pilot and the draft."""
        judged, self._judged = self._judged, None
        if judged is None:
            return []
        verdict, tokens = judged.verdict, judged.guess.block.tokens
        committed = (*(tokens[node] for node in verdict.path), verdict.next_token)
        unverified = self._growth.unverified(committed)
        found = self._growth.reroot(committed)
        for guesser in self._guessers:
            guesser.saw(committed)
        self.stats.record_found(found)
        self._tell_pilot(judged, found, unverified)
        if self._growth.is_silent:
            return self._growth.lose()
        return self._growth.rest() if self._growth.wants_rest else self._growth.take_turn(self._max_depth)

    def _send_or_wait(self, *, is_waiting: bool) -> list[m.Command]:
        """Have the best block verified, unless what comes next is worth the wait."""
        block = self._growth.block(self._max_depth, self._max_nodes)
        wait = self._growth.patience(self._now_s, self._max_depth) if self._max_depth > 0 else None
        if wait is None and self._is_drawn and not self._growth.has_guesses:
            self._look_up()
            block = self._growth.block(self._max_depth, self._max_nodes)
        if wait is None:
            return self._send_block(block, is_waiting=is_waiting)
        if not is_waiting:
            self._machine.fire(Trigger.DRAFT)
        return [wait]

    def _look_up(self) -> None:
        """What others than the draft guess. Where the draft samples it is for want of its draws: a guess that is sent
        since others agree with what was drawn would be sent because of what it is (docs/exactness.md, section 4).
        """
        for guesser in self._guessers:
            self._growth.ask(guesser)

    @property
    def _max_nodes(self) -> int:
        """That the target has room for."""
        return max(self._pair.target.kv_cache_tokens - len(self._log), 0)

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
            if self._is_continued:
                event = replace(event, sent_s=self._verdict_s)
        self.stats.num_continued += self._is_continued
        self._verdict_s = event.received_s
        early, self._early = self._early, None
        commands = super()._on_verdict(verdict, event)
        if early is None or self.is_closed or not self._held.answers(early.reply.stamp):
            return commands
        early = replace(early, received_s=max(early.received_s, event.received_s))
        return [*commands, *self._on_target_replied(early)]

    def _on_unawaited(self, event: m.TargetReplied) -> list[m.Command]:
        """Of a message that the target has made for itself the answer may come before the verdict that says so."""
        reply = event.reply
        if self._offers.get(reply.stamp.round, (None,))[0] != reply.stamp:
            return [] if isinstance(reply, Refused) else super()._on_unawaited(event)
        if isinstance(reply, Refused) and not reply.is_final:  # who goes on with it all the same, lies
            del self._offers[reply.stamp.round]
            return []
        self._early = event
        return []

    def _problem_of(self, verdict: Verdict) -> str | None:
        problem = super()._problem_of(verdict)
        if problem is not None or not verdict.continued:
            return problem
        _, offer = self._offers.get(verdict.continued, (None, None))
        end = verdict.path[-1] if verdict.path else ROOT
        is_offered = offer is not None and offer.follow(end, verdict.next_token) is not None
        return None if is_offered else "it goes on with what it was not offered"

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
