"""A session whose draft grows continuously: blocks come out of one tree, and no draft can change tokens."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
import pytest

from core.config import Limits, SpeculationConfig
from core.costs.engine_cost import WIDTHS
from core.records import (
    Call,
    Chunk,
    DraftRequest,
    DraftUpdate,
    Missing,
    Refused,
    Stamp,
    Timing,
    VerifyRequest,
)
from core.speculation.growth import UNRANKED, NewNodes, TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK, ROOT, TokenTree
from orchestrator.policy.adaptive import AdaptivePolicy
from orchestrator.policy.growth import CATCH_UP
from orchestrator.policy.mode_choice import MeasuredRound, Mode
from orchestrator.policy.offers import REST_ROUNDS
from orchestrator.policy.policies import Controller
from orchestrator.policy.policy import Found, RoundOutcome, Shape
from orchestrator.policy.shared_estimates import REFRESH_ROUNDS, SharedEstimates
from orchestrator.session import messages as m
from orchestrator.session.drafts.backoff import MAX_PAUSE_S
from orchestrator.session.drafts.silence import MAX_OPEN
from orchestrator.session.pair import Pair
from orchestrator.session.session import Session
from orchestrator.text.detokenize import IncrementalDetokenizer
from tests.orchestrator.fakes import FakeTargetEngine, model_info, next_token, plain, request

PROMPT = (3, 1, 4)
CONFIG = SpeculationConfig(guessers=("draft",))


class FakeMargin(AdaptivePolicy):
    """Verifies all there is, waits when it is told to, and has the target wait for each message."""

    may_offer = False
    num_outcomes = 0
    plain_steps = 1

    def __init__(self, asked, config=CONFIG):
        super().__init__(asked, config, SharedEstimates())
        self._follows = True  # the clock stands still
        self.is_patient = False
        self.seen = []

    def observe_round(self, seen):
        self.seen.append(seen)
        super().observe_round(seen)

    def net(self, path_prob, branches=None):
        return np.arange(len(path_prob) + 1.0)

    def is_worth_a_plain_step(self, num_now):
        return False

    def is_worth_waiting(self, num_passes, has_drafted):
        return self.is_patient

    @property
    def timeout_s(self):
        return 0.5


class FakeBranches(FakeMargin):
    """A branch costs so many times 100 tokens as it takes seconds, a row nothing."""

    branch_s = 0.0

    @property
    def branches_cost_time(self):
        return self.branch_s > 0

    def net(self, path_prob, branches=None):
        costs = np.zeros(len(path_prob) + 1) if branches is None else np.append(0.0, 100 * self.branch_s * branches)
        return np.append(0.0, np.cumsum(path_prob)) - 4 * costs


class Stage:
    """One session, its target, and a draft whose words are put into its mouth."""

    def __init__(
        self,
        tokenizer,
        max_tokens=40,
        *,
        config=CONFIG,
        kv_cache_tokens=10_000,
        num_states=0,
        limits=None,
        prompt=PROMPT,
        is_leased=True,
        draft=None,
        **changes,
    ):
        """`draft`: what the draft is; a head of it gets what it reads from the target."""
        asked = request(prompt, max_tokens, **changes)
        self.prompt = prompt
        draft = draft or model_info("draft")
        features = {"feature_layers": draft.feature_layers, "feature_width": draft.feature_width}
        target = replace(model_info(), kv_cache_tokens=kv_cache_tokens, num_states=num_states, **features)
        pair = Pair(target, (draft,), config, limits or Limits())
        self.policy = FakeMargin(asked, config)
        self.session = Session(asked, pair, self.policy, IncrementalDetokenizer(tokenizer, (), False), "s")
        self.target = FakeTargetEngine(epoch=1)
        self.sent: list[m.Command] = []
        self.num_reported = 0
        self.now_s = 0.0
        self.do(self.session.start())
        self.event(m.TargetLeased("t", 1))
        if is_leased:
            self.event(m.DraftLeased("d", 1))

    def do(self, commands):
        self.sent += commands
        return commands

    def event(self, event):
        return self.do(self.session.handle(event))

    def last(self, kind):
        return next(command for command in reversed(self.sent) if isinstance(command, kind))

    def count(self, kind):
        return sum(isinstance(command, kind) for command in self.sent)

    @property
    def tokens(self):
        return [token for command in self.sent if isinstance(command, Chunk) for token in command.token_ids]

    @property
    def block(self):
        return self.last(VerifyRequest).block

    def verdict(self):
        self.now_s += 0.1
        reply = self.target.verify(self.last(VerifyRequest))
        return self.event(m.TargetReplied(reply, self.now_s - 0.1, self.now_s))

    def growth(self, *nodes, stamp=None, held=None, root=ROOT):
        """Nodes of the draft, each a parent's number and a token; chances fall in their order."""
        asked = self.last(DraftRequest)
        if asked.growth.reports_all and stamp is None and not nodes:
            self.num_reported = 0
        first, self.num_reported = self.num_reported, self.num_reported + len(nodes)
        parents, tokens = zip(*nodes, strict=True) if nodes else ((), ())
        chances = tuple(0.9 - 0.01 * index for index in range(len(nodes)))
        new_nodes = NewNodes(first, parents, tokens, (0,) * len(nodes), chances, chances, root)
        held = asked.num_committed if held is None else held
        update = DraftUpdate(stamp or asked.stamp, new_nodes, held, Timing(0.0, 0.003, 1, 4))
        return m.DraftReplied(update, 0.0, self.now_s)

    def grows(self, *nodes, **changes):
        return self.event(self.growth(*nodes, **changes))

    def right(self, num_tokens):
        """The target's next tokens, as a chain below the root."""
        text, found = [*self.prompt, *self.tokens], []
        for _ in range(num_tokens):
            found.append(next_token([*text, *found]))
        return found

    def grows_right(self, num_tokens):
        tokens = self.right(num_tokens)
        first = self.num_reported
        return self.grows(*((first + index - 1 if index else ROOT, token) for index, token in enumerate(tokens)))


NOTHING = NewNodes(0, (), (), (), (), ())


def unchecked(new_nodes, **changes):
    """A copy without checks, like one out of a pickle."""
    found = copy(new_nodes)
    for name, value in {**changes, "is_checked": False}.items():
        object.__setattr__(found, name, value)
    return found


@pytest.fixture
def stage(tokenizer):
    return Stage(tokenizer)


def test_the_draft_is_told_at_once_and_nothing_waits_for_it(stage):
    assert isinstance(stage.last(DraftRequest).growth, TreeSpec)
    assert stage.last(DraftRequest).suffix == PROMPT
    assert stage.block == EMPTY_BLOCK


def test_what_has_grown_is_verified_and_what_grew_below_the_verdict_is_there_already(stage):
    stage.verdict()
    first = stage.right(8)
    stage.grows(*((index - 1 if index else ROOT, token) for index, token in enumerate(first)))
    stage.verdict()  # of the plain step that was under way
    assert stage.block == TokenTree.chain(first[1:])
    sent = stage.verdict()
    assert stage.tokens == plain(PROMPT, 10)
    assert [type(command) for command in sent] == [VerifyRequest, DraftRequest, Chunk], "the target waits for nobody"


def test_the_draft_hears_of_each_verdict_and_of_what_it_does_not_hold(stage):
    stage.verdict()
    stage.grows_right(1)
    stage.verdict()
    asked = stage.last(DraftRequest)
    assert asked.num_committed == len(PROMPT) + 2
    assert asked.base.num_tokens == len(PROMPT), "it has said that it holds as much"


def test_growth_that_answers_an_earlier_message_is_used_where_it_fits(stage):
    stage.verdict()
    tokens = stage.right(6)
    stage.grows((ROOT, tokens[0]), (0, tokens[1]))
    earlier = stage.last(DraftRequest).stamp
    stage.verdict()
    assert stage.block.tokens == (tokens[1],)
    stage.grows((1, tokens[2]), (0, 99), stamp=earlier)
    stage.verdict()
    assert stage.block.tokens == (), "the verdict's own token was not foreseen"
    assert stage.tokens == plain(PROMPT, 4)


def test_a_block_that_is_worth_it_is_waited_for(stage):
    stage.policy.is_patient = True
    stage.grows((ROOT, 1))
    sent = stage.verdict()
    assert [type(command) for command in sent if not isinstance(command, Chunk)] == [m.Await, DraftRequest]
    assert [type(command) for command in stage.event(stage.growth())] == [m.Await], "until it is worth it no more"
    stage.policy.is_patient = False
    sent = stage.grows_right(3)
    assert [type(command) for command in sent] == [VerifyRequest]
    assert len(stage.block) == 3


def test_a_draft_that_says_nothing_is_not_waited_for_again_and_is_left_after_a_few_rounds(tokenizer):
    stage = Stage(tokenizer, config=replace(CONFIG, breaker_rounds=2))
    stage.policy.is_patient = True
    stage.grows((ROOT, 1))
    stage.verdict()
    assert stage.last(m.Await).timeout_s == 0.5
    sent = stage.event(m.DraftLate(stage.last(m.Await).stamp))
    assert [type(command) for command in sent] == [VerifyRequest]
    assert stage.event(m.DraftLate(stage.last(m.Await).stamp)) == [], "it is late once"
    sent = stage.verdict()
    assert stage.count(m.Await) == 1
    assert [type(command) for command in sent] == [VerifyRequest, m.ReleaseDraft, m.LeaseDraft, Chunk]
    stage.verdict()
    assert stage.tokens == plain(PROMPT, 3)


def test_a_draft_whose_answers_come_a_verdict_late_each_time_is_used_nonetheless(tokenizer):
    """Or it would be sent the whole text with each verdict, and forget with it what it has told."""
    stage, asked = Stage(tokenizer), []
    for _ in range(4):
        stage.verdict()
        asked.append(stage.last(DraftRequest))
        stage.event(m.DraftReplied(DraftUpdate(asked[-2].stamp, NOTHING, asked[-2].num_committed), 0.0, stage.now_s)
                    if len(asked) > 1 else m.DraftLate(asked[-1].stamp))  # fmt: skip
    assert [bool(request.growth.reports_all) for request in asked] == [True, True, False, False]
    assert asked[-1].base.num_tokens > 0


def test_a_draft_that_may_not_grow_is_left_for_good(tokenizer):
    stage = Stage(tokenizer, max_draft_tokens=0)
    assert (stage.count(DraftRequest), stage.count(m.ReleaseDraft), stage.count(m.LeaseDraft)) == (0, 1, 0)
    stage.verdict()
    assert stage.tokens == plain(PROMPT, 1)


def test_who_waits_is_told_that_it_is_late_whatever_the_draft_was_told_meanwhile(tokenizer):
    """A message that follows must not make the clock of the wait count for nothing: nobody else would end it."""
    stage = Stage(tokenizer)
    stage.policy.is_patient = True
    stage.grows((ROOT, 1))
    stage.verdict()
    waits = stage.last(m.Await).stamp
    stage.do(stage.session._drafts._first.update())
    sent = stage.event(m.DraftLate(waits))
    assert [type(command) for command in sent] == [VerifyRequest]


def test_the_clock_of_a_wait_that_is_over_counts_for_nothing(stage):
    stage.policy.is_patient = True
    stage.grows((ROOT, 1))
    stage.verdict()
    waits = stage.last(m.Await).stamp
    stage.policy.is_patient = False
    stage.grows((ROOT, 2))
    assert stage.event(m.DraftLate(waits)) == []
    assert not stage.session._drafts._first.is_silent


def test_whatever_a_draft_tells_it_is_no_longer_late(stage):
    stage.policy.is_patient = True
    stage.grows((ROOT, 1))
    stage.verdict()
    stage.event(m.DraftLate(stage.last(m.Await).stamp))
    stage.grows((ROOT, 2))
    stage.verdict()
    assert stage.count(m.Await) == 2


def test_a_draft_that_answers_nothing_for_some_rounds_is_lacking_until_it_tells_something(stage):
    stage.grows((ROOT, 1))
    for _ in range(MAX_OPEN):
        stage.verdict()
        assert not stage.policy.is_without_draft
    stage.verdict()
    assert stage.policy.is_without_draft
    stage.grows((ROOT, 2))
    assert not stage.policy.is_without_draft


def test_a_draft_that_ends_what_was_overtaken_is_not_lacking_although_it_tells_nothing(stage):
    """So does one that has likelier nodes of others to feed."""
    for _ in range(3 * MAX_OPEN):
        overtaken = Refused(stage.last(DraftRequest).stamp, "overtaken")
        stage.verdict()
        stage.event(m.DraftReplied(overtaken, 0.0, stage.now_s))
    assert not stage.policy.is_without_draft
    assert stage.count(m.ReleaseDraft) == 0


def rounds_until_left(stage):
    """Number of verdicts until the draft's lease is given back, at most 36; a round takes 0.1 s."""
    for number in range(1, 37):
        stage.verdict()
        if stage.count(m.ReleaseDraft):
            return number
    return None


def test_a_silent_draft_is_left_although_nobody_waits_for_it(stage):
    """After the time of a wait, 0.5 s, and some late rounds, as one that is waited for. Else it would be kept for ever
    where sessions share passes, and no other replica tried."""
    stage.grows((ROOT, 1))
    assert rounds_until_left(stage) == 1 + 6 + CONFIG.breaker_rounds - 1
    assert stage.last(m.LeaseDraft).delay_s > 0


@pytest.mark.parametrize("draft_retry_s", [0.95, 1.95])
def test_a_draft_that_has_told_nothing_under_its_lease_is_tried_for_as_long_as_it_is_done_without(
    tokenizer, draft_retry_s
):
    """It may have a long text to take in."""
    stage = Stage(tokenizer, config=replace(CONFIG, draft_retry_s=draft_retry_s))
    assert rounds_until_left(stage) == round((draft_retry_s + 0.05) / 0.1) + CONFIG.breaker_rounds - 1


def test_a_draft_is_not_left_for_some_rounds_that_took_long(stage):
    stage.grows((ROOT, 1))
    for _ in range(MAX_OPEN + 1):
        stage.now_s += 5.0
        stage.verdict()
    assert stage.count(m.ReleaseDraft) == 0


def test_a_lost_draft_is_lacking_and_not_waited_for_until_the_next_tells_something(stage):
    stage.policy.is_patient = True
    known = stage.policy._known
    assert known.num_with_draft == 1
    stage.event(m.DraftLost(1))
    assert stage.policy.is_without_draft
    assert known.num_with_draft == 0
    stage.event(m.DraftLeased("d2", 2))
    assert known.num_with_draft == 1
    stage.num_reported = 0
    stage.verdict()
    assert stage.policy.is_without_draft
    assert stage.count(m.Await) == 0
    stage.grows((ROOT, 1))
    assert not stage.policy.is_without_draft
    stage.verdict()
    assert stage.count(m.Await) == 1


def test_a_draft_is_lacking_where_no_engine_grants_a_lease(tokenizer):
    stage = Stage(tokenizer, is_leased=False)
    assert not stage.policy.is_without_draft, "it may come before the prompt has been taken in"
    stage.event(m.DraftNotLeased())
    assert stage.policy.is_without_draft


def test_a_draft_whose_context_is_full_is_lacking(stage):
    stage.grows((ROOT, 1))
    stage.policy.tree_spec = lambda _room, _turn: None
    stage.verdict()
    assert stage.count(m.ReleaseDraft) == 1
    assert stage.policy.is_without_draft


def test_a_draft_that_has_told_nothing_yet_is_not_waited_for(stage):
    stage.policy.is_patient = True
    stage.verdict()
    assert stage.count(m.Await) == 0
    stage.grows((ROOT, 1))
    stage.verdict()
    assert stage.count(m.Await) == 1


def test_a_silent_draft_is_not_told_more_and_more(stage):
    stage.grows((ROOT, 1))
    for _ in range(2 * MAX_OPEN):
        stage.verdict()
    assert stage.count(DraftRequest) == MAX_OPEN
    overtaken = Refused(next(c for c in stage.sent if isinstance(c, DraftRequest)).stamp, "overtaken")
    sent = stage.event(m.DraftReplied(overtaken, 0.0, stage.now_s))
    assert [type(command) for command in sent] == [DraftRequest]
    assert sent[0].num_committed == len(PROMPT) + len(stage.tokens)


def test_a_draft_that_has_forgotten_is_sent_everything_and_tells_everything(stage):
    stage.grows((ROOT, 1))
    stage.verdict()
    stage.event(m.DraftReplied(Missing(stage.last(DraftRequest).stamp, 0), 0.0, stage.now_s))
    asked = stage.last(DraftRequest)
    assert asked.base.num_tokens == 0
    assert asked.spec is not None
    assert asked.growth.reports_all
    assert stage.grows((ROOT, 2), stamp=replace(asked.stamp, round=asked.stamp.round - 1)) == [], "with old numbers"
    stage.num_reported = 0
    tokens = stage.right(2)
    stage.grows((ROOT, tokens[0]), (0, tokens[1]))
    stage.verdict()
    assert stage.block.tokens == (tokens[1],)


def test_in_a_pause_the_draft_ends_what_it_grows_and_is_told_nothing_more_until_it_is_over(stage):
    stage.grows_right(3)
    stage.policy._choice.limit = Mode.GUESSERS
    stage.verdict()
    asked = stage.last(DraftRequest)
    assert asked.growth == CATCH_UP
    stage.verdict()
    assert stage.last(DraftRequest) is asked, "growth that ends by itself is asked for once, answered or not"
    update = DraftUpdate(asked.stamp, NewNodes(stage.num_reported), asked.num_committed, is_over=True)
    stage.event(m.DraftReplied(update))
    num_reported, num_committed = stage.count(DraftRequest), asked.num_committed
    for _ in range(4):
        stage.verdict()
    assert stage.count(DraftRequest) == num_reported
    stage.policy._choice.limit = Mode.DRAFT
    stage.verdict()
    asked = stage.last(DraftRequest)
    assert asked.growth.num_passes != CATCH_UP.num_passes
    assert asked.base.num_tokens == num_committed, "it holds what it held"
    assert [*PROMPT, *stage.tokens][num_committed:] == [*asked.suffix]
    stage.grows_right(2)
    stage.verdict()
    assert len(stage.block) == 1
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


def test_what_was_lost_of_a_tree_is_told_once_more(stage):
    """Two tokens in a row that were not foreseen, while the draft foresaw both."""
    stage.grows((ROOT, 1))
    stage.verdict()
    stage.verdict()
    sent = stage.grows((0, 2), root=0)
    assert [type(command) for command in sent] == [DraftRequest]
    assert sent[0].growth.reports_all
    assert sent[0].base.num_tokens > 0, "it need not compute anything again"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: replace(s, new_nodes=replace(s.new_nodes, tokens=(10**6,))),
        lambda s: replace(s, new_nodes=replace(s.new_nodes, tokens=(-3,))),
        lambda s: replace(s, held=10**6),
        lambda s: replace(s, held=-1),
        lambda s: replace(s, new_nodes=replace(s.new_nodes, first=5)),
        lambda s: replace(s, new_nodes=unchecked(s.new_nodes, parents=(7,))),
        lambda s: replace(s, new_nodes=unchecked(s.new_nodes, chances=(0.5, 0.5))),
        lambda s: replace(s, new_nodes=unchecked(s.new_nodes, root=99)),
        lambda s: replace(s, new_nodes=unchecked(s.new_nodes, parents=np.array([7]))),
        lambda s: replace(s, new_nodes=unchecked(s.new_nodes, chances=np.array([2.0]))),
    ],
)
def test_corrupt_growth_costs_the_draft_its_lease_and_the_stream_nothing(stage, spoil):
    event = stage.growth((ROOT, 1))
    sent = stage.event(replace(event, reply=spoil(event.reply)))
    assert [type(command) for command in sent] == [m.ReleaseDraft, m.LeaseDraft]
    assert stage.session.stats.num_draft_failures == 1
    for _ in range(5):
        stage.verdict()
    assert stage.tokens == plain(PROMPT, 5)


@pytest.mark.parametrize("stamp", [Stamp("other", 1, 1), Stamp("d", 2, 1)])
def test_growth_of_another_lease_or_epoch_is_none(stage, stamp):
    assert stage.grows((ROOT, 1), stamp=stamp) == []
    assert stage.session.stats.num_stale_replies == 1
    assert len(stage.session._blocks.tree) == 0


def test_after_another_lease_growth_begins_anew(stage):
    stage.grows((ROOT, 1), (0, 2))
    stage.event(m.DraftLost(1))
    assert stage.session.stats.num_draft_failures == 1
    stage.event(m.DraftLeased("d2", 2))
    asked = stage.last(DraftRequest)
    assert (asked.stamp.lease, asked.stamp.epoch, asked.base.num_tokens) == ("d2", 2, 0)
    assert asked.growth.reports_all
    assert len(stage.session._blocks.tree) == 0


def test_a_lost_target_is_sent_the_block_again_and_the_tokens_stay(stage):
    stage.verdict()
    stage.grows_right(4)
    stage.verdict()
    block = stage.block
    stage.event(m.TargetLost(1, "it died"))
    stage.target = FakeTargetEngine(epoch=2)
    stage.event(m.TargetLeased("t2", 2))
    assert stage.block == block
    for _ in range(4):
        stage.verdict()
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


def test_a_block_is_no_deeper_than_is_asked_for_nor_larger_than_there_is_room(tokenizer):
    stage = Stage(tokenizer, max_tokens=6)
    stage.verdict()
    stage.grows_right(12)
    stage.verdict()
    assert len(stage.block) == 3, "two tokens are there, and the target adds one"
    stage = Stage(tokenizer, max_draft_tokens=2)
    stage.grows_right(12)
    stage.verdict()
    assert max(stage.block.depths) <= 2
    stage = Stage(tokenizer, kv_cache_tokens=len(PROMPT) + 3)
    stage.grows_right(12)
    stage.verdict()
    assert len(stage.block) <= 2
    stage = Stage(tokenizer, num_states=6)
    stage.grows_right(12)
    stage.verdict()
    assert len(stage.block) == 3, "a target with recurrent layers has a state for each guess"
    shared = Stage(tokenizer, num_states=10)
    shared.session._policy._known.num_sessions = 2
    shared.grows_right(12)
    shared.verdict()
    assert len(shared.block) == 2, "and its sessions share them"


def test_a_trace_tells_which_pass_of_the_draft_a_block_is_from(tokenizer):
    """The last one that was told of: it made the tree what it was; of other passes nothing was used."""
    stage = Stage(tokenizer, wants_trace=True)
    tokens, traced = stage.right(4), []
    stage.grows((ROOT, tokens[0]), (0, tokens[1]))
    stage.grows((1, tokens[2]), (2, tokens[3]))
    for command in stage.verdict():
        traced += command.trace if isinstance(command, Chunk) else ()
    stage.grows((3, 1))
    traced += stage.session._recorder._calls
    assert [(call.num_guesses, call.num_used) for call in traced if call.call is Call.GROWTH] == [(2, 0), (2, 3)]


@pytest.mark.parametrize(("branch_s", "num_guesses"), [(0.0, 4), (0.004, 3)])
def test_where_branches_are_dear_blocks_go_straight(tokenizer, branch_s, num_guesses):
    """A chain of three, and beside it a guess that is likelier than the chain's end but not worth a branch."""
    stage = Stage(tokenizer)
    stage.policy.__class__ = FakeBranches
    stage.policy.branch_s = branch_s
    first, *chain = stage.right(4)
    other = chain[0] - 1 if chain[0] else 1
    stage.grows((ROOT, first), (0, chain[0]), (0, other), (1, chain[1]), (3, chain[2]))
    stage.verdict()
    assert len(stage.block) == num_guesses
    is_straight = stage.block.parents == (ROOT, 0, 1)
    assert is_straight is (branch_s > 0)


def test_a_draft_that_grows_nothing_of_use_rests_and_begins_anew_after_a_pause(stage):
    stage.grows_right(3)
    for _ in range(REST_ROUNDS):
        stage.policy.observe_round(round_seen(Found.HIT))
    sent = stage.verdict()
    assert [type(command) for command in sent] == [VerifyRequest, m.ReleaseDraft, m.LeaseDraft, Chunk]
    assert 0.5 <= stage.last(m.LeaseDraft).delay_s / CONFIG.draft_retry_s <= 1.0
    num_grows = stage.count(DraftRequest)
    stage.verdict()
    assert stage.count(DraftRequest) == num_grows, "it is told nothing while it rests"
    stage.event(m.DraftLeased("d", 2))
    stage.num_reported = 0
    assert stage.last(DraftRequest).growth.reports_all
    assert stage.last(DraftRequest).suffix == (*PROMPT, *stage.tokens)
    stage.grows_right(3)
    stage.verdict()
    stage.verdict()
    assert stage.tokens == plain(PROMPT, len(stage.tokens))
    assert stage.session.stats.num_draft_failures == 0


def test_the_end_closes_both_sides(stage):
    stage.grows((ROOT, 1))
    stage.event(m.Abandoned(RuntimeError("gone")))  # type: ignore[arg-type]
    assert {type(command) for command in stage.sent[-3:]} == {m.Fail, m.ReleaseTarget, m.ReleaseDraft}
    assert stage.grows((ROOT, 1)) == []


# Guessers


REPEATS = (45, 19, 5, 3, 6, 45)
"""The target goes on with 19, and with 5 as it did before, but then with something else."""
FOUND = (5, 3, 6, 45, 19)
"""Tokens found by lookup after the 19."""
LOOKS_UP = replace(CONFIG, guessers=("draft", "prompt_lookup"))


@pytest.fixture
def repeating(tokenizer):
    return Stage(tokenizer, config=LOOKS_UP, prompt=REPEATS)


def looked_up(stage):
    """Places of the text by which prompt lookup was judged."""
    return stage.policy.sources.of("prompt_lookup").num_seen


def test_what_is_looked_up_is_verified_where_the_draft_has_told_of_nothing(repeating):
    repeating.verdict()
    assert repeating.block == TokenTree.chain(FOUND)
    assert looked_up(repeating) == 0
    repeating.verdict()
    assert repeating.tokens == plain(REPEATS, 3)
    assert looked_up(repeating) == 2, "one was right, one wrong, and the third was not judged"
    assert repeating.session.stats.num_lookup_tokens == 5
    assert repeating.session.stats.num_hits == repeating.session.stats.num_misses == 0, "those are the draft's"


def test_nodes_of_both_are_one_block_and_each_is_credited_with_its_own(repeating):
    token = repeating.right(1)[0]
    repeating.grows((ROOT, token), (ROOT, 31), (0, 30), (0, FOUND[0]))
    repeating.verdict()
    head = repeating.policy._learned.accepted
    num_judged = head.num_seen
    block, seen = repeating.block, repeating.session._target.block.shape
    assert sorted(block.tokens) == sorted([30, *FOUND])
    assert [block.tokens[node] for node, rank in enumerate(seen.ranks) if rank == UNRANKED] == list(FOUND[1:])
    assert seen.num_looked_up == 4
    repeating.verdict()
    assert repeating.tokens == plain(REPEATS, 3)
    assert looked_up(repeating) == 2, "it had guessed the node, too"
    assert repeating.policy.seen[-1].path == (block.tokens.index(FOUND[0]),)
    assert head.num_seen == num_judged + 1, "the draft was judged at the root"


def test_where_a_lookup_was_right_the_draft_is_judged_by_what_it_had_guessed_there(repeating):
    token = repeating.right(1)[0]
    repeating.grows((ROOT, token), (0, 30), (0, 29))
    repeating.verdict()
    head = repeating.policy._learned.accepted
    num_judged, before = head.num_seen, head.value
    repeating.verdict()
    seen = repeating.policy.seen[-1]
    assert repeating.tokens == plain(REPEATS, 3)
    assert [seen.shape.ranks[node] for node in seen.path] == [UNRANKED]
    assert head.num_seen == num_judged + 1
    assert head.value < before, "its first was wrong"


def test_a_draft_may_tell_of_what_was_looked_up_while_it_is_verified(repeating):
    tokens = repeating.right(5)
    repeating.grows((ROOT, tokens[0]))
    repeating.verdict()
    assert repeating.block == TokenTree.chain(FOUND)
    earlier = repeating.last(DraftRequest).stamp
    repeating.grows((0, tokens[1]), (1, tokens[2]))
    repeating.verdict()
    assert repeating.tokens == tokens[:3]
    repeating.grows((2, tokens[3]), (3, tokens[4]), stamp=earlier)
    repeating.verdict()
    assert repeating.block.tokens == (tokens[4],)


def test_nothing_is_looked_up_where_that_is_not_wanted(tokenizer):
    for stage in (
        Stage(tokenizer, prompt=REPEATS),
        Stage(tokenizer, prompt=REPEATS, config=LOOKS_UP, max_draft_tokens=0),
    ):
        stage.verdict()
        assert stage.block == EMPTY_BLOCK


def test_a_block_of_several_sources_keeps_to_the_room_there_is(tokenizer):
    stage = Stage(tokenizer, config=LOOKS_UP, prompt=REPEATS, max_tokens=4)
    stage.verdict()
    assert max(stage.block.depths) == 2, "one token is there, and the target adds one"


# The policy


def policy(config=CONFIG, **changes):
    return Controller(config).policy(request(PROMPT, 40, **changes))


def learned(rows_s, pass_s=lambda rows: 0.003, config=CONFIG):
    """A policy that knows what passes cost, and makes 100 tokens a second."""
    found = policy(config)
    for _ in range(40):
        for rows in (1, 2, 3, 5, 9, 17, 33, 65):
            found._known.verify.observe(Timing(0.0, rows_s(rows), 1, rows), rows_s(rows) + 0.001)
            found.observe_pass(Timing(0.0, pass_s(rows - 1 or 1), 1, rows - 1 or 1))
    for _ in range(600):
        found.observe_interval(MeasuredRound(4, 0.04))
    found._known._costs = None
    return found


def num_worth(policy, path_prob):
    return int(np.argmax(policy.net(path_prob)))


def test_a_node_is_verified_while_it_is_worth_more_than_its_row():
    dear = learned(lambda rows: 0.02 + 0.001 * rows)  # a row costs a tenth of a token
    path_prob = [0.9, 0.5, 0.2, 0.05, 0.04]
    assert num_worth(dear, _array(path_prob)) == 3
    cheap = learned(lambda rows: 0.02 + 1e-5 * rows)
    assert num_worth(cheap, _array(path_prob)) == 5
    assert num_worth(dear, _array([0.05])) == 0, "plain decoding is better than that"
    assert num_worth(dear, _array([])) == 0


def test_a_step_in_costs_is_looked_beyond():
    steps = learned(lambda rows: 0.02 if rows == 1 else 0.026)  # the second row costs 0.6 tokens, others nothing
    assert num_worth(steps, _array([0.5, 0.4, 0.3])) == 3


def round_seen(found, num_guesses=0, rank=0):
    unsure = (0.5,) * num_guesses
    shape = Shape(tuple(range(-1, num_guesses - 1)), (rank,) * num_guesses, unsure)
    return RoundOutcome(shape, (), found, 0.02, None)


def test_a_rest_follows_many_rounds_in_which_nothing_was_worth_its_row():
    one = policy()
    for _ in range(REST_ROUNDS - 1):
        one.observe_round(round_seen(Found.HIT))
    one.observe_round(round_seen(Found.NOT_ASKED))
    assert not one.wants_rest, "a draft that has nothing yet is not judged"
    one.observe_round(round_seen(Found.HIT, 2, rank=UNRANKED))
    assert one.wants_rest, "what was looked up is none of its merits"
    assert one._known.depth > 0
    one.rest()
    assert (one._known.depth, "gamma 8 -> 0" in one._known.reason) == (0, True)
    assert not one.wants_rest
    one.tree_spec(100, 0)
    assert (one._known.depth, "a trial after rest" in one._known.reason) == (8, True)


def test_costs_are_looked_at_now_and_then():
    one, known = policy(), SharedEstimates()
    before = known.costs.verify_s(0)
    one._known = known
    for _ in range(REFRESH_ROUNDS):
        assert known.costs.verify_s(0) == before
        known.verify.observe(Timing(0.0, 2.0 * before, 1, 1), 2.0 * before + 0.001)
        one.observe_round(round_seen(Found.HIT, 2))
    assert known.costs.verify_s(0) > 1.5 * before


def test_each_rest_in_vain_is_twice_as_long_until_something_was_worth_verifying(stage):
    """Whatever the draft tells meanwhile."""
    pauses = []
    for epoch in range(2, 10):
        stage.grows_right(3)
        for _ in range(REST_ROUNDS):
            stage.policy.observe_round(round_seen(Found.HIT))
        stage.do(stage.session._drafts._first.rest())
        pauses.append(stage.last(m.LeaseDraft).delay_s)
        stage.event(m.DraftLeased("d", epoch))
        stage.num_reported = 0
    assert all(0.5 <= pause / min(2.0**num, MAX_PAUSE_S) <= 1.0 for num, pause in enumerate(pauses))
    stage.grows_right(3)
    stage.verdict()
    assert len(stage.block)
    stage.do(stage.session._drafts._first.rest())
    assert stage.last(m.LeaseDraft).delay_s <= CONFIG.draft_retry_s


def test_a_first_guess_is_waited_for_if_it_gains_more_than_its_time():
    """100 tokens a second; 1.5 passes, and the way."""
    for pass_s, is_worth in ((0.003, True), (0.006, False)):
        one = learned(lambda rows: 0.02, lambda rows, pass_s=pass_s: pass_s)
        one.tree_spec(100, 0)
        assert one.is_worth_waiting(1, has_drafted=False) is is_worth
        assert not one.is_worth_waiting(1, has_drafted=True), "what grows while that is verified is not lost"


@pytest.mark.parametrize("is_hit", [True, False])
def test_what_is_waited_for_is_worth_what_came_late_before_whatever_first_candidates_are_worth(is_hit):
    one = learned(lambda rows: 0.02)
    for _ in range(300):
        one.observe_guess(0.7, not is_hit)
        one.observe_round(replace(round_seen(Found.MISS), late_hit=is_hit))
        one.observe_round(round_seen(Found.HIT))
    assert one.is_worth_waiting(1, has_drafted=False) is is_hit


def test_of_what_a_draft_tells_after_a_miss_it_is_learned_whether_it_is_the_next_token(stage):
    stage.grows((ROOT, 37))
    stage.verdict()
    for tells, is_late_hit in ((stage.right(1)[0], True), (37, False)):
        assert stage.policy.seen[-1].found is Found.MISS
        stage.grows((ROOT, tells))
        stage.verdict()
        assert stage.policy.seen[-1].late_hit is is_late_hit
    stage.verdict()
    assert stage.policy.seen[-1].late_hit is None, "it has told of nothing"


def test_what_a_draft_had_told_before_it_missed_tells_nothing_of_waits(stage):
    stage.grows_right(5)
    stage.policy.max_nodes = 2
    for _ in range(2):
        stage.verdict()
    assert [seen.late_hit for seen in stage.policy.seen] == [None, None]
    assert stage.policy.seen[-1].found is Found.HIT


def test_what_a_guesser_has_told_of_is_not_worth_a_wait(tokenizer):
    stage = Stage(tokenizer, config=LOOKS_UP, prompt=REPEATS)
    stage.grows((ROOT, 37))
    stage.verdict()
    assert stage.policy.seen[-1].found is Found.MISS
    stage.grows((ROOT, stage.right(1)[0]))
    stage.verdict()
    assert stage.policy.seen[-1].late_hit is False


def test_who_shares_the_passes_of_a_target_waits_for_no_draft():
    """Or misses the others' pass: with that a round is lost, not a part of one."""
    one = learned(lambda rows: 0.02)
    assert one.is_worth_waiting(1, has_drafted=False)
    one._known.num_sessions = 4
    assert not one.is_worth_waiting(1, has_drafted=False)


def test_a_session_begins_with_the_rate_of_those_before_it():
    known = SharedEstimates()
    first = AdaptivePolicy(request(PROMPT, 10), CONFIG, known)
    for _ in range(500):
        first.observe_interval(MeasuredRound(6, 0.06))
    assert AdaptivePolicy(request(PROMPT, 10), CONFIG, known).rate == pytest.approx(100, rel=0.01)


def test_a_draft_feeds_as_many_rows_as_its_passes_take_at_little_cost():
    flat = learned(lambda rows: 0.02, lambda rows: 0.003)
    assert flat.tree_spec(100, 0).rows_per_pass == WIDTHS[-1]
    dear = learned(lambda rows: 0.02, lambda rows: 0.001 * rows)
    assert dear.tree_spec(100, 0).rows_per_pass <= 4


def test_how_deep_is_grown_follows_the_context_and_the_request():
    assert policy().tree_spec(3, 0).max_depth == 3
    assert policy().tree_spec(0, 0) is None
    assert policy(max_draft_tokens=0).tree_spec(100, 0) is None
    assert policy(max_draft_tokens=2).tree_spec(100, 0).max_depth == 5


def test_chances_that_the_draft_is_told_are_a_law():
    tree_spec = policy().tree_spec(100, 0)
    assert 0 < sum(tree_spec.tail) <= 1.0
    assert list(tree_spec.tail) == sorted(tree_spec.tail, reverse=True)


def test_the_rate_is_that_of_the_last_rounds():
    one = policy()
    before = one.rate
    one.observe_interval(MeasuredRound(6, 0.06))
    assert before < one.rate < 100, "one round is not the rule"
    for _ in range(600):
        one.observe_interval(MeasuredRound(6, 0.06))
    assert one.rate == pytest.approx(100, rel=0.01)
    for _ in range(600):
        one.observe_interval(MeasuredRound(5, 0.1))
    assert one.rate == pytest.approx(50, rel=0.01)


def test_a_second_is_worth_what_plain_decoding_would_make_in_it():
    """Or sessions that verify what does not pay would go on: by the rate that they have, it pays."""
    one = learned(lambda rows: 0.02)
    for _ in range(200):
        one.observe_interval(MeasuredRound(1, 1.0))
    one._known._costs = None
    assert one.rate == pytest.approx(1 / 0.021, rel=0.05)


def _array(values):
    return np.array(values, float)
