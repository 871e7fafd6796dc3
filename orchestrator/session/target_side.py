"""A session's dealings with its target: the lease, the block that is being verified, and the offers below that block.

Knows the target's messages, and whether a verdict can be right. Must not know drafts or policies: it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.records import Continuation, Missing, Refused, Stamp, Verdict, VerifyRequest, Want
from core.speculation import ROOT
from orchestrator.session import messages as m
from orchestrator.session.engine_view import EngineView, SessionText
from orchestrator.session.guess import NO_GUESS, Guess, Offer
from orchestrator.session.states import TARGET_TABLE, Machine, Target, Trigger
from orchestrator.session.verdicts import Judged, problem_of

FIRST_PAUSE_S = 0.05
"""Pause before another target is asked for; it doubles with each target in a row that was lost without a verdict."""
MAX_STOPS = 3
"""Messages in a row behind which the target may stop before one step is offered ahead, not several: so it is where
another session in its passes offers nothing, and all is refused each round. Simulated, 8 of 16 streams plain: 0.4 of
the offers; with 1 stop, streams that are all plain and 20 ms away make 0.94 of the tokens."""


class TargetSide:
    """The target's side of one session. Invariant: at most one block is being verified."""

    def __init__(self, text: SessionText, vocab_size: int) -> None:
        self.guess: Guess = NO_GUESS
        """The block that is being verified, or whose verdict was lost with its target."""
        self.num_losses = 0
        """Targets lost in a row, without a verdict in between."""
        self._log = text.log
        self._prompt_len = text.spec.prompt_len
        self._vocab_size = vocab_size
        self._machine = Machine(TARGET_TABLE, Target.NOT_LEASED)
        self._view = EngineView(text)
        self._offers = _Offers()
        self.is_continued = False
        """Whether the target has made the message that is awaited for itself."""
        self._num_stops = 0
        """Messages in a row after whose verdict the target has not gone on."""
        self._early: dict[Stamp, m.TargetReplied] = {}
        """Answers to offers, come before the verdict that says whether the target has taken them."""
        self.verdict_s: float | None = None
        """Time of the last verdict; None where no whole round lies between it and the next."""
        self.began_s: float | None = None
        """When what is awaited was sent, or where the target has made it for itself, when that was heard; None where it
        is not known, or says nothing of when the verdict will come."""

    def __repr__(self) -> str:
        return f"<TargetSide {self._machine} {self._view}>"

    @property
    def state(self) -> Target:
        return self._machine.state

    # The lease

    def leased(self, name: str, epoch: int) -> VerifyRequest:
        """Begin, or begin again: a block whose verdict was lost with its target is verified once more."""
        self.verdict_s = None
        self._machine.fire(Trigger.LEASED)
        self._view.begin_lease(name, epoch)
        return self.verify(self.guess)

    def is_leased(self, epoch: int) -> bool:
        """Whether this is the engine that is leased."""
        return epoch == self._view.epoch and self._machine.can(Trigger.LOST)

    def lease_another(self) -> list[m.Command]:
        """Leave the target, and ask for another after a pause."""
        self._machine.fire(Trigger.LOST)
        self._drop_messages()
        return [m.ReleaseTarget(), m.LeaseTarget(delay_s=FIRST_PAUSE_S * 2**self.num_losses)]

    def close(self) -> None:
        self._machine.fire(Trigger.END)
        self._drop_messages()

    def _drop_messages(self) -> None:
        self._view.awaiting = None
        self._early.clear()
        self._offers.clear()

    # What it is told

    def wait(self) -> None:
        """The next block waits for the draft."""
        if self._machine.state is Target.IDLE:
            self._machine.fire(Trigger.DRAFT)

    def verify(self, guess: Guess, began_s: float | None = None) -> VerifyRequest:
        """Have this block verified."""
        self._machine.fire(Trigger.VERIFY)
        self._drop_messages()
        self.guess, self.is_continued, self.began_s = guess, False, began_s
        stamp, base, spec = self._view.next_header()
        wants = () if guess.questions is None else (Want.SAMPLES,)
        return VerifyRequest(stamp, base, self._log.since(base.num_tokens), guess.block, spec, wants)

    def offer(self, offer: Offer, num_steps: int = 1) -> list[m.Command]:
        """Tell the target what it may continue with after the verdict that is awaited; the last offer counts.

        `num_steps`: how many steps without guesses it may make in a row, if the offer is of such a step.
        """
        awaited = self._view.awaiting
        if offer.is_empty or awaited is None:
            return []
        commands: list[m.Command] = []
        if offer != self._offers.next:
            commands.append(self._offer_after(awaited.round, offer))
        if self._num_stops >= MAX_STOPS:
            num_steps = min(num_steps, 1)
        if offer.is_plain and len(self._offers) <= num_steps // 2:
            while len(self._offers) < num_steps:
                commands.append(self._offer_after(self._offers.last_round, offer))
        return commands

    def _offer_after(self, round_: int, offer: Offer) -> Continuation:
        stamp = self._view.next_stamp()
        self._offers.add(stamp, round_, offer)
        return Continuation(stamp, round_, offer.whole.block, offer.is_open)

    def resend(self, missing: Missing) -> VerifyRequest | None:
        """The same message from what the target holds; None where it does not keep what it is sent."""
        if not self._view.must_resend(missing.held):
            return None
        self._machine.fire(Trigger.MISSING)
        self.verdict_s = None  # until there is room for the text again the session may wait for long
        return self.verify(self.guess)

    # What it tells

    def awaits(self, stamp: Stamp) -> bool:
        """Whether this is the stamp of the message that is awaited."""
        return self._view.answers(stamp)

    def set_aside(self, event: m.TargetReplied) -> bool:
        """Keep a reply that is not awaited if it answers an offer; whether it is stale instead."""
        reply = event.reply
        if not self._offers.has(reply.stamp):
            return not isinstance(reply, Refused)
        if isinstance(reply, Refused) and not reply.is_final:
            self._offers.drop(reply.stamp)  # a target that says it continued with this one all the same is lying
        else:
            self._early[reply.stamp] = event
        return False

    def take_early(self, now_s: float) -> m.TargetReplied | None:
        """The reply that was set aside, if the target has continued with what it answers."""
        early = self._early.pop(self._view.awaiting, None) if self._view.awaiting is not None else None
        return None if early is None else replace(early, received_s=max(early.received_s, now_s))

    def problem_of(self, verdict: Verdict) -> str | None:
        """Why this verdict cannot be right, if it cannot."""
        problem = problem_of(verdict, self.guess.block, len(self._log), self._vocab_size)
        if problem is not None:
            return problem
        if verdict.continued and self._offers.taken_by(verdict) is None:
            return "it goes on with what it was not offered"
        if self._view.wants_prompt_logprobs and len(verdict.prompt_logprobs) != self._prompt_len - 1:
            return "it has not scored the whole prompt"
        return None

    def commit(self, verdict: Verdict, sent_s: float, received_s: float) -> Judged:
        """Extend the text by the tokens of a verdict that was received at `received_s`."""
        self._machine.fire(Trigger.VERDICT)
        self.num_losses = 0
        if verdict.continued:
            self._num_stops = 0
        elif not self.is_continued:
            self._num_stops += 1
        interval_s = None
        if self.verdict_s is not None:
            interval_s = received_s - self.verdict_s
            sent_s = self.verdict_s if self.is_continued else sent_s
        judged = Judged(self.guess, verdict, sent_s, received_s, interval_s, self.is_continued)
        self.guess, self.verdict_s = NO_GUESS, received_s
        self._log.extend(judged.tokens)
        self._view.take(verdict.held)
        self._view.has_prompt_logprobs()
        return judged

    def continue_after(self, verdict: Verdict) -> Guess:
        """The block with which the target has continued by itself; it is awaited from now on."""
        taken = self._offers.taken_by(verdict)
        assert taken is not None, "`problem_of` refuses a verdict that continues with anything else"
        self._view.awaiting, self.guess = taken
        self.began_s = self.verdict_s
        self._offers.go_on(taken[0].round)
        self.is_continued = True
        self._machine.fire(Trigger.VERIFY)
        return self.guess


@dataclass(frozen=True, slots=True)
class _Offered:
    """An offer that the target has been told of, as the message with this stamp."""

    stamp: Stamp
    after: int
    """The round of the message whose verdict it follows."""
    offer: Offer


class _Offers:
    """What the target may go on with: after the verdict that is awaited, and after those that this leads to."""

    def __init__(self) -> None:
        self._by_round: dict[int, _Offered] = {}
        """All that the target may take: an offer may be on its way while it takes an earlier one."""
        self._line: list[_Offered] = []
        """The last one for the verdict that is awaited, what was offered behind that, and so on."""

    def __len__(self) -> int:
        """Verdicts in a row after which the target has something to go on with."""
        return len(self._line)

    @property
    def next(self) -> Offer | None:
        """The last offer for the verdict that is awaited."""
        return self._line[0].offer if self._line else None

    @property
    def last_round(self) -> int:
        """Of the message that was offered last."""
        return self._line[-1].stamp.round

    def add(self, stamp: Stamp, after: int, offer: Offer) -> None:
        """The target is told of it, and forgets what it was offered for this verdict and beyond."""
        offered = self._by_round[stamp.round] = _Offered(stamp, after, offer)
        self._line = [*(each for each in self._line if each.after < after), offered]

    def has(self, stamp: Stamp) -> bool:
        """Whether this is one of them."""
        offered = self._by_round.get(stamp.round)
        return offered is not None and offered.stamp == stamp

    def drop(self, stamp: Stamp) -> None:
        """The target will not go on with this one, nor with what follows it."""
        offered = self._by_round.pop(stamp.round)
        if offered in self._line:  # else another has taken its place, and that one counts
            del self._line[self._line.index(offered) :]

    def go_on(self, round_: int) -> None:
        """The target has gone on with the message of this round: only what follows it is of use."""
        self._by_round = {number: each for number, each in self._by_round.items() if each.after >= round_}
        rest = [each for each in self._line if each.after >= round_]
        self._line = rest if rest and rest[0].after == round_ else []  # it may have taken an earlier one

    def clear(self) -> None:
        """They are of no use from now on."""
        self._by_round.clear()
        self._line.clear()

    def taken_by(self, verdict: Verdict) -> tuple[Stamp, Guess] | None:
        """What the target says that it has gone on with; None where it was offered nothing like that."""
        offered = self._by_round.get(verdict.continued)
        if offered is None or offered.after != verdict.stamp.round:
            return None
        end = verdict.path[-1] if verdict.path else ROOT
        guess = offered.offer.follow(end, verdict.next_token)
        return None if guess is None else (offered.stamp, guess)
