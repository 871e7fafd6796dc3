"""Noise by compiled loops has the bits of the reference."""

import importlib

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core import noise
from core.noise import Purpose
from workers.noise import cpu_noise

KEYS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.sampled_from(Purpose))
AT_ONCE = cpu_noise._NUM_AT_ONCE


@settings(deadline=None)
@given(
    keys=st.lists(KEYS, min_size=1, max_size=3),
    vocab_size=st.sampled_from((1, 3, 4, 5, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 2)),
)
def test_compiled_loops_give_the_bits_of_the_reference(keys, vocab_size):
    keys = [noise.key(*key) for key in keys]
    found = cpu_noise.gumbel_rows(keys, vocab_size)
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.int32), noise.gumbel_rows(keys, vocab_size).view(np.int32))


def extreme_words():
    """Random ones, and those at the ends and in the middle."""
    words = np.random.default_rng(0).integers(0, 2**32, AT_ONCE)
    words[:6] = (0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
    return words


def test_logarithms_are_rounded_as_those_of_the_reference():
    """Compared in float64: float32 hides nearly every product that is fused with a sum."""
    words = extreme_words()
    numbers = (words + 0.5) * 2.0**-32
    bits, exponents = numbers.view(np.uint64), np.empty(AT_ONCE, np.uint64)
    cpu_noise._negate_logs(bits, exponents)
    cpu_noise._negate_logs(bits, exponents)
    assert np.array_equal(numbers, noise.gumbel_of(words.astype(np.float64), noise._frexp))


def test_the_largest_score_with_noise_is_found_without_most_of_the_noise():
    """Also where many tokens may win, or two are alike, or all but a few are impossible."""
    random = np.random.default_rng(0)
    for size in (1, 3, 4, 130, AT_ONCE - 1, AT_ONCE, AT_ONCE + 129, 3 * AT_ONCE + 2):
        for scale in (0.0, 0.5, 5.0, 1e30):
            keys = [noise.key(int(seed), 7, 0, Purpose.SHARED) for seed in random.integers(0, 2**63, 24)]
            scores = (scale * random.standard_normal((len(keys), size))).astype(np.float32)
            scores[random.random(scores.shape) < 0.3] = -np.inf
            expected = (scores + noise.gumbel_rows(keys, size)).argmax(axis=1)
            assert cpu_noise.largest_with_gumbel(scores, keys) == expected.tolist(), (size, scale)


def test_of_several_scores_that_are_alike_with_their_noise_the_first_counts():
    """Wherever in a group they are. Sums are rounded to float32, in which these scores swallow the noise."""
    keys = [noise.key(seed, 7, 0, Purpose.SHARED) for seed in range(3)]
    scores = np.full((3, 3 * AT_ONCE), -np.inf, np.float32)
    firsts = [5, 700, 2 * AT_ONCE + 2]
    for row, first in enumerate(firsts):
        scores[row, first:] = 1e9
    assert cpu_noise.largest_with_gumbel(scores, keys) == firsts


def test_scores_that_do_not_adjoin_are_read_as_they_are():
    keys = [noise.key(seed, 7, 0, Purpose.SHARED) for seed in range(5)]
    scores = np.random.default_rng(0).standard_normal((300, 5)).astype(np.float32).T
    expected = (scores + noise.gumbel_rows(keys, 300)).argmax(axis=1)
    assert cpu_noise.largest_with_gumbel(scores, keys) == expected.tolist()


def test_noise_is_never_above_its_bound_and_seldom_far_below():
    words = extreme_words()
    bits = (2.0**32 - words - 0.5).view(np.uint64)
    above = cpu_noise._BOUND - cpu_noise._BOUND_SLOPE * bits - noise.gumbel_of(words.astype(np.float64), noise._frexp)
    assert above.min() >= 0.0
    assert above[words >= 2**31].max() < 0.33


def test_the_logarithm_of_one_number_is_rounded_as_that_of_many():
    words = extreme_words()
    expected = noise.gumbel_of(words.astype(np.float64), noise._frexp)
    uniforms = (words + 0.5) * 2.0**-32
    assert [cpu_noise._negative_log(cpu_noise._negative_log(uniform)) for uniform in uniforms] == expected.tolist()


def test_the_constants_are_those_of_the_reference():
    """Another square root of a half would show in hardly any number."""
    assert (cpu_noise._MULTIPLIER_0, cpu_noise._MULTIPLIER_1) == noise.MULTIPLIERS
    assert (cpu_noise._STEP_0, cpu_noise._STEP_1) == noise.KEY_STEPS
    assert (cpu_noise._NUM_ROUNDS, cpu_noise._SQRT_HALF, cpu_noise._LN_2) == (
        noise.NUM_ROUNDS,
        noise.SQRT_HALF,
        noise.LN_2,
    )
    assert tuple(getattr(cpu_noise, f"_S{k}") for k in range(1, 7)) == noise.ATANH_SERIES[1:]


def test_what_is_compiled_takes_no_constant_from_another_file(monkeypatch):
    """Or what Numba has kept would be run with the constants of then."""
    for name in ("MULTIPLIERS", "KEY_STEPS", "NUM_ROUNDS", "SQRT_HALF", "LN_2", "ATANH_SERIES"):
        monkeypatch.delattr(noise, name)
    importlib.reload(cpu_noise)


def double(numbers):
    for place in range(len(numbers)):
        numbers[place] *= 2.0


def assert_doubles(compiled):
    numbers = np.array([1.0, 2.5])
    compiled(numbers)
    assert numbers.tolist() == [2.0, 5.0]


def test_what_no_cache_can_keep_is_compiled_all_the_same(monkeypatch):
    njit = numba.njit

    def fake_njit(*given, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*given, **options)

    monkeypatch.setattr(numba, "njit", fake_njit)
    assert_doubles(cpu_noise.compiled("void(float64[::1])")(double))


def test_files_of_the_cache_that_were_cut_short_stop_no_engine(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    cpu_noise.compiled("void(float64[::1])")(double)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 2
    for file in files:
        file.write_bytes(b"")
    assert_doubles(cpu_noise.compiled("void(float64[::1])")(double))
