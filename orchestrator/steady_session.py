"""A session whose draft grows steadily: blocks are taken out of one tree, and verdicts make another node its root."""

from __future__ import annotations

from core.records import Verdict
from orchestrator import messages as m
from orchestrator.detokenize import IncrementalDetokenizer
from orchestrator.steady_drafting import SteadyDrafting
from orchestrator.guess import NO_GUESS, Followed
from orchestrator.marginal import MarginalPilot
from orchestrator.pair import Pair
from orchestrator.pilot import Found
from orchestrator.session import Session
from orchestrator.states import Target, Trigger
from core.records import GenerationRequest


class SteadySession(Session):
    """As `Session`, but for where its blocks come from."""

    def __init__(
        self,
        request: GenerationRequest,
        pair: Pair,
        pilot: MarginalPilot,
        detokenizer: IncrementalDetokenizer,
        session_id: str,
    ) -> None:
        super().__init__(request, pair, pilot, detokenizer, session_id)
        self._steering = pilot
        self._growth = SteadyDrafting(self._completion, pilot, self.stats)
        self._drafting = self._growth  # type: ignore[assignment]
        self._now_s = 0.0
        self._verdict_s: float | None = None
        self._handlers[m.DraftGrew] = self._on_draft_grew

    def _go_on(self) -> list[m.Command]:
        match self._machine.state:
            case Target.IDLE:
                return self._choose()
            case Target.AWAITING_BLOCK:
                return self._choose_again()
        return []

    def _choose(self) -> list[m.Command]:
        judged, self._judged = self._judged, None
        told: list[m.Command] = []
        if judged is not None:
            verdict = judged.verdict
            guessed = tuple(judged.guess.block.tokens[node] for node in verdict.path)
            found, rank, num_listed = self._growth.reroot((*guessed, verdict.next_token))
            self.stats.record_found(found)
            self._tell_pilot(judged, found, Followed(NO_GUESS, rank, num_listed))
            told = self._growth.ask()
        guess = self._growth.block(self._max_depth, self._room)
        wait_s = self._growth.wait_s(self._max_depth, self._now_s)
        if wait_s is not None and self._growth.awaited is not None:
            self._machine.fire(Trigger.DRAFT)
            return [*told, m.Await(self._growth.awaited, wait_s)]
        return self._send_now(guess, told)

    def _choose_again(self) -> list[m.Command]:
        guess = self._growth.block(self._max_depth, self._room)
        if self._growth.wait_s(self._max_depth, self._now_s) is not None:
            return []
        self._machine.fire(Trigger.BLOCK if len(guess) else Trigger.NO_BLOCK)
        return self._send_now(guess, [])

    def _send_now(self, guess, told):  # type: ignore[no-untyped-def]
        self._guess = guess if len(guess) else self._look_up()
        return [self._verify(), *told]

    @property
    def _room(self) -> int:
        return max(0, self._pair.target.kv_cache_tokens - len(self._log))

    def _on_verdict(self, verdict: Verdict, event: m.TargetReplied) -> list[m.Command]:
        self._now_s = event.received_s
        if self._verdict_s is not None:
            self._steering.saw_interval(len(verdict.path) + 1, event.received_s - self._verdict_s)
        self._verdict_s = event.received_s
        if self._guess.shape.source != "draft" and len(self._guess):
            pass
        return super()._on_verdict(verdict, event)

    def _on_draft_placed(self, event: m.DraftPlaced) -> list[m.Command]:
        return [*self._growth.placed(event.name, event.epoch), *self._go_on()]

    def _on_draft_replied(self, event: m.DraftReplied) -> list[m.Command]:
        self._now_s = event.received_s
        return [*self._growth.ended(event), *self._go_on()]

    def _on_draft_grew(self, event: m.DraftGrew) -> list[m.Command]:
        self._now_s = event.received_s
        return [*self._growth.grew(event), *self._go_on()]

    def _on_draft_late(self, event: m.DraftLate) -> list[m.Command]:
        return [*self._growth.late(event.stamp), *self._go_on()]
