"""Noise as a pure function of (seed, position, row, purpose, token id), equal bit for bit on every machine.

Knows Philox4x32-10 (Salmon et al. 2011) and the Gumbel distribution; must not know models, p or q. Functions of `Word`
and `Real` use only operators that Python numbers, numpy arrays and torch tensors share, so `workers.noise.gumbel` runs
the same code on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Word: TypeAlias = Any
"""A 32-bit word held in 64 bits: int, numpy int64 array or torch int64 tensor."""
Real: TypeAlias = Any
"""numpy float64 array or torch float64 tensor."""
Frexp: TypeAlias = Callable[[Real], tuple[Real, Real]]
"""x -> (mantissa in [1/2, 1), exponent), both float64 and newly allocated."""
Key: TypeAlias = tuple[int, int, int, int]
"""(seed as int64, position, row, purpose)."""

_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10

SQRT_HALF = math.sqrt(0.5)
LN_2 = math.log(2.0)
ATANH_SERIES = tuple(1.0 / (2 * k + 1) for k in range(7))
_MAX_CHUNK = 1 << 13
"""Numbers computed at once: several arrays of this size fit into the cache and into memory that the heap already has.
Chunks eight times as large take twice the time, because the kernel has to provide new pages for each array."""


ROWS_APART = 1 << 16
"""Distance between the rows of two draws at one depth. Larger than the depth of any block."""


def row_of(depth: int, number: int = 0) -> int:
    """Row of the noise of draw `number` at this depth below the root of a block. A chain has one draw at each depth.

    Two blocks with different roots never use the same row at the same position.
    """
    return depth + ROWS_APART * number


class Purpose(IntEnum):
    """Use of a random number. Numbers for different purposes are independent (docs/exactness.md, section 3)."""

    SHARED = 0
    """Coupled mode, draft and target."""
    DRAFT = 1
    """The draft's guesses, in rejection and block mode."""
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    GUESS = 5
    """A guesser's own guesses, where the draft has sent none."""


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """The four words of Philox4x32-10. Source: Salmon et al. 2011, section 3.3.

    A product of two words may wrap to a negative int64; masking after the shift recovers its high half. Arrays
    allocated here are changed in place, because a new array costs more than the arithmetic on it.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (product1 >> 32) ^ c1 ^ k0, (product0 >> 32) ^ c3 ^ k1
        c0 &= _MASK
        c2 &= _MASK
        product1 &= _MASK
        product0 &= _MASK
        c1, c3 = product1, product0
        k0, k1 = (k0 + KEY_STEPS[0]) & _MASK, (k1 + KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def words(blocks: Word, seeds: Word, positions: Word, rows: Word, purposes: Word) -> tuple[Word, Word, Word, Word]:
    """The noise words of blocks of four token ids: block b holds ids 4b to 4b + 3. Arguments broadcast."""
    return philox4x32((blocks, positions, rows, purposes), (seeds & _MASK, (seeds >> 32) & _MASK))


def log(x: Real, frexp: Frexp) -> Real:
    """Natural logarithm to 1e-12, by correctly rounded operations only: log functions of libraries differ in the last
    bit.

    log(m 2^e) = e log 2 + 2 atanh(s), s = (m - 1) / (m + 1), with m in [sqrt(1/2), sqrt(2)).
    """
    mantissa, exponent = frexp(x)
    is_low = (mantissa < SQRT_HALF) * 1.0
    exponent -= is_low
    is_low += 1.0
    mantissa *= is_low
    s = mantissa - 1.0
    mantissa += 1.0
    s /= mantissa
    z = s * s
    series = z * ATANH_SERIES[-1]
    series += ATANH_SERIES[-2]
    for coefficient in ATANH_SERIES[-3::-1]:
        series *= z
        series += coefficient
    s *= series
    s *= 2.0
    exponent *= LN_2
    s += exponent
    return s


def gumbel_of(bits: Real, frexp: Frexp) -> Real:
    """-log(-log(u)), in [-3.14, 22.88], for u = (bits + 1/2) / 2^32; float64 holds 1 - u exactly."""
    uniforms = bits + 0.5
    uniforms *= 2.0**-32
    logs = log(uniforms, frexp)
    logs *= -1.0
    logs = log(logs, frexp)
    logs *= -1.0
    return logs


def _frexp(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    mantissa, exponent = np.frexp(x)
    return mantissa, exponent.astype(np.float64)


def key(seed: int, position: int, row: int, purpose: Purpose) -> Key:
    """The key of a row of noise, with the seed as the int64 of the same bits."""
    return seed - (1 << 64) if seed >> 63 else seed, position, row, int(purpose)


def gumbel_rows(keys: Sequence[Key] | NDArray[np.int64], vocab_size: int) -> NDArray[np.float32]:
    """Gumbel noise [R, vocab_size], one row for each key."""
    columns = [column[:, None] for column in np.asarray(keys, dtype=np.int64).reshape(-1, 4).T]
    num_rows, num_blocks = len(columns[0]), -(-vocab_size // 4)
    noise = np.empty((num_rows, 4 * num_blocks), dtype=np.float32)
    chunk = max(1, _MAX_CHUNK // (4 * max(1, num_rows)))
    for start in range(0, num_blocks, chunk):
        blocks = np.arange(start, min(start + chunk, num_blocks))
        bits = np.empty((num_rows, len(blocks), 4))
        for index, word in enumerate(words(blocks, *columns)):
            bits[:, :, index] = word
        noise[:, 4 * start : 4 * (start + len(blocks))] = gumbel_of(bits, _frexp).reshape(num_rows, -1)
    return noise[:, :vocab_size]


def gumbel(seed: int, position: int, row: int, purpose: Purpose, vocab_size: int) -> NDArray[np.float32]:
    """Gumbel noise [vocab_size] of one row."""
    noise: NDArray[np.float32] = gumbel_rows([key(seed, position, row, purpose)], vocab_size)[0]
    return noise


def uniform_of(high: Word, low: Word) -> Real:
    """(n + 1/2) / 2^52 for the 52 upper bits n of two words. Exact in float64, so never 0 or 1."""
    return (((high << 20) | (low >> 12)) + 0.5) * 2.0**-52


def uniform(seed: int, position: int, row: int, purpose: Purpose) -> float:
    """A number in the open interval (0, 1)."""
    high, low, _, _ = words(0, seed, position, row, int(purpose))
    return float(uniform_of(high, low))
