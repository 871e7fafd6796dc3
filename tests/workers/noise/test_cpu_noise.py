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


def test_logarithms_are_rounded_as_those_of_the_reference():
    """Compared in float64: float32 hides nearly every product that is fused with a sum."""
    words = np.random.default_rng(0).integers(0, 2**32, AT_ONCE)
    words[:6] = (0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
    numbers = (words + 0.5) * 2.0**-32
    bits, exponents = numbers.view(np.uint64), np.empty(AT_ONCE, np.uint64)
    cpu_noise._negate_logs(bits, exponents)
    cpu_noise._negate_logs(bits, exponents)
    assert np.array_equal(numbers, noise.gumbel_of(words.astype(np.float64), noise._frexp))


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
    assert_doubles(cpu_noise._compiled("void(float64[::1])")(double))


def test_files_of_the_cache_that_were_cut_short_stop_no_engine(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    cpu_noise._compiled("void(float64[::1])")(double)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 2
    for file in files:
        file.write_bytes(b"")
    assert_doubles(cpu_noise._compiled("void(float64[::1])")(double))
