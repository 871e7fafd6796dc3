"""One completion as a state machine without I/O: events in, commands out.

The session owns the committed tokens. Engines hold copies of a prefix of them, and every message names the prefix it
builds on, so whatever an engine has forgotten is sent again. Nothing that a draft says can reach the output but through
a verdict of the target. Blocks are taken out of one tree, and a verdict makes another node its root.

Handlers record what has happened; `_go_on` alone decides, from the joint state, what is to be done next. Must not know
how a tree grows, nor what a node is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from core.errors import OutriderError, ServiceError, Unavailable, UnsoundScores
from core.records import (
    Call,
    CallTrace,
    Chunk,
    Continuation,
    GenerationRequest,
    Missing,
    Refused,
    SequenceSpec,
    Verdict,
    VerifyRequest,
    Want,
)
from core.speculation import DRAFT, MAX_GUESSES
from core.text import TokenLog
from orchestrator.guessers import OutputForm, Panel
from orchestrator.policy import Explanation, Found, TreePolicy
from orchestrator.session import messages as m
from orchestrator.session.drafts import DraftSide, ExtraDrafts
from orchestrator.session.engine_view import EngineView
from orchestrator.session.guess import NO_GUESS, Guess
from orchestrator.session.offers import Offers
from orchestrator.session.output import Output
from orchestrator.session.pair import Pair
from orchestrator.session.states import TARGET_TABLE, Machine, Target, Trigger
from orchestrator.session.statistics import Statistics
from orchestrator.session.verdicts import Judged, problem_of
from orchestrator.text import IncrementalDetokenizer


class Session:
    """The life of one completion. `start` once, then `handle` each event; both return what is to be done.

    Invariant: at most one message to each engine is awaited.
    Invariant: after a Fail, or a Chunk with a finish reason, no command but releases follows.
    """

    def __init__(
        self,
        request: GenerationRequest,
        pair: Pair,
        policy: TreePolicy,
        detokenizer: IncrementalDetokenizer,
        session_id: str,
        extra_policies: Sequence[TreePolicy] = (),
    ) -> None:
        """`extra_policies`: one for each of the pair's extra drafts."""
        self.id = session_id
        self.stats = Statistics(request.wants_trace, Explanation() if request.wants_explanation else None)
        self._num_losses = 0
        """Of targets in a row, no verdict in between."""
        self._request = request
        self._pair = pair
        self._policy = policy
        self._log = TokenLog(request.prompt)
        spec = SequenceSpec.of(request)
        self._output = Output(request, frozenset(pair.target.eos_token_ids), detokenizer)
        self._machine = Machine(TARGET_TABLE, Target.NOT_LEASED)
        self._held = EngineView(self._log, spec)
        self._guess: Guess = NO_GUESS
        """What is being verified."""
        self._is_continued = False
        """Whether the target has made the message that is awaited for itself."""
        self._judged: Judged | None = None
        temperature = request.draft_temperature or pair.speculation.draft_temperature
        draft_spec = spec.at_draft_temperature(temperature)
        self._draft_side = DraftSide(session_id, pair, self._log, draft_spec, policy, self.stats)
        self._blocks = self._draft_side.blocks
        self._extra_drafts = ExtraDrafts(session_id, pair, self._log, draft_spec, extra_policies)
        self._sources = request.guessers or pair.speculation.guessers
        self._panel: Panel = pair.guessers.panel(
            self._sources,
            pair.speculation,
            policy.max_depth,
            policy.sources,
            pair.target.vocab_size,
            OutputForm(spec.prompt_len, spec.grammar),
        )
        self.stats.source_failures = self._panel.failures
        self._is_drawn = spec.needs_q
        self._offers = Offers()
        self._verdict_s: float | None = None
        """When the last verdict came; None where what follows is no whole round."""
        self._handlers = self._by_event()

    def _by_event(self) -> dict[type[m.Event], Callable[..., list[m.Command]]]:
        """What handles each kind of event."""
        return {
            m.TargetLeased: self._on_target_leased,
            m.TargetReplied: self._on_target_replied,
            m.TargetLost: self._on_target_lost,
            m.DraftLeased: self._on_draft_leased,
            m.DraftNotLeased: self._on_draft_not_leased,
            m.DraftGrew: self._on_draft_grew,
            m.DraftReplied: self._on_draft_replied,
            m.DraftLate: self._on_draft_late,
            m.DraftLost: self._on_draft_lost,
            m.Abandoned: self._on_abandoned,
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._machine} {self._draft_side} {self._log}>"

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt, and what has been committed behind it."""
        return self._log.tokens

    @property
    def is_closed(self) -> bool:
        return self._machine.state is Target.CLOSED

    def start(self, now_s: float = 0.0) -> list[m.Command]:
        """Ask for places; or end at once, if the output to resume is complete already."""
        self.stats.began_s = now_s
        if self._request.resume_tokens:
            self._log.extend(self._request.resume_tokens)
            if (chunk := self._output.resume(self._request.resume_tokens)) is not None:
                return [self._emit(chunk), *self._close()]
        may_draft = self._request.max_draft_tokens != 0 and self._pair.speculation.max_draft_tokens > 0
        wants_draft = may_draft and DRAFT in self._sources
        to_drafts = [*self._draft_side.begin(), *self._extra_drafts.begin()] if wants_draft else []
        return [m.LeaseTarget(), *to_drafts]

    def handle(self, event: m.Event) -> list[m.Command]:
        """What is to be done about `event`; nothing, once the session is closed."""
        return [] if self.is_closed else self._handlers[type(event)](event)

    # Decisions

    def _go_on(self) -> list[m.Command]:
        """Whatever the joint state allows to be done now."""
        match self._machine.state:
            case Target.IDLE:
                judged = self._judged
                to_draft = self._reroot()
                if not self._is_drawn:
                    self._look_up()
                if judged is not None and judged.verdict.continued:
                    return [*self._continue_after(judged), *to_draft]
                return [*self._send_or_wait(is_waiting=False), *to_draft]
            case Target.AWAITING_BLOCK:
                return self._send_or_wait(is_waiting=True)
            case Target.VERIFYING if not self._is_drawn:  # draws are sent by the session alone
                return self._offer()
        return []

    def _continue_after(self, judged: Judged) -> list[m.Command]:
        """The target has gone on with what it was offered."""
        taken = self._offers.taken_by(judged.verdict)
        assert taken is not None, "a verdict that goes on with anything else is a problem"
        stamp, guess = taken
        self._offers.clear()
        self._draft_side.used(guess)
        self._blocks.continue_with(guess)
        self._guess, self._is_continued = guess, True
        self._machine.fire(Trigger.VERIFY)
        self._held.go_on(stamp)
        return self._go_on()

    def _offer(self) -> list[m.Command]:
        """What the target may go on with after the verdict that is awaited; the last offer counts."""
        offer = self._blocks.offer(self._guess.block, self._max_depth, self._max_nodes)
        awaited = self._held.awaiting
        if offer is None or offer.is_empty or offer == self._offers.last or awaited is None:
            return []
        stamp = self._held.next_stamp()
        self._offers.add(stamp, offer)
        return [Continuation(stamp, awaited.round, offer.tree, offer.is_open)]

    def _reroot(self) -> list[m.Command]:
        """What the last verdict changes for the tree, the policy and the draft."""
        judged, self._judged = self._judged, None
        if judged is None:
            return []
        committed = judged.tokens
        questions, samples = judged.guess.questions, judged.verdict.samples
        if questions is not None and samples:
            self._panel.answered(questions.source, [samples[row] for row in questions.rows])
        unverified = self._blocks.unverified(committed)
        found = self._blocks.reroot(committed)
        self._panel.saw(committed)
        self.stats.record_found(found)
        self._policy.saw_round(judged.seen(found, unverified))
        to_others = self._extra_drafts.follow(judged, self._max_depth)
        return [*self._draft_side.begin_round(self._max_depth), *to_others]

    def _send_or_wait(self, *, is_waiting: bool) -> list[m.Command]:
        """Have the best block verified, unless what comes next is worth the wait."""
        self._extra_drafts.tell(self._blocks, self._max_depth, self._max_nodes)
        block = self._blocks.block(self._max_depth, self._max_nodes)
        wait = self._growth_timeout() if self._max_depth > 0 else None
        if wait is None and self._is_drawn and not self._blocks.tree.has_drafted:
            self._look_up()
            block = self._blocks.block(self._max_depth, self._max_nodes)
        if wait is None:
            return self._send_block(block, is_waiting=is_waiting)
        if not is_waiting:
            self._machine.fire(Trigger.DRAFT)
        return [wait]

    def _growth_timeout(self) -> m.Await | None:
        """The wait for growth: the first draft's, and another's only while there is no first one."""
        other = None if self._draft_side.is_growing else self._extra_drafts.growing
        return (other or self._draft_side).growth_timeout()

    def _look_up(self) -> None:
        """What others than the draft guess. Where the draft samples it is for want of its draws: a guess that is sent
        since others agree with what was drawn would be sent because of what it is (docs/exactness.md, section 4).
        """
        if self._max_depth > 0:
            for source, guesses in self._panel.ask(self._log.tokens):
                self._blocks.add_guesses(source, guesses)

    @property
    def _max_nodes(self) -> int:
        """That the target has room for."""
        return max(self._pair.target.kv_cache_tokens - len(self._log), 0)

    def _send_block(self, block: Guess, *, is_waiting: bool) -> list[m.Command]:
        if is_waiting:
            self._machine.fire(Trigger.BLOCK if len(block) else Trigger.NO_BLOCK)
        self._draft_side.used(block)
        self._blocks.explain(self._max_depth)
        return self._send(self._with_questions(block))

    def _with_questions(self, guess: Guess) -> Guess:
        """What a guesser wants to know goes along where it is worth its rows, and all of it has room."""
        asked = self._panel.questions(self._log.tokens) if not self._is_drawn and self._max_depth > 0 else None
        if asked is None:
            return guess
        asking = guess.asking(*asked)
        has_room = len(asking) <= min(self._max_nodes, MAX_GUESSES) and max(asking.block.depths) <= self._max_depth
        return asking if has_room and self._policy.is_worth_asking(len(guess), len(asking)) else guess

    @property
    def _max_depth(self) -> int:
        """Guesses in a row that could be used: a round also yields the target's own token, which needs none."""
        return self._output.num_remaining - 1

    def _send(self, guess: Guess) -> list[m.Command]:
        """Have `guess` verified, and go on beside it."""
        self._guess = guess
        return [self._verify(), *self._go_on()]

    def _verify(self) -> VerifyRequest:
        self._is_continued = False
        self._offers.clear()
        self._machine.fire(Trigger.VERIFY)
        stamp, base, spec = self._held.next_header()
        wants = () if self._guess.questions is None else (Want.SAMPLES,)
        return VerifyRequest(stamp, base, self._log.since(base.num_tokens), self._guess.block, spec, wants)

    # The target's side

    def _on_target_leased(self, event: m.TargetLeased) -> list[m.Command]:
        """Begin, or begin again: a block whose verdict was lost with its target is verified once more."""
        self._verdict_s = None
        self._machine.fire(Trigger.LEASED)
        self._held.begin_lease(event.name, event.epoch)
        if self.stats.explanation is not None:
            self.stats.explanation.prefills(len(self._log))
        return [self._verify(), *self._go_on()]

    def _on_target_replied(self, event: m.TargetReplied) -> list[m.Command]:
        reply = event.reply
        if not self._held.answers(reply.stamp):
            return self._on_unawaited(event)
        match reply:
            case Verdict():
                return self._on_verdict(reply, event)
            case Missing():
                return self._resend(reply)
            case Refused():
                return self._fail(UnsoundScores(reply.reason) if reply.is_final else ServiceError(reply.reason))

    def _on_unawaited(self, event: m.TargetReplied) -> list[m.Command]:
        """It must change nothing, but where the target has made the message for itself: then its answer may come before
        the verdict that says so.
        """
        reply = event.reply
        if not self._offers.has(reply.stamp):
            self.stats.num_stale_replies += not isinstance(reply, Refused)
        elif isinstance(reply, Refused) and not reply.is_final:
            self._offers.drop(reply.stamp)  # who goes on with it all the same, lies
        else:
            self._offers.early = event
        return []

    def _on_verdict(self, verdict: Verdict, event: m.TargetReplied) -> list[m.Command]:
        if self._verdict_s is not None:
            interval = len(verdict.path) + 1, event.received_s - self._verdict_s
            self._policy.saw_interval(*interval)
            self._extra_drafts.saw_interval(*interval)
            if self._is_continued:
                event = replace(event, sent_s=self._verdict_s)
        self.stats.num_continued += self._is_continued
        self._verdict_s = event.received_s
        early, self._offers.early = self._offers.early, None
        commands = self._take(verdict, event)
        if early is None or self.is_closed or not self._held.answers(early.reply.stamp):
            return commands
        early = replace(early, received_s=max(early.received_s, event.received_s))
        return [*commands, *self._on_target_replied(early)]

    def _take(self, verdict: Verdict, event: m.TargetReplied) -> list[m.Command]:
        """Commit what it says and go on, or leave a target whose verdict cannot be right."""
        if (problem := self._problem_of(verdict)) is not None:
            return self._lose_target(problem)
        self._machine.fire(Trigger.VERDICT)
        self._num_losses = 0
        guess, self._guess = self._guess, NO_GUESS
        self._judged = Judged(guess, verdict, event.received_s - event.sent_s, self._is_continued)
        chunk = self._commit(guess, verdict)
        self._record(self._judged, event)
        emit = self._emit(chunk)
        if chunk.finish_reason is None:
            return [*self._go_on(), emit]  # the target must not wait for the client
        self._policy.saw_round(self._judged.seen(Found.NOT_ASKED))
        return [emit, *self._close()]

    def _commit(self, guess: Guess, verdict: Verdict) -> Chunk:
        tokens = (*(guess.block.tokens[node] for node in verdict.path), verdict.next_token)
        self._log.extend(tokens)
        self._held.take(verdict.held)
        self._held.has_prompt_logprobs()
        self._output.found_cached(verdict.num_cached)
        return self._output.commit(tokens, verdict.logprobs, verdict.prompt_logprobs)

    def _record(self, judged: Judged, event: m.TargetReplied) -> None:
        guess, verdict = judged.guess, judged.verdict
        num_accepted, num_asked = len(verdict.path), guess.num_only_asked(verdict.path)
        num_guesses, num_looked_up = len(guess) - num_asked, guess.shape.num_looked_up - num_asked
        if self.stats.explanation is not None:
            self.stats.explanation.judged(num_guesses, num_accepted)
        num_looked_up -= self._extra_drafts.num_guessed(guess)
        self.stats.record_round(num_guesses, num_accepted, num_looked_up, verdict.num_relaxed)
        self.stats.record_sources(*guess.credits(verdict.path))
        self.stats.record_verify(event.sent_s, event.received_s)
        verified = judged.verified if self.stats.is_traced else None
        self.stats.trace_call(
            CallTrace(Call.VERIFY, event.sent_s, event.received_s, num_guesses, num_accepted, verdict.timing, verified)
        )

    def _problem_of(self, verdict: Verdict) -> str | None:
        """Why this verdict cannot be right, if it cannot."""
        problem = problem_of(verdict, self._guess.block, len(self._log), self._pair.target.vocab_size)
        if problem is None and verdict.continued and self._offers.taken_by(verdict) is None:
            return "it goes on with what it was not offered"
        if problem is None and self._held.wants_prompt_logprobs:
            num_scored = len(self._request.prompt) - 1
            return None if len(verdict.prompt_logprobs) == num_scored else "it has not scored the whole prompt"
        return problem

    def _resend(self, missing: Missing) -> list[m.Command]:
        if not self._held.must_resend(missing.held):
            return self._lose_target("it does not keep what it is sent")
        self._machine.fire(Trigger.MISSING)
        return [self._verify()]

    def _on_target_lost(self, event: m.TargetLost) -> list[m.Command]:
        is_current = event.epoch == self._held.epoch and self._machine.can(Trigger.LOST)
        return self._lose_target(event.reason, is_failure=not event.is_planned) if is_current else []

    def _lose_target(self, reason: str, *, is_failure: bool = True) -> list[m.Command]:
        """Go on elsewhere: the committed tokens are all that another target needs."""
        self.stats.num_target_failures += is_failure
        self._num_losses += is_failure
        if self._num_losses > self._pair.limits.max_target_retries:
            return self._fail(Unavailable(f"the target failed {self._num_losses} times in a row: {reason}"))
        if self.stats.explanation is not None:
            self.stats.explanation.say(f"the target was left ({reason}), and another is asked")
        self._machine.fire(Trigger.LOST)
        self._held.awaiting = None
        self._judged = None
        self._offers.clear()
        pause_s = 0.05 * 2**self._num_losses
        return [m.ReleaseTarget(), m.LeaseTarget(delay_s=pause_s)]

    # The draft's side

    def _numbered(self, draft: int) -> DraftSide:
        return self._extra_drafts.numbered(draft) or self._draft_side

    def _named(self, lease: str) -> DraftSide:
        return self._extra_drafts.named(lease) or self._draft_side

    def _on_draft_leased(self, event: m.DraftLeased) -> list[m.Command]:
        return [*self._numbered(event.draft).leased(event.name, event.epoch), *self._go_on()]

    def _on_draft_grew(self, event: m.DraftGrew) -> list[m.Command]:
        return [*self._named(event.draft_update.stamp.session).grew(event), *self._go_on()]

    def _on_draft_replied(self, event: m.DraftReplied) -> list[m.Command]:
        return [*self._named(event.reply.stamp.session).ended(event), *self._go_on()]

    def _on_draft_late(self, event: m.DraftLate) -> list[m.Command]:
        return [*self._named(event.stamp.session).late(event.stamp), *self._go_on()]

    def _on_draft_not_leased(self, event: m.DraftNotLeased) -> list[m.Command]:
        return [self._numbered(event.draft).lease_later()]

    def _on_draft_lost(self, event: m.DraftLost) -> list[m.Command]:
        return [*self._numbered(event.draft).lost(event.epoch), *self._go_on()]

    # The end

    def break_off(self) -> None:
        """A defect has ended this session in some state or other: let go of what others share with it."""
        self._policy.close()
        self._extra_drafts.let_go()

    def _on_abandoned(self, event: m.Abandoned) -> list[m.Command]:
        return self._fail(event.error)

    def _emit(self, chunk: Chunk) -> Chunk:
        if self._request.wants_trace:
            chunk = replace(chunk, trace=self.stats.take_trace(), began_s=self.stats.began_s)
        if self.stats.explanation is not None:
            chunk = replace(chunk, explanation=self.stats.explanation.take())
        if chunk.finish_reason is None:
            return chunk
        self.stats.num_draft_failures += self._extra_drafts.num_failures
        return replace(chunk, stats=self.stats.snapshot())

    def _fail(self, error: OutriderError) -> list[m.Command]:
        return [m.Fail(error), *self._close()]

    def _close(self) -> list[m.Command]:
        self._machine.fire(Trigger.END)
        self._held.awaiting = None
        self._draft_side.close()
        self._policy.close()
        return [m.ReleaseTarget(), m.ReleaseDraft(), *self._extra_drafts.end()]
