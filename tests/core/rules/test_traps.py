"""Ways to bias speculation that real systems fell into: put back, each fails the check that the real code passes.

docs/exactness.md, section 4, tells each story.
"""

import numpy as np
import pytest

from core.noise import Purpose
from core.rules import chains as acceptance
from core.rules.chains import verify_block, verify_rejection
from core.speculation.token_tree import SparseDistribution, TokenTree
from tests.core.rules.decoding import SIGNIFICANCE, VOCAB_SIZE, Decoder, NoiseTable, count, dirichlet, p_value

pytestmark = pytest.mark.thorough

NUM_DRAWS = 4_000
P, Q = dirichlet(1), dirichlet(2)


def constant(law):
    """The Markov chain that ignores its context."""
    return np.tile([*law, *[0] * (VOCAB_SIZE - len(law))], (VOCAB_SIZE, 1))


THIRDS, THIRDS_SWAPPED = constant([1 / 3, 2 / 3]), constant([2 / 3, 1 / 3])
"""The motivating example of Sun et al. 2024: after a rejection, much is known of the guesses that were looked at."""


def decoder(p=P, q=Q, gamma=2, **changes):
    return Decoder(p, q, gamma, changes.pop("noise", NoiseTable(NUM_DRAWS)), **changes)


def is_exact(decoder, monkeypatch, verify, num_tokens=2):
    return p_value(count(decoder, num_tokens, monkeypatch, verify), decoder.p) > SIGNIFICANCE


def residual_reuses_draft_noise(position, row, purpose):
    return position, row, Purpose.DRAFT if purpose is Purpose.RESIDUAL else purpose


def row_is_left_out(position, row, purpose):
    return position, 0, purpose


@pytest.mark.thorough
@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_residual_needs_noise_of_its_own(verify, monkeypatch):
    """Token 1 has lost to the rejected token 0 with this noise, so that it would lose the residual, too."""
    p, q = constant([0.1, 0.6, 0.3]), constant([0.6, 0.4, 0.0])
    assert is_exact(decoder(p, q), monkeypatch, verify)
    broken = decoder(p, q, noise=NoiseTable(NUM_DRAWS, residual_reuses_draft_noise))
    assert not is_exact(broken, monkeypatch, verify)


@pytest.mark.thorough
def test_block_verification_needs_the_row_in_the_key(monkeypatch):
    assert is_exact(decoder(THIRDS, THIRDS_SWAPPED), monkeypatch, verify_block)
    broken = decoder(THIRDS, THIRDS_SWAPPED, noise=NoiseTable(NUM_DRAWS, row_is_left_out))
    assert not is_exact(broken, monkeypatch, verify_block)


@pytest.mark.thorough
def test_rejection_never_looks_at_rows_it_redrafts(monkeypatch):
    """So that the row in its key is a precaution; it shows that the test above fails for the stated reason."""
    rowless = decoder(THIRDS, THIRDS_SWAPPED, noise=NoiseTable(NUM_DRAWS, row_is_left_out))
    assert is_exact(rowless, monkeypatch, verify_rejection)


@pytest.mark.thorough
@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_dropping_a_guess_may_look_at_q_but_not_at_the_guess(verify, monkeypatch):
    def is_sure_of_row(last, token):
        return P[last].max() > 0.5

    def is_sure_of_token(last, token):
        return P[last, token] > 0.3

    assert is_exact(decoder(q=P, keep=is_sure_of_row), monkeypatch, verify)
    assert not is_exact(decoder(q=P, keep=is_sure_of_token), monkeypatch, verify)


@pytest.mark.thorough
@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_dropping_a_guess_may_not_look_at_the_q_that_follows_it(verify, monkeypatch):
    """The draft's next law depends on the guess: a rule that looks ahead looks at the guess."""

    def is_sure_of_next_row(last, token):
        return P[token].max() > 0.5

    assert not is_exact(decoder(q=P, keep=is_sure_of_next_row), monkeypatch, verify)


@pytest.mark.thorough
def test_coupled_output_survives_any_rule_of_dropping(monkeypatch):
    drop_all = decoder(keep=lambda last, token: False)
    drop_some = decoder(keep=lambda last, token: token % 2 == 0, noise=drop_all.noise)
    drop_none = decoder(noise=drop_all.noise)
    for seed in range(1000):
        plain = drop_all.decode(seed, 6)
        assert drop_some.decode(seed, 6) == plain
        assert drop_none.decode(seed, 6) == plain


@pytest.mark.thorough
@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_q_is_what_was_sampled_from_and_not_recomputed(verify, monkeypatch):
    recomputed = 0.8 * Q + 0.2 / VOCAB_SIZE
    assert is_exact(decoder(), monkeypatch, verify)
    assert not is_exact(decoder(sent_q=recomputed), monkeypatch, verify)


@pytest.mark.thorough
@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_bonus_token_comes_from_the_row_after_the_last_guess(verify, monkeypatch):
    def bonus_from_the_last_guess_row(block, p, seed, num_committed):
        return verify(block, np.concatenate([p[:-1], p[-2:-1]]) if len(block) else p, seed, num_committed)

    assert is_exact(decoder(gamma=1), monkeypatch, verify)
    assert not is_exact(decoder(gamma=1), monkeypatch, bonus_from_the_last_guess_row)


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
def test_residual_of_equal_laws_is_guarded(verify, monkeypatch):
    """p is below q by one rounding at the guess, equal elsewhere: the largest u rejects, and leaves nothing to draw."""
    q = np.zeros(VOCAB_SIZE)
    q[[2, 5]] = 0.5
    p = np.stack([q, q])
    p[0, 2] = np.nextafter(0.5, 0)
    block = TokenTree.chain([2], [SparseDistribution((2, 5), (0.5, 0.5))])
    monkeypatch.setattr(acceptance.noise, "uniform", lambda *key: 1 - 2**-53)
    _, token, *_ = verify(block, p, seed=0, num_committed=1)
    assert p[0, token] > 0
    monkeypatch.setattr(acceptance, "NEGLIGIBLE_MASS", -1.0)
    path, token, *_ = verify(block, p, seed=0, num_committed=1)
    assert p[len(path), token] == 0  # what no target would say


@pytest.mark.parametrize("verify", [verify_rejection, verify_block])
@pytest.mark.parametrize(("token", "law"), [(99, (0, 1)), (3, (0, 1)), (99, (0, 99))])
def test_corrupt_guesses_are_cut_before_they_index_or_divide(verify, token, law, monkeypatch):
    block = TokenTree.chain([token], [SparseDistribution(law, (0.5, 0.5))])
    assert verify(block, P[:2], 3, 1) == verify(TokenTree(), P[:1], 3, 1)
    monkeypatch.setattr(acceptance, "valid_prefix", lambda block, vocab_size: block)
    with pytest.raises((IndexError, ValueError)):
        verify(block, P[:2], 3, 1)
