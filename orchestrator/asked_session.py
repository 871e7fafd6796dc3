"""A session whose draft is asked for each block and outcome table: where it samples, in rejection and block mode.

Knows the order of a round. Must not know how a draft answers.
"""

from __future__ import annotations

from itertools import takewhile

from core.records import GenerationRequest
from orchestrator import messages as m
from orchestrator.detokenize import IncrementalDetokenizer
from orchestrator.drafting import Drafting
from orchestrator.guess import NO_GUESS, NOWHERE, Followed, Guess, looked_up
from orchestrator.lookup import Lookup
from orchestrator.pair import Pair
from orchestrator.pilot import AskedPilot, Shape
from orchestrator.session import Session
from orchestrator.states import Target, Trigger


class AskedSession(Session):
    """As `Session`. Invariant: at most one message to the draft is unanswered."""

    def __init__(
        self,
        request: GenerationRequest,
        pair: Pair,
        pilot: AskedPilot,
        detokenizer: IncrementalDetokenizer,
        session_id: str,
    ) -> None:
        super().__init__(request, pair, pilot, detokenizer, session_id)
        self._asked_pilot = pilot
        self._asked = Drafting(self._completion, pilot, self.stats)
        self._lookup = Lookup()
        self._handlers |= {
            m.DraftPlaced: self._on_draft_placed,
            m.DraftReplied: self._on_draft_replied,
            m.DraftLate: self._on_draft_late,
        }

    @property
    def _drafting(self) -> Drafting:
        return self._asked

    # Decisions

    def _go_on(self) -> list[m.Command]:
        """Whatever the joint state allows to be done now."""
        match self._machine.state:
            case Target.IDLE:
                return self._choose()
            case Target.VERIFYING:
                return self._asked.prepare(self._guess, self._max_depth - 1)
            case Target.AWAITING_TABLE if not self._asked.is_table_due:
                self._machine.fire(Trigger.TABLE if self._asked.has_table else Trigger.NO_BLOCK)
                return self._choose()
            case Target.AWAITING_BLOCK if not self._asked.is_block_due:
                return self._take_block()
        return []

    def _choose(self) -> list[m.Command]:
        """After a verdict: verify what was prepared for it, or wait for what is being prepared, or do without."""
        if self._asked.is_table_due:
            self._machine.fire(Trigger.AWAIT_TABLE)
            return []
        given_up = self._asked.go_without()
        followed = self._follow()
        if len(followed.guess):
            return [*given_up, *self._send(followed.guess)]
        if asked := self._asked.ask_block(self._max_depth):
            self._machine.fire(Trigger.DRAFT)
            return [*given_up, *asked]
        return [*given_up, *self._send(self._look_up())]

    def _follow(self) -> Followed:
        """Where the last verdict leads in what the draft has prepared; the pilot is told."""
        judged, self._judged = self._judged, None
        if judged is None:
            return NOWHERE
        verdict = judged.verdict
        found, followed = self._asked.follow(judged.guess, judged.num_committed, judged.end, verdict.next_token)
        self.stats.record_found(found)
        self._tell_pilot(judged, found, followed)
        return followed

    def _take_block(self) -> list[m.Command]:
        """The wait for a block is over; without one the round goes on with what can be looked up."""
        given_up = self._asked.go_without()
        guess = self._asked.take_block()
        self._machine.fire(Trigger.BLOCK if len(guess) else Trigger.NO_BLOCK)
        return [*given_up, *self._send(guess if len(guess) else self._look_up())]

    def _look_up(self) -> Guess:
        num_tokens = min(self._max_depth, self._pilot.num_to_look_up(self._max_depth))
        if num_tokens <= 0:
            return NO_GUESS
        return looked_up(self._lookup.guess(self._log.tokens, num_tokens))

    def _send(self, guess: Guess) -> list[m.Command]:
        """Have as much of `guess` verified as fits and pays, and the draft prepare for the outcome."""
        guess = guess.prefix(max(0, self._max_depth))
        return super()._send(guess.prefix(self._num_to_verify(guess.shape)))

    def _num_to_verify(self, shape: Shape) -> int:
        """How many guesses the pilot keeps. It decides on each before it sees what follows that one.

        What the draft thinks after a guess depends on the guess: dropping it for that would bias the output
        (docs/exactness.md, section 4).
        """
        seen_so_far = (shape.prefix(num_guesses) for num_guesses in range(1, len(shape) + 1))
        kept = takewhile(lambda part: self._asked_pilot.num_to_verify(part) == len(part), seen_so_far)
        return sum(1 for _ in kept)

    # Events

    def _on_draft_placed(self, event: m.DraftPlaced) -> list[m.Command]:
        self._asked.placed(event.name, event.epoch)
        return self._go_on()

    def _on_draft_replied(self, event: m.DraftReplied) -> list[m.Command]:
        return [*self._asked.replied(event), *self._go_on()]

    def _on_draft_late(self, event: m.DraftLate) -> list[m.Command]:
        self._asked.late(event.stamp)
        return self._go_on()
