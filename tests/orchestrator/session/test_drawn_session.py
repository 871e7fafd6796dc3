"""A session whose draft samples: blocks are chains of its draws, each with the law that it was drawn from, in turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from core.config import SpeculationConfig
from core.records import Continuation, DraftRequest, DraftUpdate, Sampling, Timing, Verification, VerifyRequest
from core.speculation.growth import Measure, NewNodes
from core.speculation.token_tree import EMPTY_BLOCK, NO_Q, ROOT, SparseDistribution, TokenTree
from orchestrator.guessers.drawing import draw_from
from orchestrator.guessers.registry import GUESSERS
from orchestrator.policy.adaptive import AdaptivePolicy
from orchestrator.policy.growth import CATCH_UP
from orchestrator.policy.named import ChainPolicy
from orchestrator.policy.policies import Controller
from orchestrator.policy.policy import Found, RoundOutcome, Shape
from orchestrator.session import messages as m
from tests.orchestrator.fakes import candidates, next_token, plain, request
from tests.orchestrator.session.test_in_turn import GAMMA, PROMPT, Stage, kinds

CONFIG = SpeculationConfig(policy="static", max_draft_tokens=GAMMA, guessers=("draft",))
"""Draws are drafted in turn, whatever the service prefers."""
SEED = 5
SAMPLED = {"sampling": Sampling(temperature=1.0), "verification": Verification.REJECTION}


class DrawnStage(Stage):
    """Its draft samples."""

    def __init__(self, tokenizer, max_tokens=40, config=CONFIG, prompt=PROMPT, **changes):
        super().__init__(tokenizer, max_tokens, config, prompt, **{**SAMPLED, **changes})
        self.session._policy._follows = True  # the clock stands still

    @property
    def block(self):
        return self.last(VerifyRequest).block

    @property
    def asked(self):
        return self.last(DraftRequest)


@pytest.fixture(params=[Verification.REJECTION, Verification.BLOCK])
def stage(tokenizer, request):
    return DrawnStage(tokenizer, verification=request.param)


@pytest.fixture
def waiting(stage):
    """For the draws of the first block."""
    stage.grown()
    stage.verdict()
    return stage


@pytest.mark.parametrize(
    ("asked", "setting", "temperature", "told"),
    [(None, None, 1.0, 1.0), (0.5, None, 1.0, 0.5), (None, 0.7, 1.0, 0.7), (0.5, 0.7, 1.0, 0.5), (0.5, 0.7, 0.0, 0.0)],
)
def test_the_draft_alone_is_told_the_drafts_temperature(tokenizer, asked, setting, temperature, told):
    """A greedy draft needs none, and the rule stays that of the request."""
    config = replace(CONFIG, draft_temperature=setting)
    stage = DrawnStage(tokenizer, config=config, sampling=Sampling(temperature=temperature), draft_temperature=asked)
    at_draft, at_target = stage.asked.spec, stage.last(VerifyRequest).spec
    assert (at_draft.sampling.temperature, at_target.sampling.temperature) == (told, temperature)
    assert at_draft == replace(at_target, sampling=replace(at_target.sampling, temperature=told))


def law_at(text):
    """The law that the fake draft draws from after it."""
    return SparseDistribution(candidates(text)[:2], (0.5, 0.5))


def test_a_block_is_a_chain_of_draws_each_with_its_law(waiting):
    text, guessed = [*PROMPT, *waiting.tokens], waiting.guessed
    waiting.grown()
    laws = [law_at([*text, *guessed[:place]]) for place in range(GAMMA)]
    assert waiting.block == TokenTree.chain(guessed, laws)


def test_behind_verification_nothing_is_drawn_and_the_draft_is_told_of_nothing(stage):
    assert stage.asked.growth == replace(CATCH_UP, reports_all=True), "it takes in the prompt"
    stage.grown()
    for _ in range(5):
        stage.verdict()
        assert stage.asked.growth.num_passes == GAMMA
        num_asked = stage.count(DraftRequest)
        stage.grown()
        assert stage.count(DraftRequest) == num_asked
    assert stage.count(Continuation) == 0
    assert all(command.growth.ends for command in stage.sent if isinstance(command, DraftRequest))
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


def test_each_block_is_drawn_anew(waiting):
    """Nothing that was drawn before a verdict is used after it: the tree is empty, and the draft begins from 0."""
    for _ in range(4):
        assert waiting.asked.growth.reports_all
        waiting.grown()
        assert waiting.block.tokens, "so that there is something to forget"
        waiting.verdict()
        assert len(waiting.session._blocks.tree) == 0
        assert waiting.reply().new_nodes.first == 0


def told_without(reply, **changes):
    new_nodes = reply.new_nodes
    values = {
        name: getattr(new_nodes, name)
        for name in ("first", "parents", "tokens", "ranks", "chances", "confidences", "root")
    }
    return replace(reply, new_nodes=NewNodes(**{**values, "q": new_nodes.q, **changes}))


def unchecked(new_nodes, **changes):
    """A copy without checks, like one out of a pickle."""
    for name, value in {**changes, "is_checked": False}.items():
        object.__setattr__(new_nodes, name, value)
    return new_nodes


@pytest.mark.parametrize(
    "lie",
    [
        lambda reply: told_without(reply, q=()),
        lambda reply: replace(reply, new_nodes=unchecked(reply.new_nodes, q=reply.new_nodes.q[:-1])),
        lambda reply: replace(reply, new_nodes=unchecked(reply.new_nodes, q=(NO_Q,) * len(reply.new_nodes))),
        lambda reply: replace(
            reply, new_nodes=unchecked(reply.new_nodes, q=(SparseDistribution((1,), (7.0,)),) * GAMMA)
        ),
    ],
    ids=["none", "too few", "empty", "no law"],
)
def test_who_does_not_say_what_it_drew_from_loses_its_lease(waiting, lie):
    """A draw that is verified as if its draft had been sure of it is accepted too seldom, and the rest too often."""
    sent = waiting.grown(lie(waiting.reply()))
    assert {m.ReleaseDraft, VerifyRequest} <= set(kinds(sent))
    assert waiting.block == EMPTY_BLOCK
    assert waiting.session.stats.num_draft_failures == 1


def test_draws_that_come_when_the_text_has_moved_on_are_not_used(waiting):
    late = waiting.reply()
    waiting.event(m.DraftLate(late.stamp))
    waiting.verdict()
    waiting.grown(late)
    assert len(waiting.session._blocks.tree) == 0
    assert waiting.block == EMPTY_BLOCK
    waiting.verdict()
    waiting.grown()
    assert len(waiting.block) == GAMMA
    assert waiting.tokens == plain(PROMPT, len(waiting.tokens))


def test_a_lost_target_is_followed_by_one_that_verifies_the_same_draws(waiting):
    """Drawn once more with the same noise they would be the same; of another target's block they may not be missed."""
    waiting.grown()
    before = waiting.block
    waiting.event(m.TargetLost(1, "killed"))
    waiting.target.forget(waiting.session._target._view.name)
    waiting.event(m.TargetLeased("t2", 1))
    assert waiting.block == before
    waiting.verdict()
    assert waiting.tokens == plain(PROMPT, len(waiting.tokens))


def test_the_target_is_offered_no_draws_and_no_plain_step_either(tokenizer, monkeypatch):
    """It refuses offers of such sessions: the session sends each block, and none while its draft rests."""
    monkeypatch.setattr(AdaptivePolicy, "may_offer", True)
    for changes in ({}, {"max_draft_tokens": 0}):
        stage = DrawnStage(tokenizer, config=SpeculationConfig(guessers=("draft",)), **changes)
        stage.session._policy.is_worth_a_plain_step = lambda *_: True
        for _ in range(3):
            stage.verdict()
        assert stage.count(Continuation) == 0


def test_draws_that_were_not_verified_are_gone_though_the_draft_is_not_told(tokenizer):
    """The verdict's own token is what was drawn there: what was drawn below it has another row's noise."""
    stage = keeping(tokenizer, lambda confidences: confidences[-1] > 0.5)
    num_alike = 0
    for _ in range(9):
        reply = with_confidences(stage.reply(), 0.9, 0.1, 0.9)
        stage.grown(reply)
        drawn, num_before = reply.new_nodes.tokens.tolist(), len(stage.tokens)
        stage.session._drafts._first._policy.wants_turn = lambda: False
        stage.verdict()
        num_alike += stage.tokens[num_before:] == drawn[:2]
        assert stage.block == EMPTY_BLOCK
        assert len(stage.session._blocks.tree) == 0
        stage.session._drafts._first._policy.wants_turn = lambda: True
        stage.verdict()
    assert num_alike


def test_the_targets_own_token_teaches_nothing_of_the_draft(tokenizer):
    """It is a draw of its own: that it is, or is not, what the draft drew there says nothing of acceptance."""
    stage, seen = keeping(tokenizer, lambda confidences: confidences[-1] > 0.5), []
    stage.session._policy.observe_round = seen.append
    for _ in range(6):
        stage.grown(with_confidences(stage.reply(), 0.9, 0.1, 0.9))
        stage.verdict()
    assert any(each.path for each in seen)


# What is kept of a chain of draws


class Keeps(AdaptivePolicy):
    """Keeps draws by a rule that looks at all that it is shown, and says what it was shown."""

    def __init__(self, rule, *arguments):
        super().__init__(*arguments)
        self.rule, self.shown = rule, []

    def _forecast(self):
        return GAMMA

    def keeps(self, confidences):
        self.shown.append(list(confidences))
        return self.rule(confidences)


def keeping(tokenizer, rule):
    stage = DrawnStage(tokenizer)
    known = stage.session._policy._known
    policy = Keeps(rule, request(PROMPT, **SAMPLED), CONFIG, known)
    stage.session._drafts._first._policy = stage.session._blocks._policy = policy
    stage.grown()
    stage.verdict()
    return stage


def with_confidences(reply, *confidences):
    return told_without(reply, confidences=confidences, chances=confidences)


def test_no_draw_is_dropped_for_what_follows_it(tokenizer):
    """The draft's law after a draw depends on the draw. This rule would drop all of them for the third."""
    stage = keeping(tokenizer, lambda confidences: min(confidences) > 0.5)
    stage.grown(with_confidences(stage.reply(), 0.9, 0.8, 0.1))
    assert len(stage.block) == 2
    assert stage.session._drafts._first._policy.shown == [[0.9], [0.9, 0.8], [0.9, 0.8, 0.1]]


def test_nothing_is_verified_behind_a_draw_that_is_dropped(tokenizer):
    stage = keeping(tokenizer, lambda confidences: confidences[-1] > 0.5)
    stage.grown(with_confidences(stage.reply(), 0.9, 0.1, 0.9))
    assert len(stage.block) == 1
    assert stage.session._drafts._first._policy.shown[-1] == [0.9, 0.1]


@pytest.mark.parametrize(
    ("policy", "settings", "num_kept"),
    [
        ("adaptive", {"max_block_tokens": 3}, 3),
        ("static", {"max_draft_tokens": 3}, 3),
        ("static_tree", {"max_draft_tokens": 3}, 3),
        ("heuristic", {"max_draft_tokens": 8}, 4),
        ("confidence", {"min_confidence": 0.5}, 2),
        ("confidence", {"min_confidence": 0.95}, 0),
        ("path_probability", {"min_path_probability": 0.3}, 2),
    ],
)
def test_a_rule_keeps_draws_by_how_sure_the_draft_was(policy, settings, num_kept):
    policy = Controller(SpeculationConfig(policy=policy, **settings)).policy(request(**SAMPLED))
    confidences = (0.9, 0.7, 0.4, 0.9, 0.9)
    kept = 0
    while kept < len(confidences) and policy.keeps(confidences[: kept + 1]):
        kept += 1
    assert kept == num_kept


def test_a_draft_that_samples_is_asked_for_a_chain_in_turn_by_every_policy():
    for policy, kind in (("adaptive", AdaptivePolicy), ("static_tree", ChainPolicy), ("confidence", ChainPolicy)):
        for pipelining in (True, False):
            chosen = Controller(SpeculationConfig(policy=policy, pipelining=pipelining)).policy(request(**SAMPLED))
            assert type(chosen) is kind
            assert chosen.is_in_turn
            assert chosen.tree_spec(100, 0) == CATCH_UP
            tree_spec = chosen.tree_spec(100, 4)
            assert tree_spec.is_blind, "how long it takes does not depend on what is drawn"
            assert 1 <= tree_spec.num_passes <= 4
            if policy == "confidence":
                assert (tree_spec.num_passes, tree_spec.measure) == (4, Measure.CONFIDENCE)


@pytest.mark.parametrize(
    ("settings", "num_drawn"),
    [
        ({"policy": "static", "max_draft_tokens": 6}, 6),
        ({"policy": "static_tree", "max_draft_tokens": 6}, 6),
        ({"policy": "heuristic", "max_draft_tokens": 8}, 4),
        ({"policy": "confidence", "max_draft_tokens": 6}, 6),
        ({"policy": "adaptive", "max_draft_tokens": 8, "max_block_tokens": 2}, 2),
    ],
)
def test_no_more_is_drawn_than_may_be_verified(settings, num_drawn):
    policy = Controller(SpeculationConfig(**settings)).policy(request(**SAMPLED))
    assert policy.tree_spec(100, 64).num_passes == num_drawn
    assert policy.tree_spec(1, 64).num_passes == 1, "the draft's context is nearly full"
    assert policy.tree_spec(100, 1).num_passes == 1, "one more token is wanted"


def test_adaptive_draws_as_many_as_are_forecast_to_yield_most():
    policy = Controller(SpeculationConfig()).policy(request(**SAMPLED))
    before = policy.tree_spec(100, 64).num_passes
    for _ in range(60):
        policy.observe_round(all_rejected(before))
    assert policy._forecast() <= 1
    assert policy.tree_spec(100, 64).num_passes == 1 < before


def all_rejected(num_guesses):
    shape = Shape(tuple(range(-1, num_guesses - 1)), (0,) * num_guesses, (0.9,) * num_guesses)
    return RoundOutcome(shape, (), Found.NOT_ASKED, 0.026, Timing(0.0, 0.025, 1, num_guesses + 1))


# Lookups


REPEATS = (45, 19, 5, 3, 6, 45)
FOUND = (5, 3, 6, 45, 19)
LOOKS_UP = replace(CONFIG, guessers=("draft", "prompt_lookup"))


def test_what_is_looked_up_stands_in_where_the_draft_has_drawn_nothing_and_is_a_point_mass(tokenizer):
    stage = DrawnStage(tokenizer, config=LOOKS_UP, prompt=REPEATS)
    stage.grown()
    stage.verdict()
    stage.event(m.DraftLate(stage.last(m.Await).stamp))
    block = stage.block
    assert block.tokens == FOUND[: len(block)]
    assert block.q == tuple(SparseDistribution((token,), (1.0,)) for token in block.tokens)
    assert len(block) > 0


def forked():
    """A prompt after which the target goes on with 19, which both 5 and 7 have followed."""
    return next(
        (19, 5, a, 19, 7, b) for a in range(1, 50) for b in range(1, 50) if next_token((19, 5, a, 19, 7, b)) == 19
    )


@pytest.mark.parametrize("policy", ["adaptive", "static", "static_tree", "path_probability"])
def test_of_a_tree_of_guesses_a_chain_is_verified_since_these_verifications_take_no_other(tokenizer, policy):
    config = replace(LOOKS_UP, policy=policy, lookup_min_match=1, lookup_branches=3)
    stage = DrawnStage(tokenizer, config=config, prompt=forked())
    stage.event(m.DraftLost(1))
    stage.verdict()
    ((_, tree),) = stage.session._panel._proposed
    assert tree.parents.count(ROOT) == 2, "there are branches"
    assert stage.block.is_chain
    assert stage.block.tokens[0] in (5, 7)


def test_nothing_is_looked_up_beside_draws(tokenizer):
    """A draw that is sent since a lookup agrees with it would be sent because of what it is."""
    stage = DrawnStage(tokenizer, config=LOOKS_UP, prompt=REPEATS)
    stage.grown()
    stage.verdict()
    stage.grown()
    assert stage.block.tokens == stage_draws(stage)
    assert all(len(law.probs) == 2 for law in stage.block.q)
    assert stage.session.stats.num_lookup_tokens == 0


def stage_draws(stage):
    text = [*REPEATS, *stage.tokens]
    for _ in range(GAMMA):
        text.append(candidates(text)[0])
    return tuple(text[-GAMMA:])


def test_a_reply_without_draws_is_no_lie(waiting):
    """Where growth ended at once: the round is plain."""
    reply = waiting.reply()
    waiting.grown(DraftUpdate(reply.stamp, NewNodes(0), reply.held, is_over=True))
    assert waiting.block == EMPTY_BLOCK
    assert waiting.session.stats.num_draft_failures == 0
    assert waiting.reply().new_nodes.parents[0] == ROOT


# Trees of draws

TREES = (Verification.RECURSIVE_REJECTION, Verification.SEQUENTIAL_SELECTION)


@pytest.mark.parametrize("verification", TREES)
@pytest.mark.parametrize("policy", ["adaptive", "static_tree"])
def test_a_tree_of_draws_has_a_shape_that_is_fixed_before(verification, policy):
    chosen = Controller(SpeculationConfig(policy=policy)).policy(request(**{**SAMPLED, "verification": verification}))
    assert chosen.draws_trees
    assert chosen.is_in_turn
    tree_spec = chosen.tree_spec(100, 4)
    assert tree_spec.is_blind
    assert tree_spec.is_chain or tree_spec.fanout == 1 + len(tree_spec.tail) > 1
    assert 1 <= tree_spec.num_passes <= 4


@pytest.mark.parametrize("verification", TREES)
def test_other_policies_have_chains_drawn_under_every_rule(verification):
    for policy in ("static", "confidence", "entropy", "heuristic", "path_probability"):
        asked = request(**{**SAMPLED, "verification": verification})
        chosen = Controller(SpeculationConfig(policy=policy)).policy(asked)
        assert not chosen.draws_trees
        assert chosen.tree_spec(100, 4).is_chain


def test_adaptive_draws_a_chain_where_branches_cost_more_than_they_bring(monkeypatch):
    policy = Controller(SpeculationConfig()).policy(request(**{**SAMPLED, "verification": TREES[0]}))
    monkeypatch.setattr(AdaptivePolicy, "branches_cost_time", True)
    policy.net = lambda path_prob, branches=None: path_prob if branches is None else -path_prob
    assert policy.tree_spec(100, 4).is_chain


def several(text, with_replacement):
    """Draws of a fake draft after it: the first two of three, in the order of drawing."""
    ranked = candidates(text)[:3]
    draws = (ranked[0], ranked[0], ranked[1]) if with_replacement else ranked[:2]
    return SparseDistribution(ranked, (0.4, 0.3, 0.3), draws)


@pytest.mark.parametrize("verification", TREES)
def test_the_children_of_a_place_share_its_draws_in_the_block(tokenizer, verification):
    config = SpeculationConfig(policy="static_tree", max_draft_tokens=2, max_block_tokens=5, guessers=("draft",))
    stage = DrawnStage(tokenizer, config=config, verification=verification)
    stage.grown()
    stage.verdict()
    reply, text = stage.reply(), [*PROMPT, *stage.tokens]
    first = several(text, verification.rule.with_replacement)
    tokens = list(dict.fromkeys(first.draws))
    below = several([*text, tokens[0]], verification.rule.with_replacement)
    tokens += list(dict.fromkeys(below.draws))
    told = NewNodes(
        0, (ROOT, ROOT, 0, 0), tokens, (0, 1, 0, 1), (0.7, 0.2, 0.7, 0.2), (0.5,) * 4, q=(first, first, below, below)
    )
    stage.grown(replace(reply, new_nodes=told))
    block = stage.block
    assert sorted(zip(block.parents, block.tokens, strict=True)) == sorted(
        zip((ROOT, ROOT, block.tokens.index(tokens[0]), block.tokens.index(tokens[0])), tokens, strict=True)
    )
    for parent, q in zip(block.parents, block.q, strict=True):
        assert q is (first if parent == ROOT else below)


class Moody:
    """Says another law each time, and keeps what it has said: what was drawn from cannot be computed again."""

    def __init__(self):
        self.said = []

    def propose(self, text):
        raise AssertionError("where q is asked for it is asked for laws")

    def distribution(self, text, drawn):
        share = 0.5 + 0.001 * len(self.said)
        self.said.append(SparseDistribution(candidates([*text, *drawn])[:2], (share, 1.0 - share)))
        return self.said[-1]


@pytest.fixture(params=["static", "adaptive"])
def guessing(tokenizer, monkeypatch, request):
    """A session without a draft whose guesses are drawn from laws, and who says them."""
    config = replace(CONFIG, policy=request.param, guessers=("ngram",))
    moody = Moody()
    monkeypatch.setitem(GUESSERS, "ngram", lambda _inputs: moody)
    return DrawnStage(tokenizer, config=config, sampling=Sampling(temperature=1.0, seed=SEED)), moody


def test_the_laws_that_a_guesser_was_drawn_from_go_along_as_they_were(guessing):
    stage, moody = guessing
    for _ in range(6):
        num_said = len(moody.said)
        stage.verdict()
        block = stage.block
        assert block.is_chain
        assert len(block) >= 1
        assert block.q == tuple(moody.said[num_said : num_said + len(block)])
        first = len(PROMPT) + len(stage.tokens)
        assert list(block.tokens) == [draw_from(law, SEED, first + row, row) for row, law in enumerate(block.q)]
    assert stage.tokens == plain(PROMPT, len(stage.tokens))
    assert stage.session.stats.drafted_by_source.keys() == {"ngram"}


def test_a_block_that_is_sent_again_is_the_same_draws_of_the_same_laws(guessing):
    stage, moody = guessing
    stage.verdict()
    block, num_said = stage.block, len(moody.said)
    stage.event(m.TargetLost(1, "it died"))
    stage.event(m.TargetLeased("t2", 1))
    assert stage.block == block
    assert len(moody.said) == num_said


def test_all_that_was_drawn_is_verified(guessing):
    """Whatever the tree's chances say then: the law at the end is the one that was not worth a draw."""
    stage, moody = guessing
    lengths = set()
    for most in (3, 1, 2, 4):
        num_said = len(moody.said)
        stage.session._policy.is_worth_drawing = lambda path_prob, most=most: len(path_prob) <= most
        stage.session._policy.max_depth = stage.session._policy.max_nodes = 1
        stage.verdict()
        lengths.add(len(stage.block))
        assert len(moody.said) - num_said == len(stage.block) + 1
    assert lengths == {1, 2, 3, 4}


@pytest.mark.parametrize("policy", ["static", "adaptive"])
def test_no_more_is_drawn_than_the_output_and_the_target_have_room_for(tokenizer, monkeypatch, policy):
    monkeypatch.setitem(GUESSERS, "ngram", lambda _inputs: Moody())
    config = replace(CONFIG, policy=policy, guessers=("ngram",))
    sampled = {"config": config, "sampling": Sampling(temperature=1.0, seed=SEED)}
    short = DrawnStage(tokenizer, 4, **sampled)
    short.session._policy.is_worth_drawing = lambda _: True
    short.verdict()
    assert len(short.block) == 2, "of three tokens one is the target's own"
    full = DrawnStage(tokenizer, **sampled)
    full.session._policy.is_worth_drawing = lambda _: True
    full.session._pair = replace(
        full.session._pair, target=replace(full.session._pair.target, kv_cache_tokens=len(PROMPT) + 4)
    )
    full.verdict()
    assert len(full.block) == 3


def test_the_heuristic_draws_no_more_than_its_present_gamma():
    policy = Controller(SpeculationConfig(policy="heuristic", max_draft_tokens=8)).policy(request(**SAMPLED))
    assert policy.gamma < policy.max_nodes
    assert policy.is_worth_drawing([0.1] * policy.gamma)
    assert not policy.is_worth_drawing([1.0] * (policy.gamma + 1))


def test_adaptive_draws_no_guess_that_is_not_worth_its_row(monkeypatch):
    policy = Controller(SpeculationConfig()).policy(request(**SAMPLED))
    monkeypatch.setattr(AdaptivePolicy, "net", lambda _, path_prob: path_prob_gain(path_prob, 0.3))
    assert policy.is_worth_drawing([0.5])
    assert policy.is_worth_drawing([0.9, 0.4])
    assert not policy.is_worth_drawing([0.25])
    assert not policy.is_worth_drawing([0.9, 0.25])


def path_prob_gain(path_prob, price):
    """Each row costs as much as so many tokens."""
    gained = [0.0]
    for chance in path_prob:
        gained.append(gained[-1] + chance - price)
    return np.array(gained)


def test_what_was_drawn_for_one_block_does_not_count_for_the_next(guessing):
    """Where nothing is drawn then, what others propose is chosen by the policy as ever."""
    stage, _ = guessing
    stage.verdict()
    assert stage.session._blocks._num_drawn == len(stage.block)
    stage.session._policy.is_worth_drawing = lambda _: False
    stage.verdict()
    assert stage.session._blocks._num_drawn == 0
    assert stage.block == EMPTY_BLOCK
