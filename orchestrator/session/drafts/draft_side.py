"""A session's side of one draft: its lease, its messages and its draft tree.

Must not know the target: nothing here can change the output, only its speed.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from core.config import DECODE_TOKENS
from core.records import Call, CallTrace, DraftRequest, DraftUpdate, Features, Missing, Refused, Stamp
from orchestrator.policy import TreePolicy
from orchestrator.session import messages as m
from orchestrator.session.drafts.backoff import Backoff
from orchestrator.session.drafts.block_chooser import BlockChooser
from orchestrator.session.drafts.feature_log import FeatureLog
from orchestrator.session.drafts.growth_check import CORRUPT, check_growth
from orchestrator.session.drafts.open_messages import OpenMessages
from orchestrator.session.drafts.silence import MAX_OPEN, Silence
from orchestrator.session.engine_view import EngineView, SessionText
from orchestrator.session.pair import Pair
from orchestrator.session.recorder import Recorder
from orchestrator.session.sourced_block import SourcedBlock
from orchestrator.session.states import GROWING_TABLE, Growing, Machine, Trigger

logger = logging.getLogger(__name__)


class DraftSide:
    """The draft's side of one session. Methods return the commands to execute.

    Several messages may be in flight: a newer one overtakes the earlier ones, and the draft then ends these.
    """

    def __init__(self, text: SessionText, pair: Pair, policy: TreePolicy, recorder: Recorder, number: int = 0) -> None:
        """`number`: index of this draft among the pair's drafts; 0 is the first."""
        self._recorder = recorder
        self._number = number
        self._model = pair.drafts[number]
        self._pair = pair
        self._policy = policy
        self._log = text.log
        self._machine = Machine(GROWING_TABLE, Growing.ABSENT)
        self._view = EngineView(text)
        self._is_sampled = text.spec.needs_q
        self._num_source = text.spec.num_source
        self.blocks = BlockChooser(policy, is_sampled=self._is_sampled)
        self._turn = 0
        """If drafting is in turn: maximum depth of the next block, while the draft grows for it. Otherwise 0."""
        self._is_over = True
        """Whether the draft has stopped growing until its next message."""
        self._num_passes = 0
        """Number of passes reported since the last message."""
        self._open = OpenMessages()
        self._has_backlog = False
        """Whether the last verdict was not sent to the draft, because too many messages are open."""
        self._waits_for: Stamp | None = None
        """Stamp that was the newest when the wait began or was renewed. Newer messages may have followed."""
        self.features = FeatureLog()
        """The target's features, for a draft that is a head."""
        self._silence = Silence(pair.speculation.breaker_rounds)
        seed = f"{text.session_id}/{number}" if number else text.session_id
        self._backoff = Backoff(pair.speculation.draft_retry_s, seed)

    def __repr__(self) -> str:
        return f"<DraftSide {self._machine} {self._view} {self.blocks}>"

    # The lease

    def begin(self) -> list[m.Command]:
        """Request a lease, if there is a draft."""
        return [m.LeaseDraft(draft=self._number)] if self._model is not None else []

    def leased(self, name: str, epoch: int) -> list[m.Command]:
        self._machine.fire(Trigger.LEASED)
        self._policy.begin_drafting()
        self._view.begin_lease(name, epoch)
        self._open.clear()
        return self.update()

    def lease_later(self) -> m.Command:
        """Request a lease after a pause, and continue without a draft until then."""
        self._silence.draft_left()
        return m.LeaseDraft(delay_s=self._backoff.next_s(), draft=self._number)

    def lose(self, reason: str = "it told nothing for several rounds") -> list[m.Command]:
        """Leave this draft after a failure, and request another."""
        self._recorder.draft_lost(reason)
        self._leave()
        return [self.release(), self.lease_later()]

    def release(self) -> m.ReleaseDraft:
        return m.ReleaseDraft(self._number)

    def _leave(self) -> None:
        self._machine.fire(Trigger.LOST)
        self._policy.end_drafting()
        self._silence.draft_left()
        self._recorder.guesses_used(0)
        self.blocks.reset()
        self._view.awaiting, self._waits_for, self._turn = None, None, 0

    def rest(self) -> list[m.Command]:
        """Leave the draft for a while, since its guesses are not worth verifying. Growth then starts anew."""
        self._recorder.draft_rested(self._policy.rest())
        self._leave()
        return [self.release(), self.lease_later()]

    def lost(self, epoch: int) -> list[m.Command]:
        """Leave the draft if the lost engine is the leased one."""
        return self.lose("its engine is gone") if epoch == self._view.epoch and self._machine.can(Trigger.LOST) else []

    def close(self) -> None:
        self._machine.fire(Trigger.END)
        self._view.awaiting = None

    # Messages to the draft

    def begin_round(self, max_depth: int, now_s: float) -> list[m.Command]:
        """Continue after a verdict: leave a draft that is silent or not worth its time, else send it the verdict."""
        self._silence.begin_round(now_s, self._max_silence_s)
        if self._silence.is_final:
            return self.lose()
        if self._policy.wants_rest and self.is_growing:
            return self.rest()
        return self._take_turn(max_depth)

    def _max_silence_s(self) -> float:
        """Seconds of silence after which the draft counts as late even if no block waits for it.

        A draft that has not reported under its lease may have a long prefill. It gets as much time as the session would
        pause before leasing again.
        """
        return self._policy.timeout_s if self._view.num_tokens else self._backoff.pause_s

    def _take_turn(self, max_depth: int) -> list[m.Command]:
        """Let the draft grow for the next block, whose depth is at most `max_depth`."""
        self._turn = 0
        if self._machine.state is Growing.ABSENT:  # the policy must not count turns that cannot be taken
            return []
        if self._policy.is_in_turn:
            if max_depth < 1:
                return []
            if not self._policy.wants_turn():
                self._recorder.turn_skipped(self._policy.why_no_turn)
                return []
            self._turn = 0 if self._view.num_behind > DECODE_TOKENS else max_depth
        return self.update()

    def update(self) -> list[m.Command]:
        """Send the draft the tokens committed since its last message. Request the whole tree again if nodes were
        lost."""
        if self._machine.state is Growing.ABSENT or (self._policy.is_paused and self._has_ended):
            return []
        tree_spec = self._policy.tree_spec(self._context_left, self._turn)
        if tree_spec is None:  # the request wants no draft, or the text fills the draft's context
            self._leave()
            return [self.release()]
        features = self._fitting_features if self.reads_features else None
        if self.reads_features and features is None:  # the first verdict has not come
            return []
        self._has_backlog = len(self._open) >= (1 if self._policy.is_in_turn else MAX_OPEN)
        self._silence.round_sent()
        if self._has_backlog:
            return []
        starts_anew = self._is_sampled or self.reads_features
        reports_all = starts_anew or self._view.num_tokens == 0 or self.blocks.tree.needs_full_report
        self._machine.fire(Trigger.GROW)
        stamp, base, spec = self._view.next_header()
        if reports_all:
            self._restart_tree()
            tree_spec = replace(tree_spec, reports_all=True)
        self._open.add(stamp.round, len(self._log), ends=tree_spec.ends, reports_all=reports_all)
        self._is_over, self._num_passes = False, 0
        return [DraftRequest(stamp, base, self._log.since(base.num_tokens), tree_spec, spec, features)]

    def _restart_tree(self) -> None:
        """Prepare the tree for nodes that are numbered anew.

        A head corrects its guesses by each verdict. Its earlier ones are good enough for the block that is sent now, so
        that the target need not wait.
        """
        if self.reads_features and not (self._is_sampled or self._policy.is_in_turn):
            self.blocks.restart()
        else:
            self.blocks.reset()

    @property
    def reads_features(self) -> bool:
        """Whether this draft is a head."""
        return self._model is not None and self._model.feature_width > 0

    @property
    def reads_prefix(self) -> bool:
        """Whether this draft is a head with KV of its own."""
        return self._model is not None and self._model.reads_prefix

    @property
    def _fitting_features(self) -> Features | None:
        """The features that a message needs, if they reach to the end of the text: those since the draft's last token,
        or the last one for a head that reads no others."""
        last = len(self._log) - 2
        features = self.features.since(min(last, self._view.num_tokens - 1) if self.reads_prefix else last)
        return features if features is not None and features.end == last + 1 else None

    @property
    def _context_left(self) -> int:
        """Number of tokens left in the draft's context."""
        assert self._model is not None, "a draft is asked only where there is one"
        return min(self._model.text_limit(self._num_source), self._model.kv_cache_tokens) - len(self._log)

    @property
    def _has_ended(self) -> bool:
        """Whether growth has ended, or is about to end by itself."""
        return self._is_over or self._open.will_end

    # Messages from the draft

    def replied(self, event: m.DraftReplied) -> list[m.Command]:
        """Handle new nodes, or the end of a message that the draft cannot continue or that a newer one overtook."""
        reply = event.reply
        is_open = self._is_leased(reply.stamp) and reply.stamp.round in self._open
        if self._machine.state is not Growing.GROWING or not is_open:  # or this is a duplicate reply
            self._recorder.reply_was_stale()
            return []
        if isinstance(reply, DraftUpdate):
            is_bounded = self._open.is_bounded(reply.stamp.round)
            return self._on_block(reply, event) if is_bounded else self._on_update(reply, event)
        return self._on_end(reply)

    def _on_update(self, update: DraftUpdate, event: m.DraftReplied) -> list[m.Command]:
        """Add new nodes that fit the text to the tree, whichever message they answer."""
        is_applied = self._apply(update)
        if update.is_over:
            self._open.end(update.stamp.round)
        if not is_applied:
            return self.lose("what it told cannot be")
        if self._view.answers(update.stamp):
            self._is_over = update.is_over
            self._num_passes += update.timing is not None
        if update.timing is not None:
            self._policy.observe_pass(update.timing)
            self._recorder.pass_made(len(update.new_nodes), update.timing, event.received_s)
        must_send = self.blocks.tree.needs_full_report or (update.is_over and self._has_backlog)
        return self.update() if must_send else []

    def _on_block(self, update: DraftUpdate, event: m.DraftReplied) -> list[m.Command]:
        """Handle the end of bounded growth. Late nodes join the tree, too, even if no block waits for them any more."""
        self._silence.message_ended()
        is_awaited = self._view.answers(update.stamp)
        if is_awaited and not self._apply(update):
            return self.lose("what it told cannot be")
        self._open.end(update.stamp.round)
        if not is_awaited:
            return []
        self._is_over, self._has_backlog = True, False
        is_turn, timing = self._turn > 0, update.timing
        call = Call.BLOCK if is_turn else Call.PREFILL
        trace = CallTrace(call, event.sent_s, event.received_s, len(update.new_nodes), timing=timing)
        self._recorder.draft_replied(trace)
        if is_turn:
            self._policy.observe_draft(event.received_s - event.sent_s, timing)
        return []

    def _on_end(self, reply: Missing | Refused) -> list[m.Command]:
        self._silence.message_ended()
        self._open.end(reply.stamp.round)
        if not self._view.answers(reply.stamp):
            return self.update() if self._has_backlog else []
        if isinstance(reply, Missing) and self._view.must_resend(reply.held):
            self._view.num_tokens = self._turn = 0  # the nodes it reported are lost, too; it has to catch up
            return self.update()
        return self.lose("it cannot go on")

    def _apply(self, update: DraftUpdate) -> bool:
        """Apply an update. Return whether it is valid."""
        self._silence.update_arrived()
        try:
            check_growth(update, self._pair.target.vocab_size, len(self._log), is_sampled=self._is_sampled)
            self._view.keeps(update.held)
            if self._open.has_numbers(update.stamp.round):
                self.blocks.tree.add(update.new_nodes, len(self._log) - self._open.num_sent_tokens(update.stamp.round))
        except CORRUPT as error:
            logger.warning("a draft's growth is corrupt: %r", error)
            return False
        return True

    @property
    def is_silent(self) -> bool:
        """Whether the draft is silent or absent."""
        return self._silence.is_silent

    @property
    def is_growing(self) -> bool:
        """Whether a draft is leased and has received the text."""
        return self._machine.state is Growing.GROWING

    def has_lease(self, name: str) -> bool:
        return self._machine.state is not Growing.ABSENT and self._view.name == name

    def _is_leased(self, stamp: Stamp) -> bool:
        return (stamp.lease, stamp.epoch) == (self._view.name, self._view.epoch)

    def used(self, block: SourcedBlock) -> None:
        """Record that this block is verified next. Its last nodes come from the last reported pass."""
        self._turn = 0
        num_used = len(block) - block.shape.num_looked_up
        if num_used:
            self._backoff.reset()
        self._recorder.guesses_used(num_used)

    def late(self, stamp: Stamp) -> list[m.Command]:
        """Handle a timeout: the round goes on without the draft. After several timeouts the lease is given up."""
        if stamp != self._waits_for:
            return []
        self._waits_for = None
        self._silence.timed_out()
        self._recorder.draft_was_late(is_left=self._silence.is_final)
        return self.lose() if self._silence.is_final else []

    # Waiting

    def growth_timeout(self) -> m.Await | None:
        """Return the wait for the draft's next update, with its timeout; None if the wait is not worth it."""
        self._waits_for = None
        stamp = self._view.awaiting
        can_wait = self._machine.state is Growing.GROWING and not (self.is_silent or self._has_backlog or self._is_over)
        has_to_catch_up = self._view.num_tokens == 0 or self._view.num_behind > DECODE_TOKENS
        if stamp is None or not can_wait or has_to_catch_up:
            return None
        if not self._is_worth_waiting():
            return None
        self._waits_for = stamp
        timeout_s = self._policy.timeout_s
        self._recorder.draft_awaited(self._policy.why_wait, timeout_s)
        return m.Await(stamp, timeout_s)

    def _is_worth_waiting(self) -> bool:
        if self._policy.is_in_turn:
            return self._turn > 0
        return self._policy.is_worth_waiting(self._num_passes, self.blocks.has_drafted)
