"""Trees of draws keep the target's law, whatever the draft; and each known way to lose it fails when it is put back."""

import numpy as np
import pytest

from core.noise import Purpose
from core.rules import Verification
from core.rules.chains import verify_rejection
from core.rules.drawn_trees import Drawn
from core.rules.recursive_rejection import judge_recursively, verify_recursively
from core.rules.sequential_selection import division_factor, judge_in_sequence, verify_in_sequence
from core.speculation.token_tree import ROOT, SparseDistribution, TokenTree
from tests.core.rules.decoding import SIGNIFICANCE, VOCAB_SIZE, NoiseTable, count, dirichlet, p_value
from tests.core.rules.test_distribution import NUM_TOKENS, PAIRS
from tests.core.rules.test_traps import constant
from tests.core.rules.tree_decoding import RECURSIVE, SEQUENTIAL, TreeDecoder, verifying

NUM_DRAWS = 2_000
P, Q = dirichlet(1), dirichlet(2)
WAYS = pytest.mark.parametrize(
    ("verify", "with_replacement"), [(RECURSIVE, False), (SEQUENTIAL, True)], ids=["recursive", "sequential"]
)


def decoder(p=P, q=Q, num_draws=NUM_DRAWS, **changes):
    return TreeDecoder(p, q, 0, changes.pop("noise", NoiseTable(num_draws)), **changes)


def is_exact(decoder, monkeypatch, verify, num_tokens=2):
    return p_value(count(decoder, num_tokens, monkeypatch, verify), decoder.p) > SIGNIFICANCE


# The law


@WAYS
@pytest.mark.parametrize(
    "pair", [pair if pair == "unlike" else pytest.param(pair, marks=pytest.mark.thorough) for pair in PAIRS]
)
def test_output_follows_the_target(pair, verify, with_replacement, monkeypatch):
    p, q = PAIRS[pair]
    assert is_exact(decoder(p, q, with_replacement=with_replacement), monkeypatch, verify, NUM_TOKENS.get(pair, 2))


@WAYS
@pytest.mark.thorough
@pytest.mark.parametrize("fanouts", [(1, 1), (4, 1), (2, 2, 1)])
def test_output_follows_the_target_by_trees_of_any_shape(fanouts, verify, with_replacement, monkeypatch):
    assert is_exact(decoder(fanouts=fanouts, with_replacement=with_replacement), monkeypatch, verify)


@WAYS
@pytest.mark.thorough
def test_which_draws_have_a_node_may_depend_on_the_draws(verify, with_replacement, monkeypatch):
    """All of them are tried, with a node or without; one without that passes ends the block."""
    chosen = decoder(with_replacement=with_replacement, keep_row=lambda last, token: Q[last, token] > 0.3)
    assert is_exact(chosen, monkeypatch, verify)


@WAYS
@pytest.mark.thorough
def test_which_places_draw_may_depend_on_q_there(verify, with_replacement, monkeypatch):
    blind = decoder(with_replacement=with_replacement, keep_place=lambda last, draws: Q[last].max() > 0.4)
    assert is_exact(blind, monkeypatch, verify)


@pytest.mark.parametrize("verify", [verify_recursively, verify_in_sequence])
def test_with_one_draw_a_place_it_is_rejection(verify):
    generator = np.random.default_rng(5)
    for seed in range(300):
        laws = generator.dirichlet([0.5] * VOCAB_SIZE, 5)
        q = [SparseDistribution(tuple(range(VOCAB_SIZE)), tuple(row)) for row in laws[:2]]
        block = TokenTree.chain([int(generator.choice(VOCAB_SIZE, p=row)) for row in laws[:2]], q)
        assert verify(block, laws[2:], seed, 7) == verify_rejection(block, laws[2:], seed, 7)


def emitted(judge, p, q, num_draws):
    """Return the law of the emitted token: a sum over all sequences of draws without repetition."""
    law, ways = np.zeros(len(p)), [((), 1.0)]
    for _ in range(num_draws):
        ways = [
            ((*drawn, token), chance * q[token] / (1.0 - sum(q[each] for each in drawn)))
            for drawn, chance in ways
            for token in range(len(q))
            if token not in drawn
        ]
    for drawn, chance in ways:
        chances, residual = judge(p, Drawn(drawn, tuple(range(len(q))), tuple(q)))
        for token, passing in zip(drawn, chances, strict=True):
            law[token] += chance * min(passing, 1.0)
            chance *= 1.0 - min(passing, 1.0)
        law += chance * residual / residual.sum()
    return law


@pytest.mark.parametrize("num_draws", [1, 2, 3])
def test_the_law_of_recursive_rejection_to_the_last_digit(num_draws):
    generator = np.random.default_rng(num_draws)
    for _ in range(5):
        p, q = generator.dirichlet([0.5] * 4), generator.dirichlet([0.5] * 4)
        assert emitted(judge_recursively, p, q, num_draws) == pytest.approx(p, abs=1e-12)


def in_sequence(p, q, num_draws):
    """Return the law of the emitted token: a sum over all first draws."""
    drawn = [Drawn((token,) * num_draws, tuple(range(len(q))), tuple(q)) for token in range(len(q))]
    judged = [judge_in_sequence(p, each) for each in drawn]
    passing = q * np.array([min(chances[0], 1.0) for chances, _ in judged])
    residual, fails = judged[0][1], 1.0 - passing.sum()
    return passing * sum(fails**trial for trial in range(num_draws)) + fails**num_draws * residual / residual.sum()


@pytest.mark.parametrize("unlikeness", [0.03, 1e-2, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("num_draws", [1, 3, 5, 8])
def test_laws_that_are_nearly_the_same_are_not_taken_for_the_same(num_draws, unlikeness):
    """All of many trials hardly ever fail where laws are alike, and yet each trial decides."""
    q = np.array([0.5, 0.3, 0.2])
    p = q + unlikeness * np.array([-1.0, 0.5, 0.5])
    assert in_sequence(p, q, num_draws) == pytest.approx(p, abs=1e-11)


@pytest.mark.parametrize("num_draws", [1, 2, 4])
def test_the_law_of_sequential_selection_to_the_last_digit(num_draws):
    """P(y) = q(y) a(y) (1 - (1 - beta)^k) / beta + (1 - beta)^k r(y)."""
    generator = np.random.default_rng(num_draws)
    for _ in range(20):
        p, q = generator.dirichlet([0.5] * 6), generator.dirichlet([0.5] * 6)
        chances, residual = judge_in_sequence(p, Drawn((0,) * num_draws, tuple(range(6)), tuple(q)))
        rho = division_factor(p, q, num_draws)
        passing = np.minimum(q, p / rho)
        beta = passing.sum()
        assert chances[0] == pytest.approx(p[0] / (rho * q[0]))
        assert rho * beta == pytest.approx(1.0 - (1.0 - beta) ** num_draws, abs=1e-9), "the paper's equation"
        fails = (1.0 - beta) ** num_draws
        law = passing * (1.0 - fails) / beta + fails * residual / residual.sum()
        assert law == pytest.approx(p, abs=1e-12)
        assert np.maximum(p - rho * q, 0.0) == pytest.approx(residual, abs=1e-9), "which is the residual at rho*"


# Traps


def unlike(num_draws, **changes):
    """Two laws so far apart that a trap shows within few draws."""
    return decoder(constant([0.5, 0.45, 0.05]), constant([0.05, 0.23, 0.72]), fanouts=(num_draws,), **changes)


@WAYS
@pytest.mark.thorough
def test_without_a_trap_the_same_check_passes(verify, with_replacement, monkeypatch):
    for num_draws in (2, 3):
        assert is_exact(unlike(num_draws, with_replacement=with_replacement), monkeypatch, verify, 1)


def without_normalising_q(p, drawn):
    """q without the tokens that were tried, as it is."""
    q, chances = drawn.distribution(len(p)), []
    for token in drawn.tokens:
        chances.append(p[token] / q[token])
        residual = np.maximum(p - q, 0.0)
        p, q[token] = residual / residual.sum(), 0.0
    return chances, p


def without_removing(p, drawn):
    """Each draw as if it came from the whole of q."""
    q, chances = drawn.distribution(len(p)), []
    for token in drawn.tokens:
        chances.append(p[token] / q[token])
        residual = np.maximum(p - q, 0.0)
        p = residual / residual.sum() if residual.any() else p
    return chances, p


def without_updating_p(p, drawn):
    """Each draw against p itself, and the residual of the first."""
    q, chances = drawn.distribution(len(p)), []
    residual = np.maximum(p - q, 0.0)
    for token in drawn.tokens:
        chances.append(p[token] / (q / q.sum())[token])
        q[token] = 0.0
    return chances, residual


def without_rho(p, drawn):
    """Each draw as rejection tries one."""
    q = drawn.distribution(len(p))
    return [p[token] / q[token] for token in drawn.tokens], np.maximum(p - q, 0.0)


def residual_of_rejection(p, drawn):
    """The right trials, and the residual of one."""
    return judge_in_sequence(p, drawn)[0], np.maximum(p - drawn.distribution(len(p)), 0.0)


@pytest.mark.parametrize(
    ("judge", "with_replacement"),
    [
        (without_normalising_q, False),
        (without_removing, False),
        (without_updating_p, False),
        (without_rho, True),
        (residual_of_rejection, True),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_rule_that_forgets_a_step_is_seen(judge, with_replacement, monkeypatch):
    broken = unlike(3 if with_replacement else 2, with_replacement=with_replacement)
    assert not is_exact(broken, monkeypatch, verifying(judge, with_replacement=with_replacement), 1)


def test_siblings_need_noise_of_their_own(monkeypatch):
    """Drawn with the same noise they are one and the same token, tried three times."""
    broken = unlike(3, with_replacement=True, number=lambda place, draw: 4 * place)
    assert not is_exact(broken, monkeypatch, SEQUENTIAL, 1)


def test_draws_are_tried_by_the_rule_by_which_they_were_drawn(monkeypatch):
    assert not is_exact(unlike(2, with_replacement=True), monkeypatch, RECURSIVE, 1)
    assert not is_exact(unlike(2), monkeypatch, SEQUENTIAL, 1)


def test_draws_are_tried_in_the_order_of_drawing(monkeypatch):
    for verify, with_replacement in ((RECURSIVE, False), (SEQUENTIAL, True)):
        law = constant([0.5, 0.3, 0.2])
        ordered = decoder(
            law, law, fanouts=(2,), with_replacement=with_replacement, told=lambda draws: tuple(sorted(draws))
        )
        assert not is_exact(ordered, monkeypatch, verify, 1)


def test_no_draw_is_left_out(monkeypatch):
    """The law of the second is another without the first; and which of several is told must not depend on them."""
    assert not is_exact(unlike(2, told=lambda draws: draws[1:]), monkeypatch, RECURSIVE, 1)
    assert not is_exact(unlike(2, with_replacement=True, told=lambda draws: (max(draws),)), monkeypatch, SEQUENTIAL, 1)


@WAYS
@pytest.mark.thorough
def test_what_was_drawn_at_a_place_is_not_left_out_for_what_it_is(verify, with_replacement, monkeypatch):
    chosen = decoder(q=P, with_replacement=with_replacement, keep_place=lambda last, draws: P[last, draws[0]] > 0.3)
    assert not is_exact(chosen, monkeypatch, verify)


@WAYS
def test_the_residual_needs_noise_of_its_own(verify, with_replacement, monkeypatch):
    def reused(position, row, purpose):
        return position, row, Purpose.DRAFT if purpose is Purpose.RESIDUAL else purpose

    p, q = constant([0.1, 0.6, 0.3]), constant([0.6, 0.4, 0.0])
    assert is_exact(decoder(p, q, fanouts=(1,), with_replacement=with_replacement), monkeypatch, verify)
    broken = decoder(p, q, fanouts=(1,), with_replacement=with_replacement, noise=NoiseTable(NUM_DRAWS, reused))
    assert not is_exact(broken, monkeypatch, verify)


# What cannot be

HALVES = (0.5, 0.5)


@pytest.mark.parametrize("rule", [Verification.RECURSIVE_REJECTION.rule, Verification.SEQUENTIAL_SELECTION.rule])
@pytest.mark.parametrize(
    "law",
    [
        SparseDistribution((0, 1), HALVES, (3, 99)),
        SparseDistribution((0, 1), HALVES, (3, 2)),
        SparseDistribution((0, 99), HALVES, (0, 99)),
        SparseDistribution((0, 3), (0.5, float("nan")), (3, 0)),
    ],
)
def test_draws_that_cannot_be_are_as_none(rule, law):
    log_p = np.log(P[:2])
    assert rule.decide(TokenTree((3,), (ROOT,), (law,)), log_p, 3, 1, 1.0) == rule.decide(
        TokenTree(), log_p[:1], 3, 1, 1.0
    )


def test_a_token_drawn_twice_is_corrupt_where_none_can_be():
    twice = TokenTree((1,), (ROOT,), (SparseDistribution((0, 1), HALVES, (1, 1)),))
    assert verify_recursively(twice, P[:2], 3, 1) == verify_recursively(TokenTree(), P[:1], 3, 1)


@pytest.mark.parametrize("judge", [judge_recursively, judge_in_sequence])
def test_residual_of_equal_laws_is_guarded(judge):
    """p is below q by one rounding at the draw: the largest u fails it, and leaves nothing to draw."""
    p = np.zeros(VOCAB_SIZE)
    p[[2, 5]] = np.nextafter(0.5, 0), 0.5
    chances, residual = judge(p, Drawn((2,), (2, 5), HALVES))
    assert chances[0] > 1.0
    assert residual.sum() > 0.5
