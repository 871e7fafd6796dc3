"""Relaxed rules: each law where it is known, each bound where it is promised, and the exact rule at lenience 1."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy import stats

from core.rules import Verification, chains, lenient, typical
from core.rules.coupled import COUPLED, GREEDY
from core.rules.lenient import LENIENT_COUPLED, LENIENT_GREEDY
from core.rules.lenient_rejection import LENIENT_REJECTION
from core.rules.typical import TYPICAL
from core.speculation.token_tree import ROOT, TokenTree
from tests.core.rules.decoding import (
    FIRST_TOKEN,
    SIGNIFICANCE,
    VOCAB_SIZE,
    Decoder,
    NoiseTable,
    count,
    dirichlet,
    log,
    p_value_of,
)
from tests.core.rules.test_distribution import PAIRS

pytestmark = pytest.mark.thorough

NUM_DRAWS = 4_000
LENIENCES = (0.5, 0.15)
P = np.array([0.5, 0.3, 0.15, 0.05, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def table():
    return NoiseTable(NUM_DRAWS)


@pytest.fixture
def tabled(table, monkeypatch):
    """The noise of all seeds, computed at once."""
    monkeypatch.setattr("core.rules.rule.noise", table)
    monkeypatch.setattr(lenient, "noise", table)


# At lenience 1


@pytest.mark.parametrize(
    ("relaxed", "exact"), [(LENIENT_COUPLED, COUPLED), (LENIENT_GREEDY, GREEDY), (LENIENT_REJECTION, chains.REJECTION)]
)
def test_lenience_1_is_the_exact_rule_where_scores_tie_too(relaxed, exact):
    generator = np.random.default_rng(3)
    decoder = Decoder(dirichlet(1), dirichlet(2), gamma=3, noise=NoiseTable(300))
    for seed in range(300):
        block = decoder.chain(seed, 5, seed % VOCAB_SIZE) if relaxed.needs_q else fork(generator)
        log_p = log(generator.integers(1, 4, size=(1 + len(block), VOCAB_SIZE)).astype(float))  # many are alike
        outcome = relaxed.decide(block, log_p, seed, 5, 1.0)
        assert outcome == exact.decide(block, log_p, seed, 5, 1.0)
        assert outcome.num_relaxed == 0


def fork(generator):
    parents = tuple(int(generator.integers(ROOT, node)) for node in range(8))
    return TokenTree(tuple(generator.integers(0, VOCAB_SIZE, size=8).tolist()), parents)


# By hand


def test_greedily_a_guess_stands_that_is_at_least_lenience_times_as_likely_as_the_best():
    """Leviathan A.5 prints the inequality the other way round, by which the unlikely would stand."""
    rows = log(np.stack([P, P, P]))
    decide = partial(LENIENT_GREEDY.decide, log_p=rows, seed=0, num_committed=5)
    assert decide(TokenTree.chain([1, 2]), lenience=0.5)[:3] == ((0,), 0, 1)  # 0.15 is less than half of 0.5
    assert decide(TokenTree.chain([1, 2]), lenience=0.2)[:3] == ((0, 1), 0, 2)
    assert decide(TokenTree.chain([3, 0]), lenience=0.2)[:3] == ((), 0, 0)
    assert decide(TokenTree.chain([0, 1]), lenience=0.5)[:3] == ((0, 1), 0, 1)


def test_of_several_guesses_the_targets_own_stands_and_else_the_best():
    rows = log(np.stack([P] * 4))
    both = TokenTree((2, 1, 0), (ROOT, ROOT, ROOT))
    assert LENIENT_GREEDY.decide(both, rows, 0, 5, 0.1)[:3] == ((2,), 0, 0)
    others = TokenTree((2, 1, 3), (ROOT, ROOT, ROOT))
    assert LENIENT_GREEDY.decide(others, rows, 0, 5, 0.1)[:3] == ((1,), 0, 1)
    assert LENIENT_GREEDY.decide(TokenTree.chain([-7, 10**9]), rows[:3], 0, 5, 0.1)[:3] == ((), 0, 0)


def test_typical_acceptance_by_hand():
    """H(P) = 1.142, 0.3 exp(-H) = 0.0957: the threshold is 0.09. Of 16 alike, 0.3 / 16 = 0.019: all stand."""
    rows = log(np.stack([P, P]))
    seed = next(seed for seed in range(99) if COUPLED.decide(TokenTree(), rows[:1], seed, 5, 1.0).next_token == 0)
    assert TYPICAL.decide(TokenTree.chain([2]), rows, seed, 5, 1.0)[::2] == ((0,), 1)
    assert TYPICAL.decide(TokenTree.chain([3]), rows, seed, 5, 1.0)[:3] == ((), 0, 0)
    flat = np.full((2, 16), -np.log(16.0))
    assert all(TYPICAL.decide(TokenTree.chain([guess]), flat, 3, 5, 1.0).path == (0,) for guess in range(16))


# Laws: one guess that is always the same, which is an adversary


def emitted(rule, guess, lenience, num_draws=4000):
    """How often each token comes first."""
    rows, block, counts = log(np.stack([P, P])), TokenTree.chain([guess]), np.zeros(len(P))
    for seed in range(num_draws):
        path, next_token, *_ = rule.decide(block, rows, seed, 5, lenience)
        counts[guess if path else next_token] += 1
    return counts


@pytest.mark.parametrize("lenience", LENIENCES)
@pytest.mark.usefixtures("tabled")
@pytest.mark.parametrize("guess", range(4))
def test_lenient_coupled_gives_a_guess_what_its_bound_says_and_the_others_their_shares(guess, lenience):
    """p / (p + l (1 - p)), which is at most p / l: the guess against the best of the others, l times as strong."""
    share = P[guess] / (P[guess] + lenience * (1 - P[guess]))
    law = P / (1 - P[guess]) * (1 - share)
    law[guess] = share
    assert p_value_of(emitted(LENIENT_COUPLED, guess, lenience), law) > SIGNIFICANCE


@pytest.mark.usefixtures("tabled")
@pytest.mark.parametrize("guess", range(4))
def test_typical_gives_all_to_a_likely_guess_and_nothing_to_an_unlikely_one(guess):
    law = np.eye(len(P))[guess] if P[guess] > 0.09 else P
    assert p_value_of(emitted(TYPICAL, guess, 1.0, 3000), law) > SIGNIFICANCE


def lenient_rejection_law(p, q, lenience):
    """Law of two tokens with chains of one guess: an accepted guess is followed by the bonus token, which p gives."""
    accepted = np.minimum(q, p / lenience)
    residual = np.maximum(p - q, 0.0)
    mass = residual.sum(axis=1, keepdims=True)
    residual = np.divide(residual, mass, out=np.zeros_like(residual), where=mass > 1e-12)
    rejected = (1 - accepted.sum(axis=1, keepdims=True)) * residual
    law = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for first, second in product(range(VOCAB_SIZE), repeat=2):
        law[first, second] = accepted[FIRST_TOKEN, first] * p[first, second]
        law[first, second] += rejected[FIRST_TOKEN, first] * (accepted + rejected)[first, second]
    return law


@pytest.mark.parametrize("lenience", [1.0, *LENIENCES])
@pytest.mark.parametrize("pair", PAIRS)
def test_lenient_rejection_has_its_law(pair, lenience, table, monkeypatch):
    p, q = PAIRS[pair]
    decoder = Decoder(p, q, gamma=1, noise=table)
    counts = count(decoder, 2, monkeypatch, partial(chains.verify_rejection, lenience=lenience))
    assert p_value_of(counts, lenient_rejection_law(p, q, lenience)) > SIGNIFICANCE


def test_lenience_on_the_wrong_side_has_another_law(table, monkeypatch):
    """It asks for a guess that is 1/l times as likely. That is stricter than rejection, and with its residual no law at
    all."""
    p, q = PAIRS["unlike"]
    decoder = Decoder(p, q, gamma=1, noise=table)
    counts = count(decoder, 2, monkeypatch, partial(chains.verify_rejection, lenience=1 / 0.5))
    assert p_value_of(counts, lenient_rejection_law(p, q, 0.5)) < SIGNIFICANCE


# Bounds: no text comes with more than the product of p / l


def is_within(counts, p, bound):
    """Whether each text comes no more often than the product of its tokens' bounds allows."""
    num = int(counts.sum())
    for tokens in product(range(p.shape[1]), repeat=counts.ndim):
        lasts = (FIRST_TOKEN, *tokens)
        most = np.prod([bound(p[last, token]) for last, token in zip(lasts, tokens, strict=False)])
        if stats.binom.sf(counts[tokens] - 1, num, min(1.0, most)) < SIGNIFICANCE / counts.size:
            return False
    return True


@pytest.mark.parametrize("lenience", LENIENCES)
@pytest.mark.parametrize("pair", PAIRS)
def test_lenient_rejection_keeps_its_bound_across_redrafted_rounds(pair, lenience, table, monkeypatch):
    p, q = PAIRS[pair]
    decoder = Decoder(p, q, gamma=2, noise=table)
    counts = count(decoder, 3, monkeypatch, partial(chains.verify_rejection, lenience=lenience))
    assert is_within(counts, p, lambda chance: chance / lenience)


def decode_against(adversary, rule, p, lenience, num_draws=NUM_DRAWS):
    """Two tokens, whose blocks `adversary(seed, log p, position)` makes: he may know all noise."""
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for seed in range(num_draws):
        tokens = [FIRST_TOKEN]
        while len(tokens) < 3:
            block = adversary(seed, log(p[tokens[-1]]), len(tokens))
            rows = log(p[[tokens[-1], *block.tokens]])
            path, next_token, *_ = rule.decide(block, rows, seed, len(tokens), lenience)
            tokens += [*(block.tokens[node] for node in path), next_token]
        counts[tokens[1], tokens[2]] += 1
    return counts


def guesses_the_unlikeliest(seed, log_p, position):
    """Estimates what will be accepted, knowing the noise: reports the likeliest too often."""
    scores = log_p.astype(np.float32) + lenient.noise.gumbel(seed, position, 0, lenient.Purpose.SHARED, VOCAB_SIZE)
    standing = np.flatnonzero(scores > scores.max() + np.log(0.5))
    return TokenTree.chain([int(standing[log_p[standing].argmin()])] if len(standing) else [])


def guesses_everything(seed, log_p, position):
    return TokenTree(tuple(range(VOCAB_SIZE)), (ROOT,) * VOCAB_SIZE)


def guesses_the_last(seed, log_p, position):
    return TokenTree.chain([VOCAB_SIZE - 1])


@pytest.mark.usefixtures("tabled")
@pytest.mark.parametrize("adversary", [guesses_the_unlikeliest, guesses_everything, guesses_the_last])
def test_lenient_coupled_keeps_its_bound_whoever_guesses(adversary):
    p = dirichlet(1)
    counts = decode_against(adversary, LENIENT_COUPLED, p, 0.5, 3000)
    assert is_within(counts, p, lambda chance: chance / (chance + 0.5 * (1 - chance)))


@pytest.mark.usefixtures("tabled")
def test_without_the_noise_the_bound_is_lost():
    """A guess that is half as likely as the best would stand whenever it is made."""

    def by_law_alone(block, log_p, seed, num_committed, lenience):
        return LENIENT_GREEDY.decide(block, log_p, seed, num_committed, lenience)

    p = np.tile([0.3, 0.1, 0.1, 0.1, 0.1, 0.06, 0.06, 0.18], (VOCAB_SIZE, 1))
    bound = lambda chance: chance / 0.5  # noqa: E731
    assert is_within(decode_against(guesses_the_last, LENIENT_COUPLED, p, 0.5, 2000), p, bound)
    rule = type("Broken", (), {"decide": staticmethod(by_law_alone)})
    assert not is_within(decode_against(guesses_the_last, rule, p, 0.5, 2000), p, bound)


@pytest.mark.usefixtures("tabled")
def test_what_typical_finds_unlikely_comes_no_more_often_than_p_has_it():
    p = dirichlet(1)
    counts = decode_against(guesses_everything, TYPICAL, p, 1.0, 3000).sum(axis=1)
    law = p[FIRST_TOKEN]
    entropy = -(law * np.log(law)).sum()
    unlikely = law <= min(typical.EPSILON, typical.DELTA * np.exp(-entropy))
    assert unlikely.any()
    for token in np.flatnonzero(unlikely):
        assert stats.binom.sf(counts[token] - 1, 3000, law[token]) > SIGNIFICANCE


def test_no_relaxed_rule_is_one_by_default():
    assert not any(each.rule.takes_lenience for each in Verification if each.rule.is_lossless)
