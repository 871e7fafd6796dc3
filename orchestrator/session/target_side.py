"""A session's side of the target: the lease, the block being verified, and the offers below that block.

Knows the target's messages, and whether a verdict is valid. Must not know drafts or policies, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from core.records import Continuation, Missing, Refused, Stamp, Verdict, VerifyRequest, Want
from core.speculation import ROOT
from orchestrator.session import messages as m
from orchestrator.session.engine_view import EngineView, SessionText
from orchestrator.session.sourced_block import NO_BLOCK, Offer, SourcedBlock
from orchestrator.session.states import TARGET_TABLE, Machine, Target, Trigger
from orchestrator.session.verdicts import JudgedBlock, problem_of, problem_of_scores

FIRST_PAUSE_S = 0.05
"""Pause in seconds before another target is leased. Doubles with each target in a row lost without a verdict."""
MAX_STOPS = 3
"""After this number of verdicts in a row without a continuation, only one step is offered ahead, not several.

If a session that offers nothing shares the passes, the target stops each round and refuses every offer. In a simulation
with 8 of 16 streams plain, this limit saves 60% of the offers. With a limit of 1, streams that are all plain and 20 ms
away from the target lose 6% of their speed.
"""


class TargetSide:
    """The target's side of one session.

    Invariant: at most one block is being verified.
    """

    def __init__(self, text: SessionText, vocab_size: int, wants: Callable[[], tuple[Want, ...]] = tuple) -> None:
        """`wants` returns what heads need with the next verdict."""
        self._wants = wants
        self.block: SourcedBlock = NO_BLOCK
        """Block that is being verified, or whose verdict was lost with its target."""
        self.num_losses = 0
        """Number of targets lost in a row, without a verdict in between."""
        self._log = text.log
        self._prompt_len = text.spec.prompt_len
        self._vocab_size = vocab_size
        self._machine = Machine(TARGET_TABLE, Target.NOT_LEASED)
        self._view = EngineView(text)
        self._offers = _Offers()
        self.is_continued = False
        """Whether the target continued by itself, so that the awaited message comes from an offer."""
        self._num_stops = 0
        """Number of verdicts in a row after which the target did not continue."""
        self._early: dict[Stamp, m.TargetReplied] = {}
        """Replies to offers that arrived early: before the verdict that says whether the target took the offer."""
        self.verdict_s: float | None = None
        """Time of the last verdict, in seconds. None if the next interval will not be a whole round."""
        self.began_s: float | None = None
        """Start of the awaited message, in seconds: when it was sent or, if the target continued by itself, when it
        reported that. None if unknown, or if it does not predict when the verdict will arrive."""

    def __repr__(self) -> str:
        return f"<TargetSide {self._machine} {self._view}>"

    @property
    def state(self) -> Target:
        return self._machine.state

    # The lease

    def leased(self, name: str, epoch: int) -> VerifyRequest:
        """Begin on a new lease. A block whose verdict was lost with its target is verified again."""
        self.verdict_s = None
        self._machine.fire(Trigger.LEASED)
        self._view.begin_lease(name, epoch)
        return self.verify(self.block)

    def is_leased(self, epoch: int) -> bool:
        return epoch == self._view.epoch and self._machine.can(Trigger.LOST)

    def lease_another(self) -> list[m.Command]:
        """Leave the target, and lease another after a pause."""
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

    # Messages to the target

    def wait(self) -> None:
        """Wait for the draft before the next block."""
        if self._machine.state is Target.IDLE:
            self._machine.fire(Trigger.DRAFT)

    def verify(self, block: SourcedBlock, began_s: float | None = None) -> VerifyRequest:
        self._machine.fire(Trigger.VERIFY)
        self._drop_messages()
        self.block, self.is_continued, self.began_s = block, False, began_s
        stamp, base, spec = self._view.next_header()
        wants = self._wants() if block.questions is None else (Want.SAMPLES, *self._wants())
        return VerifyRequest(stamp, base, self._log.since(base.num_tokens), block.tree, spec, wants)

    def offer(self, offer: Offer, num_steps: int = 1) -> list[m.Command]:
        """Offer blocks with which the target may continue after the awaited verdict. The last offer counts.

        `num_steps`: number of steps without guesses that the target may make in a row, if the offer is such a step.
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
        return Continuation(stamp, round_, offer.whole.tree, offer.is_open)

    def resend(self, missing: Missing) -> VerifyRequest | None:
        """Return the same message, starting from the tokens that the target holds; None if it keeps losing tokens."""
        if not self._view.must_resend(missing.held):
            return None
        self._machine.fire(Trigger.MISSING)
        self.verdict_s = None  # the session may wait long until the text fits again
        return self.verify(self.block)

    # Messages from the target

    def awaits(self, stamp: Stamp) -> bool:
        return self._view.answers(stamp)

    def set_aside(self, event: m.TargetReplied) -> bool:
        """Keep an early reply to an offer. Return False if the reply is stale instead."""
        reply = event.reply
        if not self._offers.has(reply.stamp):
            return isinstance(reply, Refused)
        if isinstance(reply, Refused) and not reply.is_final:
            self._offers.drop(reply.stamp)  # a verdict that continues with this offer all the same is then refused
        else:
            self._early[reply.stamp] = event
        return True

    def take_early(self, now_s: float) -> m.TargetReplied | None:
        """Return the reply that was set aside, if the target has continued with its offer."""
        early = self._early.pop(self._view.awaiting, None) if self._view.awaiting is not None else None
        return None if early is None else replace(early, received_s=max(early.received_s, now_s))

    def problem_of(self, verdict: Verdict) -> str | None:
        """Return why this verdict is invalid, or None."""
        problem = problem_of(verdict, self.block.tree, len(self._log), self._vocab_size)
        if problem is not None:
            return problem
        if verdict.continued and self._offers.taken_by(verdict) is None:
            return "it goes on with what it was not offered"
        if self._view.wants_prompt_logprobs and len(verdict.prompt_logprobs) != self._prompt_len - 1:
            return "it has not scored the whole prompt"
        return None

    def scored(self, verdict: Verdict) -> str | None:
        """Take the scores of a beam search's block; return why they are invalid, or None. Commits no token."""
        problem = problem_of_scores(verdict, self.block.tree, len(self._log), self._vocab_size)
        if problem is None:
            self._machine.fire(Trigger.VERDICT)
            self.num_losses = 0
            self._view.take(verdict.held)
        return problem

    def commit(self, verdict: Verdict, sent_s: float, received_s: float) -> JudgedBlock:
        """Extend the text by the tokens of a verdict. Times in seconds."""
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
        judged = JudgedBlock(self.block, verdict, sent_s, received_s, interval_s, self.is_continued)
        self.block, self.verdict_s = NO_BLOCK, received_s
        self._log.extend(judged.tokens)
        self._view.take(verdict.held)
        self._view.has_prompt_logprobs()
        return judged

    def continue_after(self, verdict: Verdict) -> SourcedBlock:
        """Return the block with which the target has continued by itself. It is awaited from now on."""
        taken = self._offers.taken_by(verdict)
        assert taken is not None, "`problem_of` refuses a verdict that continues with anything else"
        self._view.awaiting, self.block = taken
        self.began_s = self.verdict_s
        self._offers.keep_after(taken[0].round)
        self.is_continued = True
        self._machine.fire(Trigger.VERIFY)
        return self.block


@dataclass(frozen=True, slots=True)
class _Offered:
    """An offer that was sent, as the message with this stamp."""

    stamp: Stamp
    after: int
    """Round of the message whose verdict the offer follows."""
    offer: Offer


class _Offers:
    """Offers for the awaited verdict, and for the verdicts that follow from them."""

    def __init__(self) -> None:
        self._by_round: dict[int, _Offered] = {}
        """All offers that the target may still take. While a new offer is on its way, it may take an earlier one."""
        self._line: list[_Offered] = []
        """The newest offer for the awaited verdict, the offer that follows it, and so on."""

    def __len__(self) -> int:
        """Number of consecutive verdicts after which the target has an offer."""
        return len(self._line)

    @property
    def next(self) -> Offer | None:
        """The newest offer for the awaited verdict."""
        return self._line[0].offer if self._line else None

    @property
    def last_round(self) -> int:
        """Round of the newest offer."""
        return self._line[-1].stamp.round

    def add(self, stamp: Stamp, after: int, offer: Offer) -> None:
        """Record an offer. It replaces the offers for the same verdict and for later ones."""
        offered = self._by_round[stamp.round] = _Offered(stamp, after, offer)
        self._line = [*(each for each in self._line if each.after < after), offered]

    def has(self, stamp: Stamp) -> bool:
        offered = self._by_round.get(stamp.round)
        return offered is not None and offered.stamp == stamp

    def drop(self, stamp: Stamp) -> None:
        """Drop an offer that the target will not take, and the offers that follow it."""
        offered = self._by_round.pop(stamp.round)
        if offered in self._line:  # otherwise it was replaced by a newer offer, which counts
            del self._line[self._line.index(offered) :]

    def keep_after(self, round_: int) -> None:
        """Keep only the offers that follow the message of this round, which the target has taken."""
        self._by_round = {number: each for number, each in self._by_round.items() if each.after >= round_}
        rest = [each for each in self._line if each.after >= round_]
        self._line = rest if rest and rest[0].after == round_ else []  # the target may have taken an earlier offer

    def clear(self) -> None:
        self._by_round.clear()
        self._line.clear()

    def taken_by(self, verdict: Verdict) -> tuple[Stamp, SourcedBlock] | None:
        """Return the offer that a verdict says was taken, and its block; None if there is no such offer."""
        offered = self._by_round.get(verdict.continued)
        if offered is None or offered.after != verdict.stamp.round:
            return None
        end = verdict.path[-1] if verdict.path else ROOT
        block = offered.offer.follow(end, verdict.next_token)
        return None if block is None else (offered.stamp, block)
