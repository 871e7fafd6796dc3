"""A session's dealings with its draft: what it may be asked, what it was asked, and what it said in time.

Knows the draft's machine, lease, breaker and answers. Must not know verdicts' tokens beyond where they lead in a table,
nor the target: nothing here can change the output, only how soon it comes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace

from core.config import DECODE_TOKENS
from core.records import Call, CallTrace, Drafted, DraftRequest, GrownTree, Missing, Refused, Stamp
from core.trees import NO_GROWTH, Growth
from orchestrator import messages as m
from orchestrator.guess import (
    NO_GUESS,
    NOWHERE,
    Followed,
    Guess,
    OutcomeTable,
    read_block,
    read_table,
)
from orchestrator.held import Held
from orchestrator.pair import Completion
from orchestrator.pilot import AskedPilot, DraftSeen, Found
from orchestrator.states import DRAFT_TABLE, Draft, Machine, Trigger
from orchestrator.statistics import Statistics

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 60.0

_CALLS = {Draft.CATCHING_UP: Call.PREFILL, Draft.DRAFTING: Call.BLOCK, Draft.PREPARING: Call.TABLE}


class Drafting:
    """The draft's side of one session. Methods that may ask something answer the commands for it."""

    def __init__(self, completion: Completion, pilot: AskedPilot, stats: Statistics) -> None:
        self._pair = completion.pair
        self._pilot = pilot
        self._stats = stats
        self._log = completion.log
        self._machine = Machine(DRAFT_TABLE, Draft.ABSENT)
        self._held = Held(completion.log, completion.spec)
        self._asked: DraftRequest | None = None
        self._block: Guess = NO_GUESS
        self._table: OutcomeTable | None = None
        self._table_trace: CallTrace | None = None
        self._has_asked_table = False
        self._is_late = False
        self._num_late_rounds = 0
        self._pause_s = self._pair.speculation.draft_retry_s
        self._jitter = random.Random(completion.session_id)  # noqa: S311  spreads load, keeps no secret

    def __repr__(self) -> str:
        return f"<Drafting {self._machine} {self._held}{', late' if self._is_late else ''}>"

    @property
    def is_table_due(self) -> bool:
        """Whether a table is being prepared and may still be waited for."""
        return self._machine.state is Draft.PREPARING and not self._is_late

    @property
    def is_block_due(self) -> bool:
        return self._machine.state is Draft.DRAFTING and not self._is_late

    @property
    def has_table(self) -> bool:
        return self._table is not None

    # The lease

    def begin(self) -> list[m.Command]:
        """Ask for a place, where there is a draft at all."""
        return [m.PlaceDraft()] if self._pair.draft is not None else []

    def placed(self, name: str, epoch: int) -> None:
        self._machine.fire(Trigger.PLACED)
        self._held.place(name, epoch)

    def place_later(self) -> m.Command:
        """Try for a place after a pause that doubles, jittered so that many sessions do not come back as one."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return m.PlaceDraft(delay_s=pause_s * self._jitter.uniform(0.5, 1.0))

    def lose(self) -> list[m.Command]:
        """Do without this draft, and try for another."""
        self._stats.num_draft_failures += self._machine.state is not Draft.READY
        self._machine.fire(Trigger.LOST)
        self._forget()
        self._held.awaiting = None
        self._num_late_rounds = 0
        return [m.ReleaseDraft(), self.place_later()]

    def lost(self, epoch: int) -> list[m.Command]:
        """The engine is gone, if it is the one that is leased."""
        is_current = epoch == self._held.epoch and self._machine.can(Trigger.LOST)
        return self.lose() if is_current else []

    def close(self) -> None:
        self._machine.fire(Trigger.END)
        self._held.awaiting = None

    # Asking

    def prepare(self, guess: Guess, depth: int) -> list[m.Command]:
        """Give the draft something to do while `guess` is verified: a table, or what it lacks of the text.

        `depth` bounds the blocks below the outcomes.
        """
        if self._machine.state is not Draft.READY or not self._pilot.wants_draft or self._room <= 0:
            return []
        if self._held.num_behind > DECODE_TOKENS:
            return [self._ask(Trigger.CATCH_UP, NO_GROWTH)]
        if self._has_asked_table:
            return []
        depth_of_block = max(guess.block.depths, default=0)
        growth = self._growth(lambda limit: self._pilot.table(guess.shape, limit), depth, depth_of_block + 1)
        if not len(growth):
            is_first = self._held.num_tokens == 0 and self._held.num_behind > 1  # one token goes with any question
            return [self._ask(Trigger.CATCH_UP, NO_GROWTH)] if is_first else []
        self._has_asked_table = True
        return [self._ask(Trigger.PREPARE, growth, guess)]

    def ask_block(self, depth: int) -> list[m.Command]:
        """Ask for a block to verify next, if the pilot thinks it worth the wait."""
        is_able = self._machine.state is Draft.READY and self._held.num_behind <= DECODE_TOKENS
        if not is_able or not self._pilot.wants_draft:
            return []
        growth = self._growth(self._pilot.block, depth, 0)
        return [self._ask(Trigger.DRAFT, growth)] if len(growth) else []

    def _growth(self, choose: Callable[[int], Growth], depth: int, depth_above: int) -> Growth:
        """What the pilot chooses within the client's wishes and the draft's own context."""
        limit = min(depth, self._room - depth_above)
        return choose(limit) if limit > 0 else NO_GROWTH

    @property
    def _room(self) -> int:
        """Tokens that the draft's context has left; below 0 where the text is too long for it."""
        draft = self._pair.draft
        assert draft is not None, "a draft is asked only where there is one"
        return min(draft.max_context_tokens, draft.kv_cache_tokens) - len(self._log)

    def _ask(self, trigger: Trigger, growth: Growth, guess: Guess = NO_GUESS) -> m.Command:
        self._forget()
        self._machine.fire(trigger)
        stamp, base, suffix, spec = self._held.snapshot()
        is_table = trigger is Trigger.PREPARE
        self._asked = DraftRequest(stamp, base, suffix, growth, guess.block, is_table=is_table, spec=spec)
        timeout_s = None if trigger is Trigger.CATCH_UP else self._pilot.patience_s
        return m.Draft(self._asked, timeout_s)

    def _forget(self) -> None:
        """What was prepared for an earlier state of the text is no answer to this one."""
        self._keep_trace(0)
        self._block, self._table, self._is_late = NO_GUESS, None, False

    # Answers

    def replied(self, event: m.DraftReplied) -> list[m.Command]:
        """Take an answer in, if it is the one that is waited for. What it is worth is asked for later."""
        reply = event.reply
        if not self._held.answers(reply.stamp):
            self._stats.num_stale_replies += 1
            return []
        match reply:
            case Drafted():
                return self._on_drafted(reply, event)
            case Missing():
                return self._on_missing(reply)
            case Refused() | GrownTree():  # nobody asked for a tree
                return self.lose()

    def _on_missing(self, missing: Missing) -> list[m.Command]:
        """The round goes on without: the draft has to catch up by prefill."""
        if not self._held.must_resend(missing.held):
            return self.lose()
        self._machine.fire(Trigger.MISSING)
        self._has_asked_table = False
        return []

    def _on_drafted(self, drafted: Drafted, event: m.DraftReplied) -> list[m.Command]:
        asked, state = self._asked, self._machine.state
        assert asked is not None, "an answer that is waited for has a question"
        try:
            self._take_in(asked, drafted, state)
        except (ValueError, TypeError, AttributeError, IndexError) as error:  # what was pickled was not checked
            logger.warning("a draft's answer is corrupt: %r", error)
            return self.lose()
        self._machine.fire(Trigger.DRAFTED)
        self._held.take(drafted.held)
        if state is not Draft.CATCHING_UP:
            self._num_late_rounds = 0
            self._pause_s = self._pair.speculation.draft_retry_s
        self._observe(asked, drafted, event, _CALLS[state])
        return []

    def _take_in(self, asked: DraftRequest, drafted: Drafted, state: Draft) -> None:
        """Raises: ValueError when the answer is corrupt."""
        if drafted.held != asked.num_committed:
            raise ValueError("a draft does not hold what it was sent")
        vocab_size = self._pair.target.vocab_size
        if state is Draft.DRAFTING:
            self._block = read_block(asked, drafted, vocab_size)
        elif state is Draft.PREPARING:
            self._table = read_table(asked, drafted, vocab_size)

    def _observe(self, asked: DraftRequest, drafted: Drafted, event: m.DraftReplied, call: Call) -> None:
        num_grown = len(self._block) + (len(self._table) if self._table is not None else 0)
        trace = CallTrace(call, event.sent_s, event.received_s, num_grown, timing=drafted.timing)
        if call is Call.TABLE:
            self._table_trace = trace
        else:
            self._stats.trace.append(trace)
        if call is not Call.PREFILL:
            self._stats.record_draft(event.sent_s, event.received_s)
            elapsed_s = event.received_s - event.sent_s
            self._pilot.saw_draft(DraftSeen(asked.is_table, elapsed_s, drafted.timing))

    def late(self, stamp: Stamp) -> None:
        """The draft has not answered in time. It stays busy until it does, and is not asked before."""
        if self._held.answers(stamp) and not self._is_late:
            self._is_late = True
            self._pilot.saw_late_draft()

    def go_without(self) -> list[m.Command]:
        """A round has to go on without the draft's answer; after several in a row the lease is given up."""
        if not self._is_late or self._machine.state not in (Draft.DRAFTING, Draft.PREPARING):
            return []
        self._num_late_rounds += 1
        if self._num_late_rounds >= self._pair.speculation.breaker_rounds:
            return self.lose()
        self._stats.num_draft_failures += 1
        return []

    def take_block(self) -> Guess:
        """The block that was drafted just in time; no guess if there is none."""
        block, self._block = self._block, NO_GUESS
        return block

    def follow(self, verified: Guess, num_committed: int, end: int, token: int) -> tuple[Found, Followed]:
        """What was prepared for this verdict: the path to `end` of what was `verified` is accepted, then comes `token`.

        `num_committed` tokens stood when it was sent. A table serves once, and only the very block it was made for.
        """
        table, self._table = self._table, None
        was_asked, self._has_asked_table = self._has_asked_table, False
        if table is None or not self._is_for(verified, num_committed):
            return (Found.LATE if was_asked and self._is_late else Found.NOT_ASKED), NOWHERE
        followed = table.follow(end, token)
        self._keep_trace(len(followed.guess))
        return (Found.HIT if len(followed.guess) else Found.MISS), followed

    def _is_for(self, verified: Guess, num_committed: int) -> bool:
        asked = self._asked
        return asked is not None and asked.num_committed == num_committed and asked.block == verified.block

    def _keep_trace(self, num_used: int) -> None:
        if self._table_trace is not None:
            self._stats.trace.append(replace(self._table_trace, num_used=num_used))
            self._table_trace = None
