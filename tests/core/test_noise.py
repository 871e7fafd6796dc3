"""Noise is Philox4x32-10 to the bit, Gumbel and uniform in law, and never the same for two keys."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from core import noise
from core.noise import Purpose

# Random123, tests/kat_vectors, lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""
VECTORS = [[int(word, 16) for word in line.split()] for line in KNOWN_ANSWERS.split("\n") if line]
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("vector", VECTORS)
def test_philox_gives_the_published_answers(vector):
    assert list(noise.philox4x32(tuple(vector[:4]), tuple(vector[4:6]))) == vector[6:]


@pytest.mark.parametrize("vector", VECTORS)
def test_philox_on_wrapping_int64_arrays_gives_the_published_answers(vector):
    words = [np.array([word]) for word in vector[:6]]
    result = noise.philox4x32(tuple(words[:4]), tuple(words[4:]))
    assert [int(word[0]) for word in result] == vector[6:]


def test_key_and_counter_are_laid_out_as_documented():
    seed, position, row, token_id = 0x299F31D0_A4093822, 0x85A308D3, 0x13198A2E, 4 * 0x243F6A88 + 2
    words = noise.words(token_id // 4, seed, position, row, 0x03707344)
    assert words[token_id % 4] == 0x5001E420


@settings(deadline=None)
@given(seed=U64, position=U32, row=st.integers(0, 64), purpose=st.sampled_from(Purpose))
def test_rows_equal_single_draws_whatever_else_is_asked_for(seed, position, row, purpose):
    short = noise.gumbel(seed, position, row, purpose, 5)
    keys = [noise.key(1, 2, 3, Purpose.SHARED), noise.key(seed, position, row, purpose)]
    assert np.array_equal(noise.gumbel_rows(keys, 103)[1, :5], short)


def test_bits_are_those_of_earlier_versions():
    """A seed's draws stay the same for ever."""
    keys = [noise.key(seed, 7, 1, Purpose.SHARED) for seed in (0, 5, 2**64 - 1)]
    assert hashlib.sha256(noise.gumbel_rows(keys, 30_001).tobytes()).hexdigest()[:16] == "e38c3e2888dbb44a"


def test_what_is_handed_in_is_not_changed():
    arguments = [np.arange(5), *(np.array([[value], [value + 1]]) for value in (3, 4, 5, 6))]
    before = [argument.copy() for argument in arguments]
    noise.words(*arguments)
    bits = np.array([1.0, 2.0**31, 2.0**32 - 1])
    noise.gumbel_of(bits, noise._frexp)
    noise.log(bits, noise._frexp)
    assert all(map(np.array_equal, arguments, before))
    assert bits.tolist() == [1.0, 2.0**31, 2.0**32 - 1]


def test_chunks_leave_no_seam(monkeypatch):
    keys = [noise.key(seed, 7, 0, Purpose.SHARED) for seed in range(3)]
    whole = noise.gumbel_rows(keys, 1001)
    monkeypatch.setattr(noise, "_MAX_CHUNK", 64)
    assert np.array_equal(noise.gumbel_rows(keys, 1001), whole)


@settings(deadline=None)
@given(seed=U64, position=U32, row=st.integers(0, 64), purpose=st.sampled_from(Purpose))
def test_every_part_of_the_key_matters(seed, position, row, purpose):
    other = Purpose((purpose + 1) % len(Purpose))
    neighbours = [
        (seed ^ 1, position, row, purpose),
        (seed ^ (1 << 63), position, row, purpose),
        (seed, position ^ 1, row, purpose),
        (seed, position, row + 1, purpose),
        (seed, position, row, other),
    ]
    here = noise.gumbel(seed, position, row, purpose, 8)
    assert all(not np.array_equal(here, noise.gumbel(*key, 8)) for key in neighbours)
    assert all(noise.uniform(seed, position, row, purpose) != noise.uniform(*key) for key in neighbours)


def test_gumbel_noise_follows_the_gumbel_law():
    sample = noise.gumbel_rows([noise.key(seed, 3, 1, Purpose.DRAFT) for seed in range(200)], 1000).ravel()
    assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 1e-6


def test_noise_of_neighbouring_keys_is_uncorrelated():
    rows = noise.gumbel_rows([noise.key(seed, p, 0, Purpose.SHARED) for seed in range(8) for p in range(8)], 20_000)
    correlation = np.corrcoef(rows) - np.eye(64)
    assert np.abs(correlation).max() < 6 / math.sqrt(20_000)


def test_uniform_numbers_follow_the_uniform_law():
    sample = [noise.uniform(seed, 3, 0, Purpose.ACCEPT) for seed in range(50_000)]
    assert stats.kstest(sample, "uniform").pvalue > 1e-6


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_extreme_words_give_finite_noise_inside_the_range(word):
    gumbel = noise.gumbel_of(np.array([float(word)]), noise._frexp)[0]
    assert gumbel == pytest.approx(
        -math.log(-math.log1p(-(2.0**-33))) if word else -math.log(33 * math.log(2)), rel=1e-9
    )
    assert 0 < noise.uniform_of(word, word) < 1


@settings(deadline=None)
@given(x=st.floats(2.0**-40, 64.0))
def test_log_is_right_to_twelve_digits(x):
    assert noise.log(np.array([x]), noise._frexp)[0] == pytest.approx(math.log(x), rel=1e-11, abs=1e-14)
