"""One completion as a state machine without I/O: events in, commands out.

The session owns the committed tokens. Engines hold copies of a prefix of them, and every message names the prefix it
builds on, so whatever an engine has forgotten is sent again. Nothing that a draft says can reach the output but through
a verdict of the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from core.config import Limits, SpeculationConfig
from core.errors import OutriderError, ServiceError, Unavailable
from core.records import (
    EMPTY_BLOCK,
    Base,
    Drafted,
    DraftRequest,
    GenerationRequest,
    Missing,
    ModelInfo,
    Refused,
    SequenceSpec,
    Stamp,
    TokenTree,
    Verdict,
    Verification,
    VerifyRequest,
)
from core.token_log import TokenLog
from orchestrator import messages as m
from orchestrator.detokenize import IncrementalDetokenizer
from orchestrator.output import Committed, Output
from orchestrator.states import DRAFT_TABLE, TARGET_TABLE, Draft, Machine, Target, Trigger
from orchestrator.statistics import Statistics

MAX_RESENDS = 3
"""Times an engine may say Missing to the same message before it counts as lost."""
MAX_DRAFT_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Pair:
    """What a session must know of the models it is served by."""

    target: ModelInfo
    draft: ModelInfo | None
    speculation: SpeculationConfig
    limits: Limits


@dataclass(slots=True)
class _Side:
    """What one engine is believed to hold, and the message it has not answered yet."""

    name: str = ""
    epoch: int = 0
    held: int = 0
    awaiting: Stamp | None = None
    num_resends: int = 0

    def placed(self, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.held, self.awaiting, self.num_resends = 0, None, 0

    def answers(self, stamp: Stamp) -> bool:
        """Whether this is the reply that is waited for; any other is stale and must change nothing."""
        return self.awaiting is not None and stamp == self.awaiting


class Session:
    """The life of one completion. `start` once, then `handle` each event; both return what is to be done.

    Invariant: at most one message to each engine is unanswered.
    Invariant: after a Fail, or an Emit with a finish reason, no command but releases follows.
    """

    def __init__(
        self, request: GenerationRequest, pair: Pair, detokenizer: IncrementalDetokenizer, session_id: str
    ) -> None:
        self.id = session_id
        self.stats = Statistics()
        self._request = request
        self._pair = pair
        self._log = TokenLog(request.prompt)
        self._spec = SequenceSpec(len(request.prompt), request.sampling, request.verification, request.num_logprobs)
        self._output = Output(request, frozenset(pair.target.eos_token_ids), detokenizer)
        self._target_machine = Machine(TARGET_TABLE, Target.UNPLACED)
        self._draft_machine = Machine(DRAFT_TABLE, Draft.ABSENT)
        self._target = _Side()
        self._draft = _Side()
        self._num_messages = 0
        self._draft_pause_s = pair.speculation.draft_retry_s
        self._block = EMPTY_BLOCK
        self._num_wanted = 0
        self._handlers: dict[type[m.Event], Callable[..., list[m.Command]]] = {
            m.TargetPlaced: self._on_target_placed,
            m.TargetReplied: self._on_target_replied,
            m.TargetLost: self._on_target_lost,
            m.DraftPlaced: self._on_draft_placed,
            m.DraftUnplaced: self._on_draft_unplaced,
            m.DraftReplied: self._on_draft_replied,
            m.DraftLate: self._on_draft_late,
            m.DraftLost: self._on_draft_lost,
            m.Abandoned: self._on_abandoned,
        }

    def __repr__(self) -> str:
        return f"<Session {self.id} {self._target_machine} {self._draft_machine} {self._log}>"

    @property
    def is_closed(self) -> bool:
        return self._target_machine.state is Target.CLOSED

    def start(self) -> list[m.Command]:
        """Ask for places; or end at once, if the output to resume is complete already."""
        if self._request.resume_tokens:
            self._log.extend(self._request.resume_tokens)
            if (chunk := self._output.resume(self._request.resume_tokens)) is not None:
                return [m.Emit(replace(chunk, stats=self.stats.snapshot())), *self._close()]
        commands: list[m.Command] = [m.PlaceTarget()]
        if self._pair.draft is not None and self._max_draft_tokens > 0:
            commands.append(m.PlaceDraft())
        return commands

    def handle(self, event: m.Event) -> list[m.Command]:
        """What is to be done about `event`; nothing, once the session is closed."""
        return [] if self.is_closed else self._handlers[type(event)](event)

    # The target's side

    def _on_target_placed(self, event: m.TargetPlaced) -> list[m.Command]:
        self._target_machine.fire(Trigger.PLACED)
        self._target.placed(event.name, event.epoch)
        return [self._verify(EMPTY_BLOCK)]

    def _verify(self, block: TokenTree) -> m.Command:
        self._target_machine.fire(Trigger.VERIFY)
        self._block = block
        stamp, base, suffix, spec = self._snapshot(self._target)
        return m.Verify(VerifyRequest(stamp, base, suffix, block, spec))

    def _on_target_replied(self, event: m.TargetReplied) -> list[m.Command]:
        reply = event.reply
        if not self._target.answers(reply.stamp):
            self.stats.num_stale_replies += 1
            return []
        match reply:
            case Verdict():
                return self._on_verdict(reply)
            case Missing():
                return self._resend_to_target(reply)
            case Refused():
                return self._fail(ServiceError(reply.reason))

    def _on_verdict(self, verdict: Verdict) -> list[m.Command]:
        if (problem := self._problem_of(verdict)) is not None:
            return self._lose_target(problem)
        self._target_machine.fire(Trigger.VERDICT)
        self._target.awaiting, self._target.num_resends = None, 0
        guesses = tuple(self._block.tokens[node] for node in verdict.path)
        tokens = (*guesses, verdict.next_token)
        self._target.held = verdict.held
        self._log.extend(tokens)
        self.stats.record_round(len(self._block), len(guesses))
        chunk = self._output.commit(Committed(tokens, (True,) * len(guesses) + (False,), verdict.logprobs))
        if chunk.finish_reason is not None:
            return [m.Emit(replace(chunk, stats=self.stats.snapshot())), *self._close()]
        return [m.Emit(chunk), *self._next_round()]

    def _problem_of(self, verdict: Verdict) -> str | None:
        """Why this verdict cannot be right, if it cannot."""
        parent = -1
        for node in verdict.path:
            if not 0 <= node < len(self._block) or self._block.parents[node] != parent:
                return "its accepted path is not a path of the block"
            parent = node
        if not 0 <= verdict.next_token < self._pair.target.vocab_size:
            return "its next token is outside the vocabulary"
        if not 0 <= verdict.held <= len(self._log) + len(verdict.path):
            return "it claims to hold tokens that it was not sent"
        return None

    def _resend_to_target(self, missing: Missing) -> list[m.Command]:
        self._target.num_resends += 1
        if self._target.num_resends > MAX_RESENDS or not 0 <= missing.held <= len(self._log):
            return self._lose_target("it does not keep what it is sent")
        self._target_machine.fire(Trigger.MISSING)
        self._target.held = min(missing.held, len(self._log) - 1)
        return [self._verify(self._block)]

    def _on_target_lost(self, event: m.TargetLost) -> list[m.Command]:
        is_current = event.epoch == self._target.epoch and self._target_machine.can(Trigger.LOST)
        return self._lose_target(event.reason) if is_current else []

    def _lose_target(self, reason: str) -> list[m.Command]:
        """Go on elsewhere: the committed tokens are all that another target needs."""
        self.stats.num_target_failures += 1
        if self.stats.num_target_failures > self._pair.limits.max_target_retries:
            return self._fail(Unavailable(f"the target failed {self.stats.num_target_failures} times: {reason}"))
        self._target_machine.fire(Trigger.LOST)
        self._target.awaiting = None
        pause_s = 0.05 * 2**self.stats.num_target_failures
        return [m.ReleaseTarget(), m.PlaceTarget(delay_s=pause_s)]

    # The draft's side

    def _on_draft_placed(self, event: m.DraftPlaced) -> list[m.Command]:
        self._draft_machine.fire(Trigger.PLACED)
        self._draft.placed(event.name, event.epoch)
        return [self._ask_draft(0)]

    def _on_draft_unplaced(self, _event: m.DraftUnplaced) -> list[m.Command]:
        return [self._place_draft_later()]

    def _place_draft_later(self) -> m.Command:
        pause_s = self._draft_pause_s
        self._draft_pause_s = min(2 * pause_s, MAX_DRAFT_PAUSE_S)
        return m.PlaceDraft(delay_s=pause_s)

    def _ask_draft(self, num_tokens: int) -> m.Command:
        self._draft_machine.fire(Trigger.DRAFT)
        self._num_wanted = num_tokens
        stamp, base, suffix, spec = self._snapshot(self._draft)
        request = DraftRequest(stamp, base, suffix, num_tokens, spec)
        return m.Draft(request, self._pair.speculation.draft_timeout_s)

    def _on_draft_replied(self, event: m.DraftReplied) -> list[m.Command]:
        reply = event.reply
        if not self._draft.answers(reply.stamp):
            self.stats.num_stale_replies += 1
            return []
        self._draft.awaiting = None
        match reply:
            case Drafted():
                return self._on_drafted(reply)
            case Missing():
                return self._resend_to_draft(reply)
            case Refused():
                return self._lose_draft()

    def _on_drafted(self, drafted: Drafted) -> list[m.Command]:
        self._draft_machine.fire(Trigger.DRAFTED)
        self._draft.num_resends = 0
        if drafted.held < 0 or not self._is_usable(drafted.block):
            return self._lose_draft()
        self._draft.held = min(drafted.held, len(self._log) - 1)
        if self._target_machine.state is not Target.AWAITING_BLOCK:
            return []
        self._draft_pause_s = self._pair.speculation.draft_retry_s
        self._target_machine.fire(Trigger.BLOCK)
        return [self._verify(drafted.block)]

    def _is_usable(self, block: TokenTree) -> bool:
        """Whether the target may be shown this block; a corrupt draft must not cost a target pass."""
        vocab_size = self._pair.target.vocab_size
        needs_q = self._request.verification is not Verification.COUPLED and not self._request.sampling.is_greedy
        return (
            block.is_chain
            and len(block) <= self._num_wanted
            and all(0 <= token < vocab_size for token in block.tokens)
            and (not needs_q or len(block.q) == len(block))
        )

    def _resend_to_draft(self, missing: Missing) -> list[m.Command]:
        self._draft.num_resends += 1
        if self._draft.num_resends > MAX_RESENDS or missing.held < 0:
            return self._lose_draft()
        self._draft_machine.fire(Trigger.MISSING)
        self._draft.held = min(missing.held, len(self._log) - 1)
        is_awaited = self._target_machine.state is Target.AWAITING_BLOCK
        return [self._ask_draft(self._num_wanted if is_awaited else 0)]

    def _on_draft_late(self, event: m.DraftLate) -> list[m.Command]:
        """The round goes on; the draft stays busy until it answers, and is not asked before."""
        return self._go_on_without_block() if self._draft.answers(event.stamp) else []

    def _on_draft_lost(self, event: m.DraftLost) -> list[m.Command]:
        is_current = event.epoch == self._draft.epoch and self._draft_machine.can(Trigger.LOST)
        return self._lose_draft() if is_current else []

    def _lose_draft(self) -> list[m.Command]:
        self._draft_machine.fire(Trigger.LOST)
        self._draft.awaiting = None
        return [m.ReleaseDraft(), self._place_draft_later(), *self._go_on_without_block()]

    def _go_on_without_block(self) -> list[m.Command]:
        if self._target_machine.state is not Target.AWAITING_BLOCK:
            return []
        self.stats.num_draft_failures += 1
        self._target_machine.fire(Trigger.NO_BLOCK)
        return [self._verify(EMPTY_BLOCK)]

    # Both

    def _next_round(self) -> list[m.Command]:
        num_tokens = self._num_to_draft()
        if num_tokens == 0 or self._draft_machine.state is not Draft.READY:
            return [self._verify(EMPTY_BLOCK)]
        self._target_machine.fire(Trigger.DRAFT)
        return [self._ask_draft(num_tokens)]

    @property
    def _max_draft_tokens(self) -> int:
        asked = self._request.max_draft_tokens
        configured = self._pair.speculation.max_draft_tokens
        return configured if asked is None else min(asked, configured)

    def _num_to_draft(self) -> int:
        """Draft length of the next round: a round also yields the target's own token, which needs no guess."""
        if self._pair.draft is None:
            return 0
        room = min(self._pair.draft.max_context_tokens, self._pair.draft.kv_cache_tokens) - len(self._log)
        return max(0, min(self._max_draft_tokens, self._output.num_remaining - 1, room))

    def _snapshot(self, side: _Side) -> tuple[Stamp, Base, tuple[int, ...], SequenceSpec | None]:
        """The committed tokens as a message to this side, which is awaited from now on: stamp, base, suffix, spec."""
        self._num_messages += 1
        side.awaiting = Stamp(side.name, side.epoch, self._num_messages)
        spec = self._spec if side.held == 0 else None
        return side.awaiting, self._log.base(side.held), self._log.since(side.held), spec

    def _on_abandoned(self, event: m.Abandoned) -> list[m.Command]:
        return self._fail(event.error)

    def _fail(self, error: OutriderError) -> list[m.Command]:
        return [m.Fail(error), *self._close()]

    def _close(self) -> list[m.Command]:
        self._target_machine.fire(Trigger.END)
        self._draft_machine.fire(Trigger.END)
        self._target.awaiting = self._draft.awaiting = None
        return [m.ReleaseTarget(), m.ReleaseDraft()]
