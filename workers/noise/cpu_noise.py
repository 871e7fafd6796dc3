"""Gumbel noise by compiled loops on a CPU: the bits of `core.noise.gumbel_rows` in a tenth of the time.

numpy makes an array of each of some eighty intermediate results; here they stay in registers. Operations and their
order are those of `core.noise`. By default, Numba neither reorders them nor fuses a product with a sum. If only the
largest score is wanted, most of the noise is not computed (adr/noise).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.noise import Key
from workers.native.compiler import compiled

_CHUNK = 512
"""Number of Philox blocks, of four numbers each, that are computed at once: they fit into the L1 cache."""
_NUM_AT_ONCE = 4 * _CHUNK
_GROUP = 128
"""Size of a group of scores. Only groups that may have the largest score are searched: some ten groups of a row."""

_WORD_BITS = np.uint64(32)
_MASK = np.uint64(0xFFFFFFFF)

# A float64 is a sign, 11 bits of exponent and 52 of mantissa. Below the exponent of 2^52 the mantissa is an integer.
_MANTISSA_BITS = np.uint64(52)
_MANTISSA = np.uint64((1 << 52) - 1)
_EXPONENT_OF_HALF = np.uint64(0x3FE << 52)
_EXPONENT_OF_2_52 = np.uint64(0x433 << 52)
_2_52 = 2.0**52
_BIAS = _2_52 + 0x3FE

# Copies of constants in `core.noise`. Numba recompiles only when the text of this file changes, so it would not notice
# a change of imported constants.
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP_0, _STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_NUM_ROUNDS = 10
_SQRT_HALF = math.sqrt(0.5)
_LN_2 = math.log(2.0)
_S1, _S2, _S3, _S4, _S5, _S6 = 1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11, 1 / 13

# An upper bound of the noise without a logarithm. The noise -log(-log(u)) is at most -log(1 - u), because -log(u) is at
# least 1 - u. And log2(x) is at least the exponent of x plus its mantissa in [1, 2) minus 1. That sum is the bits of x,
# read as an integer, over 2^52, minus 1,023. So with x = 2^32 (1 - u) the noise is at most
# `_BOUND - _BOUND_SLOPE * bits`.
_2_32 = 2.0**32
_BOUND = _LN_2 * (32 + 1023)
_BOUND_SLOPE = _LN_2 * 2.0**-52
_SLACK, _RELATIVE_SLACK = 1e-4, 1e-6
"""More than the error of rounding the noise, and its sum with a score, to float32."""


@compiled("void(uint64[::1], uint64, uint64, uint64, uint64, uint64)")
def _fill_words(
    words: NDArray[np.uint64],
    first: np.uint64,
    seed: np.uint64,
    position: np.uint64,
    row: np.uint64,
    purpose: np.uint64,
) -> None:
    """`core.noise.words` of each block from `first` on, each word as the bits of the float64 2^52 + word.

    All first words come first, then all second words, and so on.
    """
    words_0, words_1 = words[:_CHUNK], words[_CHUNK : 2 * _CHUNK]
    words_2, words_3 = words[2 * _CHUNK : 3 * _CHUNK], words[3 * _CHUNK :]
    for block in range(_CHUNK):
        c0, c1, c2, c3 = np.uint64(first + np.uint64(block)), position, row, purpose
        k0, k1 = seed & _MASK, seed >> _WORD_BITS
        for _ in range(_NUM_ROUNDS):
            product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
            c0 = ((product_1 >> _WORD_BITS) ^ c1 ^ k0) & _MASK
            c2 = ((product_0 >> _WORD_BITS) ^ c3 ^ k1) & _MASK
            c1, c3 = product_1 & _MASK, product_0 & _MASK
            k0, k1 = (k0 + _STEP_0) & _MASK, (k1 + _STEP_1) & _MASK
        words_0[block], words_1[block] = c0 | _EXPONENT_OF_2_52, c1 | _EXPONENT_OF_2_52
        words_2[block], words_3[block] = c2 | _EXPONENT_OF_2_52, c3 | _EXPONENT_OF_2_52


@compiled("void(uint64[::1], uint64[::1])")
def _negate_logs(numbers: NDArray[np.uint64], exponents: NDArray[np.uint64]) -> None:
    """Replace positive float64 numbers x, given as bits, by -log(x); as `core.noise.log`."""
    for place in range(_NUM_AT_ONCE):
        bits = numbers[place]
        exponents[place] = (bits >> _MANTISSA_BITS) | _EXPONENT_OF_2_52
        numbers[place] = (bits & _MANTISSA) | _EXPONENT_OF_HALF
    x, exponent_of = numbers.view(np.float64), exponents.view(np.float64)
    for place in range(_NUM_AT_ONCE):
        mantissa = x[place]
        is_low = 1.0 if mantissa < _SQRT_HALF else 0.0
        exponent = exponent_of[place] - _BIAS - is_low
        mantissa *= is_low + 1.0
        s = (mantissa - 1.0) / (mantissa + 1.0)
        z = s * s
        series = ((((z * _S6 + _S5) * z + _S4) * z + _S3) * z + _S2) * z + _S1
        x[place] = -(s * (series * z + 1.0) * 2.0 + exponent * _LN_2)


@compiled("void(uint64[:, ::1], float32[:, ::1])")
def _fill(keys: NDArray[np.uint64], noise: NDArray[np.float32]) -> None:
    numbers, exponents = np.empty(_NUM_AT_ONCE, np.uint64), np.empty(_NUM_AT_ONCE, np.uint64)
    x = numbers.view(np.float64)
    width = noise.shape[1]
    for number in range(len(keys)):
        seed, position, row, purpose = keys[number]
        for start in range(0, width, _NUM_AT_ONCE):
            _fill_words(numbers, np.uint64(start // 4), seed, position, row, purpose)
            for place in range(_NUM_AT_ONCE):
                x[place] = (x[place] - _2_52 + 0.5) * 2.0**-32
            _negate_logs(numbers, exponents)
            _negate_logs(numbers, exponents)
            for place in range(min(_NUM_AT_ONCE, width - start)):
                noise[number, start + place] = x[(place % 4) * _CHUNK + place // 4]


@compiled("float64(float64)")
def _negative_log(x: float) -> float:
    """`_negate_logs` for one number."""
    mantissa, exponent = math.frexp(x)
    is_low = 1.0 if mantissa < _SQRT_HALF else 0.0
    mantissa *= is_low + 1.0
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = ((((z * _S6 + _S5) * z + _S4) * z + _S3) * z + _S2) * z + _S1
    return -(s * (series * z + 1.0) * 2.0 + (exponent - is_low) * _LN_2)


@compiled("boolean(float32[::1], uint64[::1], int64, int64, float64)")
def _is_near(scores: NDArray[np.float32], bits: NDArray[np.uint64], first: int, end: int, least: float) -> bool:
    """Whether a score of these blocks may reach `least` with its noise; `_best` repeats the test score by score."""
    bits_0, bits_1 = bits[:_CHUNK], bits[_CHUNK : 2 * _CHUNK]
    bits_2, bits_3 = bits[2 * _CHUNK : 3 * _CHUNK], bits[3 * _CHUNK :]
    is_near = False
    for block in range(first, end):
        is_near |= scores[4 * block] + (_BOUND - _BOUND_SLOPE * bits_0[block]) >= least
        is_near |= scores[4 * block + 1] + (_BOUND - _BOUND_SLOPE * bits_1[block]) >= least
        is_near |= scores[4 * block + 2] + (_BOUND - _BOUND_SLOPE * bits_2[block]) >= least
        is_near |= scores[4 * block + 3] + (_BOUND - _BOUND_SLOPE * bits_3[block]) >= least
    return is_near


@compiled("Tuple((float32, int64))(float32[::1], uint64[::1], float32, int64, int64)")
def _best(
    scores: NDArray[np.float32], bits: NDArray[np.uint64], best: np.float32, best_id: int, first_id: int
) -> tuple[np.float32, int]:
    """The largest of `best` and these scores with their noise, and its id. `bits`: those of 2^32 (1 - u)."""
    complements = bits.view(np.float64)
    least = best - _SLACK - _RELATIVE_SLACK * abs(best)
    for first in range(0, len(scores), _GROUP):
        end = min(first + _GROUP, len(scores))
        if end - first == _GROUP and not _is_near(scores, bits, first // 4, end // 4, least):
            continue
        for index in range(first, end):
            place = (index % 4) * _CHUNK + index // 4
            if scores[index] + (_BOUND - _BOUND_SLOPE * bits[place]) < least:
                continue
            uniform = (_2_32 - complements[place]) * 2.0**-32
            score = scores[index] + np.float32(_negative_log(_negative_log(uniform)))
            if score > best:
                best, best_id = score, first_id + index
                least = best - _SLACK - _RELATIVE_SLACK * abs(best)
    return best, best_id


@compiled("void(uint64[:, ::1], float32[:, ::1], int64[::1])")
def _draw(keys: NDArray[np.uint64], scores: NDArray[np.float32], ids: NDArray[np.int64]) -> None:
    bits = np.empty(_NUM_AT_ONCE, np.uint64)
    complements = bits.view(np.float64)
    width = scores.shape[1]
    for number in range(len(keys)):
        seed, position, row, purpose = keys[number]
        best, best_id = np.float32(-np.inf), 0
        for start in range(0, width, _NUM_AT_ONCE):
            _fill_words(bits, np.uint64(start // 4), seed, position, row, purpose)
            for place in range(_NUM_AT_ONCE):
                complements[place] = _2_52 + _2_32 - complements[place] - 0.5
            best, best_id = _best(scores[number, start : start + _NUM_AT_ONCE], bits, best, best_id, start)
        ids[number] = best_id


def gumbel_rows(keys: Sequence[Key], vocab_size: int) -> NDArray[np.float32]:
    """Gumbel noise [R, vocab_size], one row for each key. Releases the interpreter lock."""
    noise = np.empty((len(keys), vocab_size), dtype=np.float32)
    _fill(_as_words(keys), noise)
    return noise


def largest_with_gumbel(scores: NDArray[np.float32], keys: Sequence[Key]) -> list[int]:
    """Id of the largest of `scores` [R, V] plus the noise of each key's row; the lowest id wins a tie.

    Any id for a row with NaN. Releases the interpreter lock.
    """
    ids = np.empty(len(keys), dtype=np.int64)
    _draw(_as_words(keys), np.ascontiguousarray(scores), ids)
    return ids.tolist()


def _as_words(keys: Sequence[Key]) -> NDArray[np.uint64]:
    return np.array(keys, dtype=np.int64).reshape(-1, 4).view(np.uint64)
