"""One completion as a state machine without I/O: events in, commands out.

The session owns the committed tokens. An engine holds a copy of a prefix. Every message names the prefix it builds on,
so an engine that has lost tokens can ask for them again. A draft's tokens reach the output only through a verdict of
the target.

Knows the order of a round. Must not know how a draft tree grows, nor what a node is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from core.errors import InvalidRequest, OutriderError, Unavailable
from core.records import Adapter, GenerationRequest, Missing, Refused, SequenceSpec, Verdict, Want, is_last, max_guesses
from core.speculation import DRAFT, MAX_GUESSES
from core.text import TokenLog
from orchestrator.guessers import OutputForm, Panel
from orchestrator.policy import Found, MeasuredRound, TreePolicy
from orchestrator.session import messages as m
from orchestrator.session.drafts import Drafts
from orchestrator.session.engine_view import SessionText
from orchestrator.session.output import Output
from orchestrator.session.pair import Pair
from orchestrator.session.recorder import Recorder
from orchestrator.session.sourced_block import SourcedBlock
from orchestrator.session.states import Target
from orchestrator.session.target_side import TargetSide
from orchestrator.session.verdicts import JudgedBlock, error_of
from orchestrator.text import IncrementalDetokenizer


class Session:
    """The life of one completion. Call `start` once, then `handle` for each event; both return commands to execute.

    Invariant: each engine has at most one unanswered message that the session waits for.
    Invariant: after a Fail, or a Chunk with a finish reason, only releases follow.
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
        self._request = request
        self._pair = pair
        self._policy = policy
        self._log = TokenLog(request.prompt)
        self._output = Output(request, frozenset(pair.target.eos_token_ids), detokenizer)
        spec = SequenceSpec.of(request)
        self._is_sampled, self._seed = spec.needs_q, spec.sampling.seed
        text = SessionText(session_id, self._log, spec)
        temperature = request.draft_temperature or pair.speculation.draft_temperature
        draft_text = replace(text, spec=spec.of_draft(temperature))
        self._sources = request.guessers or pair.speculation.guessers
        self._panel: Panel = pair.guessers.panel(
            self._sources,
            pair.speculation,
            policy.max_depth,
            policy.sources,
            pair.target.vocab_size,
            OutputForm(spec.prompt_len, spec.grammar, request.template, request.isolation),
            has_head=bool(pair.target.head),
        )
        policy.expect_head(is_there=self._panel.awaits_guesses)
        self._recorder = Recorder(
            self._panel.failures, is_traced=request.wants_trace, is_explained=request.wants_explanation
        )
        self.stats = self._recorder.stats
        may_speculate = request.max_draft_tokens != 0 and pair.speculation.max_draft_tokens > 0
        self._may_draft = may_speculate and DRAFT in self._sources
        self._drafts = Drafts(draft_text, pair, [policy, *extra_policies], self._recorder)
        self._blocks = self._drafts.blocks
        wants = partial(_wants, self._panel, policy, self._drafts if self._may_draft else None)  # not the session
        self._target = TargetSide(text, pair.target.vocab_size, wants)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._target} {self._drafts} {self._log}>"

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt, then the committed tokens."""
        return self._log.tokens

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that the target computes the text with."""
        return self._request.adapter

    @property
    def is_closed(self) -> bool:
        return self._target.state is Target.CLOSED

    @property
    def _max_depth(self) -> int:
        """Maximum depth of a useful block. One less than the tokens left, since a round also yields the target's own
        token."""
        return self._output.num_remaining - 1

    @property
    def _max_nodes(self) -> int:
        """Maximum number of nodes that fit into the target's KV, and into this session's share of its states."""
        target = self._pair.target
        fitting = max(target.kv_cache_tokens - len(self._log), 0)
        if target.num_states:
            fitting = min(fitting, max_guesses(target.num_states, self._policy.num_sharing))
        return fitting

    def start(self, now_s: float = 0.0) -> list[m.Command]:
        """Request leases, or end at once if the resumed output is already complete."""
        self._recorder.started(now_s)
        if self._request.resume_tokens:
            self._log.extend(self._request.resume_tokens)
            if (chunk := self._output.resume(self._request.resume_tokens)) is not None:
                return [self._recorder.add_to(chunk), *self._close()]
        return [m.LeaseTarget(), *(self._drafts.begin() if self._may_draft else [])]

    def handle(self, event: m.Event) -> list[m.Command]:
        """Return the commands that follow from `event`; none once the session is closed."""
        return [] if self.is_closed else self._on(event)

    def _on(self, event: m.Event) -> list[m.Command]:
        match event:
            case m.TargetLeased():
                return self._on_target_leased(event)
            case m.TargetReplied():
                return self._on_target_replied(event)
            case m.TargetLost():
                is_current = self._target.is_leased(event.epoch)
                return self._lose_target(event.reason, is_failure=not event.is_planned) if is_current else []
            case m.Abandoned():
                return self._fail(event.error)
            case m.DraftNotLeased():
                return self._drafts.handle(event)
            case m.DraftReplied():
                is_more_to_come = not is_last(event.reply)
                return [*self._drafts.handle(event), *self._go_on(event.received_s, is_more_to_come=is_more_to_come)]
            case _:
                return [*self._drafts.handle(event), *self._go_on()]

    def _go_on(self, now_s: float | None = None, *, is_more_to_come: bool = False) -> list[m.Command]:
        """Send a block or an offer if the current state and the draft's updates allow it.

        `now_s`: time at which the update arrived, if known; `is_more_to_come`: whether the draft will send more updates
        without being asked.
        """
        match self._target.state:
            case Target.AWAITING_BLOCK:
                return self._send_or_wait(now_s)
            case Target.VERIFYING if not self._is_sampled:  # the target never continues by itself with sampled drafts
                return self._offer(now_s, is_more_to_come)
        return []

    # The verdict on a block

    def _on_target_replied(self, event: m.TargetReplied) -> list[m.Command]:
        reply = event.reply
        if not self._target.awaits(reply.stamp):
            if not self._target.set_aside(event):
                self._recorder.reply_was_stale()
            return []
        match reply:
            case Verdict():
                return self._on_verdict(reply, event)
            case Missing():
                again = self._target.resend(reply)
                return [again] if again is not None else self._lose_target("it does not keep what it is sent")
            case Refused():
                return self._on_refusal(reply)

    def _on_verdict(self, verdict: Verdict, event: m.TargetReplied) -> list[m.Command]:
        """Commit a verdict and go on, or leave the target if the verdict is invalid."""
        if (problem := self._target.problem_of(verdict)) is not None:
            return self._lose_target(problem)
        judged = self._target.commit(verdict, event.sent_s, event.received_s)
        if judged.interval_s is not None:
            is_alone = judged.is_continued and not len(judged.block)
            self._drafts.observe_interval(MeasuredRound(len(judged.tokens), judged.interval_s, is_alone))
        self._output.found_cached(verdict.num_cached)
        chunk = self._output.commit(judged.tokens, verdict.logprobs, verdict.prompt_logprobs)
        self._recorder.block_judged(judged)
        emit = self._recorder.add_to(chunk)
        if chunk.finish_reason is not None:
            self._policy.observe_round(judged.outcome(Found.NOT_ASKED))
            return [emit, *self._close()]
        commands = [*self._begin_round(judged), emit]  # messages to the target go before the chunk to the client
        early = self._target.take_early(event.received_s)
        return commands if early is None else [*commands, *self._on_target_replied(early)]

    def _begin_round(self, judged: JudgedBlock) -> list[m.Command]:
        """Start the next round after a verdict."""
        to_drafts = self._reroot(judged)
        if not self._is_sampled:
            self._look_up()
        if judged.verdict.continued:
            return [*self._continue_after(judged.verdict), *to_drafts]
        return [*self._send_or_wait(judged.received_s), *to_drafts]

    def _reroot(self, judged: JudgedBlock) -> list[m.Command]:
        """Apply a verdict to the draft tree, the guessers, the policy and the drafts."""
        committed = judged.tokens
        questions, samples = judged.block.questions, judged.verdict.samples
        if questions is not None and samples:
            self._panel.answered(questions.source, [samples[row] for row in questions.rows])
        unverified = self._blocks.unverified(committed)
        found = self._blocks.reroot(committed)
        self._panel.observe(committed)
        self._panel.deliver(judged.verdict.guesses, len(self._log))
        self._recorder.next_block_found(found)
        self._policy.observe_round(judged.outcome(found, unverified, self._blocks.late_hit))
        return self._drafts.begin_round(judged, self._max_depth)

    def _continue_after(self, verdict: Verdict) -> list[m.Command]:
        """Follow a target that has continued by itself with an offered block."""
        block = self._target.continue_after(verdict)
        self._drafts.used(block)
        self._blocks.continue_with(block)
        self._recorder.target_continued(self._blocks.taken)
        return self._go_on(self._target.began_s)

    # The next block

    def _look_up(self) -> None:
        """Add the guessers' guesses to the tree, unless nothing is guessed.

        If the draft samples, guessers are used only while there are no draws: choosing a draw because a guesser agrees
        with it would bias the output (docs/exactness.md, section 4).
        """
        if self._max_depth <= 0 or self._policy.is_plain:
            return
        text, panel = self._log.tokens, self._panel
        found = panel.draw(text, self._seed, self._is_worth_drawing) if self._is_sampled else panel.ask(text)
        for source, guesses in found:
            self._blocks.add_guesses(source, guesses)

    def _is_worth_drawing(self, path_prob: Sequence[float]) -> bool:
        """Whether a guesser should draw one more node, the last in `path_prob`."""
        fits = len(path_prob) <= min(self._max_depth, self._max_nodes)
        return fits and self._policy.is_worth_drawing(path_prob)

    def _send_or_wait(self, now_s: float | None) -> list[m.Command]:
        """Send the best block for verification, unless waiting for the draft's next pass is worth more."""
        self._drafts.add_guesses(self._max_depth, self._max_nodes)
        block = self._blocks.block(self._max_depth, self._max_nodes)
        wait = self._drafts.growth_timeout() if self._max_depth > 0 else None
        if wait is not None:
            self._target.wait()
            return [wait]
        if self._is_sampled and not self._blocks.tree.has_drafted:
            self._look_up()
            block = self._blocks.block(self._max_depth, self._max_nodes)
        return self._send_block(block, now_s)

    def _send_block(self, block: SourcedBlock, now_s: float | None) -> list[m.Command]:
        """Send a block for verification, and offer the blocks that may follow it."""
        self._drafts.used(block)
        self._recorder.block_sent(self._blocks.taken, lambda: self._blocks.why(self._max_depth))
        return [self._target.verify(self._with_questions(block), now_s), *self._go_on(now_s)]

    def _with_questions(self, block: SourcedBlock) -> SourcedBlock:
        """Add a guesser's questions to the block if they are worth their rows and all of them fit."""
        may_ask = not self._is_sampled and self._max_depth > 0 and not self._policy.is_plain
        asked = self._panel.questions(self._log.tokens) if may_ask else None
        if asked is None:
            return block
        asking = block.asking(*asked)
        fits = len(asking) <= min(self._max_nodes, MAX_GUESSES) and max(asking.tree.depths) <= self._max_depth
        return asking if fits and self._policy.is_worth_asking(len(block), len(asking)) else block

    # Offers, while the target verifies

    def _offer(self, now_s: float | None, is_more_to_come: bool) -> list[m.Command]:
        """Offer blocks with which the target may continue by itself after the awaited verdict."""
        policy, block = self._policy, self._target.block.tree
        if not (policy.may_offer and self._is_offer_due(now_s, is_more_to_come)):
            return []
        offer = self._blocks.offer(block, self._max_depth, self._max_nodes)
        return [] if offer is None else self._target.offer(offer, min(policy.plain_steps, self._max_depth))

    def _is_offer_due(self, now_s: float | None, is_more_to_come: bool) -> bool:
        began_s = self._target.began_s
        if began_s is None or now_s is None:
            return True
        return self._policy.is_offer_due(
            now_s - began_s,
            len(self._target.block),
            is_continued=self._target.is_continued,
            is_more_to_come=is_more_to_come,
        )

    # The target's lease

    def _on_target_leased(self, event: m.TargetLeased) -> list[m.Command]:
        self._recorder.target_leased(len(self._log))
        return [self._target.leased(event.name, event.epoch), *self._go_on()]

    def _on_refusal(self, refused: Refused) -> list[m.Command]:
        """Fail with the target's refusal; if the client already has output, end that output early instead."""
        has_begun = self._output.num_tokens > len(self._request.resume_tokens)
        if refused.field is None or not has_begun:
            return self._fail(error_of(refused))
        problem = InvalidRequest(refused.field, refused.reason)
        return [self._recorder.add_to(self._output.cut_short(problem)), *self._close()]

    def _lose_target(self, reason: str, *, is_failure: bool = True) -> list[m.Command]:
        """Leave the target and lease another one, which needs only the committed tokens."""
        self._recorder.target_lost(reason, is_failure=is_failure)
        self._target.num_losses += is_failure
        if self._target.num_losses > self._pair.limits.max_target_retries:
            return self._fail(Unavailable(f"the target failed {self._target.num_losses} times in a row: {reason}"))
        return self._target.lease_another()

    # The end

    def break_off(self) -> None:
        """Release what the policies share with other sessions, after a defect left this session in an unknown state."""
        self._drafts.close_policies()

    def _fail(self, error: OutriderError) -> list[m.Command]:
        return [m.Fail(error), *self._close()]

    def _close(self) -> list[m.Command]:
        self._panel.ended(self._log.tokens)
        self._target.close()
        return [m.ReleaseTarget(), *self._drafts.close()]


def _wants(panel: Panel, policy: TreePolicy, drafts: Drafts | None) -> tuple[Want, ...]:
    """Fields of each verdict that heads need: features for one on a draft engine, guesses of one in the target's."""
    if policy.is_plain:
        return ()
    policy.expect_head(is_there=panel.awaits_guesses)
    wants = []
    if drafts is not None and not policy.is_paused:
        wants += [Want.FEATURES] if drafts.need_features else []
        wants += [Want.PREFIX_FEATURES] if drafts.lack_features else []
    if panel.awaits_guesses and policy.uses_head:
        wants.append(Want.GUESSES)
    return tuple(wants)
