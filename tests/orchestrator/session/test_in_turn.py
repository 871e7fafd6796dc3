"""Drafting in turn on a session's tree: the draft grows for one block, ends by itself, and then the target works."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from core.config import DECODE_TOKENS, Limits, SpeculationConfig
from core.records import (
    Call,
    Chunk,
    Continuation,
    DraftRequest,
    Missing,
    Refused,
    Sampling,
    SequenceSpec,
    VerifyRequest,
    is_last,
)
from core.speculation.token_tree import EMPTY_BLOCK
from core.text.token_log import TokenLog
from orchestrator.policy.adaptive import TRIAL_ROUNDS, AdaptivePolicy
from orchestrator.policy.growth import CATCH_UP
from orchestrator.policy.offers import REST_ROUNDS
from orchestrator.policy.policies import Controller
from orchestrator.policy.policy import Found
from orchestrator.session import messages as m
from orchestrator.session.drafts.draft_side import DraftSide
from orchestrator.session.engine_view import SessionText
from orchestrator.session.pair import Pair
from orchestrator.session.recorder import Recorder
from orchestrator.session.session import Session
from orchestrator.text.detokenize import IncrementalDetokenizer
from tests.orchestrator.fakes import FakeDraftEngine, FakeTargetEngine, candidates, model_info, plain, request

PROMPT = (3, 1, 4)
GAMMA = 3
CONFIG = SpeculationConfig(policy="static", pipelining=False, max_draft_tokens=GAMMA, guessers=("draft",))


class Stage:
    """One session between a fake target and a fake draft, whose replies come when they are asked for."""

    def __init__(self, tokenizer, max_tokens=40, config=CONFIG, prompt=PROMPT, **changes):
        asked = request(prompt, max_tokens, wants_trace=True, **changes)
        pair = Pair(model_info(), (model_info("draft"),), config, Limits())
        policy = Controller(config).policy(asked)
        self.session = Session(asked, pair, policy, IncrementalDetokenizer(tokenizer, (), False), "s")
        self.target, self.draft = FakeTargetEngine(epoch=1), FakeDraftEngine(epoch=1)
        self.sent: list[m.Command] = []
        self.now_s = 0.0
        self.sent += self.session.start()
        self.event(m.TargetLeased("t", 1))
        self.event(m.DraftLeased("d", 1))

    def event(self, event):
        commands = self.session.handle(event)
        self.sent += commands
        return commands

    def last(self, kind):
        return next(command for command in reversed(self.sent) if isinstance(command, kind))

    def count(self, kind):
        return sum(isinstance(command, kind) for command in self.sent)

    @property
    def tokens(self):
        return [token for command in self.sent if isinstance(command, Chunk) for token in command.token_ids]

    @property
    def guessed(self):
        """The draft's current guesses in a row."""
        text = [*PROMPT, *self.tokens]
        for _ in range(GAMMA):
            text.append(candidates(text)[0])
        return tuple(text[-GAMMA:])

    def verdict(self):
        self.now_s += 0.1
        reply = self.target.verify(self.last(VerifyRequest))
        return self.event(m.TargetReplied(reply, self.now_s - 0.1, self.now_s))

    def reply(self):
        return self.draft.draft(self.last(DraftRequest))

    def grown(self, reply=None):
        self.now_s += 0.01
        return self.event(m.DraftReplied(reply or self.reply(), self.now_s - 0.01, self.now_s))


@pytest.fixture
def stage(tokenizer):
    return Stage(tokenizer)


def kinds(commands):
    return [type(command) for command in commands]


def test_while_the_prompt_is_verified_the_draft_takes_it_in_and_grows_no_further(stage):
    assert stage.last(DraftRequest).growth == replace(CATCH_UP, reports_all=True)
    assert stage.last(VerifyRequest).block == EMPTY_BLOCK
    assert all(command.growth.ends for command in stage.sent if isinstance(command, DraftRequest))


def test_a_round_drafts_then_verifies(stage):
    stage.grown()
    for _ in range(4):
        sent = stage.verdict()
        assert VerifyRequest not in kinds(sent), "the target waits"
        assert stage.last(DraftRequest).growth.num_passes == GAMMA
        guessed, sent = stage.guessed, stage.grown()
        assert kinds(sent) == [VerifyRequest], "the draft is told nothing while the target works"
        assert stage.last(VerifyRequest).block.tokens == guessed
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


def test_a_reply_that_comes_twice_does_not_answer_the_next_question(stage):
    first = stage.reply()
    stage.grown(first)
    stage.verdict()
    num_asked = stage.count(DraftRequest)
    stage.grown(first)
    assert stage.session.stats.num_stale_replies == 1
    stage.event(m.DraftLate(stage.last(m.Await).stamp))
    stage.verdict()
    assert stage.count(DraftRequest) == num_asked, "a draft is asked nothing before it has answered"


def test_a_wait_that_was_cut_short_says_nothing_of_a_draft_that_is_lost_meanwhile(stage):
    """The wait for a block ends with the target's lease; then the draft goes, and at last the time runs out."""
    stage.grown()
    stage.verdict()
    waited_for = stage.last(m.Await).stamp
    stage.event(m.TargetLost(stage.session._target._view.epoch, "killed"))
    stage.target.forget(stage.session._target._view.name)
    stage.event(m.TargetLeased("t2", 1))
    stage.event(m.DraftLost(1))
    stage.event(m.DraftLate(waited_for))
    for _ in range(6):
        stage.verdict()
    assert stage.tokens == plain(PROMPT, len(stage.tokens))
    assert stage.session.stats.num_draft_failures == 1


def test_a_block_has_no_more_guesses_than_there_are_tokens_left(tokenizer):
    stage = Stage(tokenizer, max_tokens=3)
    stage.grown()
    stage.verdict()
    assert stage.last(DraftRequest).growth.max_depth == 1
    stage.grown()
    num_asked = stage.count(DraftRequest)
    while not stage.session.is_closed:
        stage.verdict()
    assert stage.count(DraftRequest) == num_asked, "the last token needs no guess"
    assert stage.tokens == plain(PROMPT, 3)


def test_what_comes_after_the_round_went_on_without_it_is_not_taken_for_the_next_block(stage):
    stage.grown()
    stage.verdict()
    late = stage.reply()
    assert kinds(stage.event(m.DraftLate(late.stamp))) == [VerifyRequest, Continuation]
    assert stage.last(VerifyRequest).block == EMPTY_BLOCK
    num_asked = stage.count(DraftRequest)
    assert kinds(stage.verdict())[0] is VerifyRequest, "a draft that has not answered is neither asked nor waited for"
    assert stage.count(DraftRequest) == num_asked
    assert stage.grown(late) == [], "nor told of anything while the target works"
    stage.verdict()
    guessed = stage.guessed
    assert stage.count(DraftRequest) == num_asked + 1
    assert kinds(stage.grown(late)) == [m.Await], "an answer to what was asked before"
    stage.grown()
    assert stage.last(VerifyRequest).block.tokens == guessed
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


def test_a_draft_that_is_late_again_and_again_is_left(stage):
    stage.grown()
    stage.verdict()
    assert kinds(stage.event(m.DraftLate(stage.reply().stamp))) == [VerifyRequest, Continuation]
    sent = [*stage.verdict(), *stage.verdict()]
    assert m.ReleaseDraft in kinds(sent)


def test_a_draft_that_takes_long_over_the_prompt_is_not_waited_for(tokenizer):
    stage = Stage(tokenizer, prompt=PROMPT * 20)
    reply = stage.reply()
    assert kinds(stage.verdict())[0] is VerifyRequest
    stage.grown(reply)
    stage.verdict()
    assert stage.last(DraftRequest).growth.num_passes == GAMMA


def test_a_draft_that_has_forgotten_catches_up_while_the_target_works(stage):
    stage.grown()
    stage.verdict()
    asked = stage.last(DraftRequest)
    sent = stage.grown(Missing(asked.stamp, 0))
    assert stage.last(DraftRequest).growth == replace(CATCH_UP, reports_all=True)
    assert stage.last(DraftRequest).base.num_tokens == 0
    assert VerifyRequest in kinds(sent), "nobody waits for that"


def test_a_draft_that_forgets_now_and_then_is_kept_however_long_the_stream(tokenizer):
    """One that did not keep what it is sent would forget it each time; this one answers in between."""
    stage = Stage(tokenizer, max_tokens=200)
    stage.grown()
    for _ in range(8):
        stage.verdict()
        stage.grown(Missing(stage.last(DraftRequest).stamp, 0))
        stage.draft.forget("d")
        stage.grown()
        stage.verdict()
        stage.grown()
    assert stage.count(m.ReleaseDraft) == 0
    assert stage.session.stats.num_draft_failures == 0
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


def test_a_turn_is_over_when_its_round_is(tokenizer):
    """The wait for a block ends with its target; in the next round nothing is drafted, and nothing is waited for."""
    stage = Stage(tokenizer)
    stage.grown()
    stage.verdict()
    stage.event(m.TargetLost(stage.session._target._view.epoch, "killed"))
    stage.target.forget(stage.session._target._view.name)
    stage.event(m.TargetLeased("t2", 1))
    stage.session._policy.wants_turn = lambda: False
    num_waits = stage.count(m.Await)
    assert kinds(stage.verdict())[0] is VerifyRequest
    assert stage.count(m.Await) == num_waits


@pytest.mark.parametrize("num_behind", [DECODE_TOKENS - 1, DECODE_TOKENS])
def test_a_draft_that_is_far_behind_catches_up_before_it_drafts(tokenizer, num_behind):
    """It was not asked for a while: nobody waits for as many tokens as a prompt has."""
    stage = Stage(tokenizer, max_tokens=200)
    stage.grown()
    policy = stage.session._policy
    policy.wants_turn = lambda: False
    for _ in range(num_behind - 1):
        stage.verdict()
    policy.wants_turn = lambda: True
    sent = stage.verdict()
    asked = stage.last(DraftRequest)
    assert len(asked.suffix) == num_behind + 1, "with the last one that it holds, for what follows that"
    if num_behind < DECODE_TOKENS:
        assert asked.growth.num_passes == GAMMA
        return
    assert asked.growth == CATCH_UP
    assert kinds(sent)[0] is VerifyRequest, "the round goes on without it"
    held = stage.reply()
    stage.verdict()
    stage.grown(held)
    stage.verdict()
    assert stage.last(DraftRequest).growth.num_passes == GAMMA


def test_a_policy_hears_of_blocks_that_come_late_and_not_of_prefills(tokenizer):
    stage, seen = Stage(tokenizer), []
    policy = stage.session._policy
    policy.observe_draft = lambda elapsed_s, _timing: seen.append(elapsed_s)
    stage.grown()
    assert seen == [], "that was a prefill"
    stage.verdict()
    waits, answer = stage.last(m.Await).stamp, stage.reply()
    for _ in range(3):
        stage.event(m.DraftLate(waits))
    assert seen == []
    stage.grown(answer)
    stage.verdict()
    stage.grown()
    assert seen[-1] == pytest.approx(0.01)


def test_sessions_that_lose_their_draft_together_do_not_come_back_together():
    pauses = set()
    for number in range(20):
        pair = Pair(model_info(), (model_info("draft"),), CONFIG, Limits())
        policy = Controller(CONFIG).policy(request())
        text = SessionText(f"r#{number}", TokenLog(), SequenceSpec(0, Sampling()))
        drafting = DraftSide(text, pair, policy, Recorder())
        pauses.add(drafting.lease_later().delay_s)
    assert len(pauses) == 20
    assert max(pauses) - min(pauses) > 0.3
    later = [drafting.lease_later().delay_s for _ in range(10)]
    assert later[3] > max(pauses), "each pause in vain is longer"
    assert 30.0 <= later[-1] <= 60.0


def test_after_a_rest_it_is_tried_for_some_rounds_whether_drafting_pays_again():
    policy = Controller(SpeculationConfig(pipelining=False)).policy(request())
    with patch.object(AdaptivePolicy, "_forecast", lambda _: 0):
        assert not policy.wants_turn()
        policy.rest()
        policy.tree_spec(100, 0)
        assert [policy.wants_turn() for _ in range(TRIAL_ROUNDS + 2)] == [True] * TRIAL_ROUNDS + [False] * 2
    assert policy.wants_turn()


def test_a_draft_that_refuses_or_lies_is_left(tokenizer):
    for lie in (
        lambda reply: Refused(reply.stamp, "no"),
        lambda reply: replace(reply, held=10**6),
        lambda reply: replace(reply, new_nodes=replace(reply.new_nodes, tokens=(10**6,) * len(reply.new_nodes))),
    ):
        stage = Stage(tokenizer)
        stage.grown()
        stage.verdict()
        sent = stage.grown(lie(stage.reply()))
        assert {m.ReleaseDraft, VerifyRequest} <= set(kinds(sent))
        assert stage.session.stats.num_draft_failures == 1


def test_nothing_was_prepared_so_nothing_hits_or_misses(stage):
    seen, observe_round = [], stage.session._policy.observe_round
    stage.session._policy.observe_round = lambda each: (seen.append(each.found), observe_round(each))
    stage.grown()
    for _ in range(3):
        stage.verdict()
        stage.grown()
    assert set(seen) == {Found.NOT_ASKED}
    stats = stage.session.stats.snapshot()
    assert (stats.num_hits, stats.num_misses, stats.hidden_draft_time_s) == (0, 0, 0.0)


def test_a_trace_tells_prefill_and_blocks_apart(stage):
    stage.grown()
    stage.verdict()
    stage.grown()
    stage.verdict()
    calls = [call.call for command in stage.sent if isinstance(command, Chunk) for call in command.trace]
    assert calls == [Call.PREFILL, Call.VERIFY, Call.BLOCK, Call.VERIFY]


def test_the_reply_to_growth_that_ends_is_one(stage):
    assert is_last(stage.reply())


@pytest.mark.parametrize("num_rounds", [5, 2 * REST_ROUNDS])
def test_a_draft_that_comes_back_is_given_its_turn_however_long_it_was_away(tokenizer, num_rounds):
    config = SpeculationConfig(policy="adaptive", pipelining=False, max_draft_tokens=GAMMA, guessers=("draft",))
    stage = Stage(tokenizer, max_tokens=300, config=config)
    stage.event(m.DraftLost(1))
    for _ in range(num_rounds):
        stage.verdict()
    num_released = stage.count(m.ReleaseDraft)
    stage.event(m.DraftLeased("d", 1))
    stage.verdict()
    assert stage.count(m.ReleaseDraft) == num_released


def test_trials_after_a_rest_are_not_used_up_while_there_is_no_draft(tokenizer, monkeypatch):
    monkeypatch.setattr(AdaptivePolicy, "_forecast", lambda self: 0)
    config = SpeculationConfig(policy="adaptive", pipelining=False, max_draft_tokens=GAMMA, guessers=("draft",))
    stage = Stage(tokenizer, max_tokens=300, config=config)
    stage.event(m.DraftLost(1))
    stage.session._policy.rest()
    for _ in range(2 * TRIAL_ROUNDS):
        stage.verdict()
    assert stage.session._policy._num_trials == TRIAL_ROUNDS


def test_a_trace_has_each_block_and_what_became_of_it(stage):
    stage.grown()
    for _ in range(3):
        stage.verdict()
        stage.grown()
    chunks = [command for command in stage.sent if isinstance(command, Chunk)]
    assert len(chunks) == 3
    for chunk in chunks:
        (block,) = [call.verified for call in chunk.trace if call.verified is not None]
        assert (*(block.tokens[node] for node in block.path), block.next_token) == chunk.token_ids
        assert len(block.sources) == len(block.parents) == len(block.tokens)
        assert set(block.sources) <= {"draft"}
    assert any(block.path for chunk in chunks for call in chunk.trace if (block := call.verified) is not None)
