"""One completion as a state machine without I/O: events in, commands out.

The session owns the committed tokens. Engines hold copies of a prefix of them, and every message names the prefix it
builds on, so whatever an engine has forgotten is sent again. Nothing that a draft says can reach the output but through
a verdict of the target.

Handlers record what has happened; `_go_on` alone decides, from the joint state, what is to be done next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from core.errors import OutriderError, ServiceError, Unavailable, UnsoundScores
from core.records import (
    Call,
    CallTrace,
    Chunk,
    GenerationRequest,
    Missing,
    Refused,
    Verdict,
    VerifyRequest,
)
from core.trees import ROOT
from orchestrator import messages as m
from orchestrator.detokenize import IncrementalDetokenizer
from orchestrator.guess import NO_GUESS, Guess
from orchestrator.held import Held
from orchestrator.output import Committed, Output
from orchestrator.pair import Completion, Pair
from orchestrator.pilot import Found, Pilot, RoundSeen
from orchestrator.states import TARGET_TABLE, Machine, Target, Trigger
from orchestrator.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict that has been committed, until it is known whether the next block was there."""

    guess: Guess
    num_committed: int
    """When the guess was sent."""
    verdict: Verdict
    elapsed_s: float
    """From sending the guess, or from the verdict with which the target went on with it, to having this one."""
    is_continued: bool
    """Whether the target went on with it by itself."""

    @property
    def end(self) -> int:
        """The last accepted node."""
        return self.verdict.path[-1] if self.verdict.path else ROOT


class DraftSide(Protocol):
    """A session's dealings with its draft, as far as all sessions have them."""

    def begin(self) -> list[m.Command]: ...

    def place_later(self) -> m.Command: ...

    def lost(self, epoch: int) -> list[m.Command]: ...

    def close(self) -> None: ...


class Session(ABC):
    """The life of one completion. `start` once, then `handle` each event; both return what is to be done.

    Where blocks come from is the subclass's affair (`steady_session`).

    Invariant: at most one message to each engine is awaited.
    Invariant: after a Fail, or an Emit with a finish reason, no command but releases follows.
    """

    def __init__(
        self,
        request: GenerationRequest,
        pair: Pair,
        pilot: Pilot,
        detokenizer: IncrementalDetokenizer,
        session_id: str,
    ) -> None:
        self.id = session_id
        self.stats = Statistics(request.wants_trace)
        self._num_losses = 0
        """Of targets in a row, no verdict in between."""
        self._request = request
        self._pair = pair
        self._pilot = pilot
        self._completion = Completion.begin(request, pair, session_id)
        self._log = self._completion.log
        self._output = Output(request, frozenset(pair.target.eos_token_ids), detokenizer)
        self._machine = Machine(TARGET_TABLE, Target.UNPLACED)
        self._held = Held(self._log, self._completion.spec)
        self._guess: Guess = NO_GUESS
        """What is being verified."""
        self._is_continued = False
        """Whether the target has made the message that is awaited for itself."""
        self._judged: Judged | None = None
        self._handlers: dict[type[m.Event], Callable[..., list[m.Command]]] = {
            m.TargetPlaced: self._on_target_placed,
            m.TargetReplied: self._on_target_replied,
            m.TargetLost: self._on_target_lost,
            m.DraftUnplaced: self._on_draft_unplaced,
            m.DraftLost: self._on_draft_lost,
            m.Abandoned: self._on_abandoned,
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._machine} {self._drafting} {self._log}>"

    @property
    @abstractmethod
    def _drafting(self) -> DraftSide: ...

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
        wants_draft = self._request.max_draft_tokens != 0 and self._pair.speculation.max_draft_tokens > 0
        return [m.PlaceTarget(), *(self._drafting.begin() if wants_draft else [])]

    def handle(self, event: m.Event) -> list[m.Command]:
        """What is to be done about `event`; nothing, once the session is closed."""
        return [] if self.is_closed else self._handlers[type(event)](event)

    def _forget_offers(self) -> None:  # noqa: B027  who offers nothing forgets nothing
        """What the target was offered is of no use from now on."""

    # Decisions

    @abstractmethod
    def _go_on(self) -> list[m.Command]:
        """Whatever the joint state allows to be done now."""

    def _tell_pilot(self, judged: Judged, found: Found, unverified: tuple[float, bool] | None = None) -> None:
        verdict = judged.verdict
        self._pilot.saw_round(
            RoundSeen(
                judged.guess.shape,
                verdict.path,
                found,
                judged.elapsed_s,
                verdict.timing,
                judged.is_continued,
                unverified,
            )
        )

    @property
    def _max_depth(self) -> int:
        """Guesses in a row that could be used: a round also yields the target's own token, which needs none."""
        return self._output.num_remaining - 1

    def _send(self, guess: Guess) -> list[m.Command]:
        """Have `guess` verified, and go on beside it."""
        self._guess = guess
        return [self._verify(), *self._go_on()]

    def _verify(self) -> m.Command:
        self._machine.fire(Trigger.VERIFY)
        stamp, base, suffix, spec = self._held.snapshot()
        return m.Verify(VerifyRequest(stamp, base, suffix, self._guess.block, spec))

    # The target's side

    def _on_target_placed(self, event: m.TargetPlaced) -> list[m.Command]:
        """Begin, or begin again: a block whose verdict was lost with its target is verified once more."""
        self._machine.fire(Trigger.PLACED)
        self._held.place(event.name, event.epoch)
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

    def _on_unawaited(self, _event: m.TargetReplied) -> list[m.Command]:
        """It must change nothing."""
        self.stats.num_stale_replies += 1
        return []

    def _on_verdict(self, verdict: Verdict, event: m.TargetReplied) -> list[m.Command]:
        if (problem := self._problem_of(verdict)) is not None:
            return self._lose_target(problem)
        self._machine.fire(Trigger.VERDICT)
        self._num_losses = 0
        guess, self._guess = self._guess, NO_GUESS
        self._judged = Judged(guess, len(self._log), verdict, event.received_s - event.sent_s, self._is_continued)
        chunk = self._commit(guess, verdict)
        self._record(guess, verdict, event)
        emit = self._emit(chunk)
        if chunk.finish_reason is None:
            return [*self._go_on(), emit]  # the target must not wait for the client
        self._tell_pilot(self._judged, Found.NOT_ASKED)
        return [emit, *self._close()]

    def _commit(self, guess: Guess, verdict: Verdict) -> Chunk:
        guesses = tuple(guess.block.tokens[node] for node in verdict.path)
        tokens = (*guesses, verdict.next_token)
        self._log.extend(tokens)
        self._held.take(verdict.held)
        return self._output.commit(Committed(tokens, (True,) * len(guesses) + (False,), verdict.logprobs))

    def _record(self, guess: Guess, verdict: Verdict, event: m.TargetReplied) -> None:
        num_accepted = len(verdict.path)
        self.stats.record_round(len(guess), num_accepted, guess.shape.num_looked_up)
        self.stats.record_verify(event.sent_s, event.received_s)
        self.stats.trace_call(
            CallTrace(Call.VERIFY, event.sent_s, event.received_s, len(guess), num_accepted, verdict.timing)
        )

    def _problem_of(self, verdict: Verdict) -> str | None:
        """Why this verdict cannot be right, if it cannot."""
        block = self._guess.block
        parent = ROOT
        for node in verdict.path:
            if not 0 <= node < len(block) or block.parents[node] != parent:
                return "its accepted path is not a path of the block"
            parent = node
        if not 0 <= verdict.next_token < self._pair.target.vocab_size:
            return "its next token is outside the vocabulary"
        if not 0 <= verdict.held <= len(self._log) + len(verdict.path):
            return "it claims to hold tokens that it was not sent"
        return None

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
        self._machine.fire(Trigger.LOST)
        self._held.awaiting = None
        self._judged = None
        self._forget_offers()
        pause_s = 0.05 * 2**self._num_losses
        return [m.ReleaseTarget(), m.PlaceTarget(delay_s=pause_s)]

    # The draft's side

    def _on_draft_unplaced(self, _event: m.DraftUnplaced) -> list[m.Command]:
        return [self._drafting.place_later()]

    def _on_draft_lost(self, event: m.DraftLost) -> list[m.Command]:
        return [*self._drafting.lost(event.epoch), *self._go_on()]

    # The end

    def break_off(self) -> None:
        """A defect has ended this session in some state or other: let go of what others share with it."""
        self._pilot.close()

    def _on_abandoned(self, event: m.Abandoned) -> list[m.Command]:
        return self._fail(event.error)

    def _emit(self, chunk: Chunk) -> m.Command:
        if self._request.wants_trace:
            chunk = replace(chunk, trace=self.stats.take_trace())
        return m.Emit(chunk if chunk.finish_reason is None else replace(chunk, stats=self.stats.snapshot()))

    def _fail(self, error: OutriderError) -> list[m.Command]:
        return [m.Fail(error), *self._close()]

    def _close(self) -> list[m.Command]:
        self._machine.fire(Trigger.END)
        self._held.awaiting = None
        self._drafting.close()
        self._pilot.close()
        return [m.ReleaseTarget(), m.ReleaseDraft()]
