"""Operations on the numbers of a row, in float32, as loops that LLVM makes vectors of.

Knows numbers; must not know programs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workers.native.compiler import compiled
from workers.native.intrinsics import bits_of, float_of

COPY, ADD, SUB, MUL, DIV, RSQRT, SUM, SILU, GELU, GELU_TANH, TANH, SIGMOID, RELU, SQRT, EXP, LOOKUP = range(16)
"""Operations on rows."""
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_E0, _E1, _E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_E3, _E4, _E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ROUNDER, _LEAST, _MOST = np.float32(12582912.0), np.float32(-87.3), np.float32(88.3)
_ONE, _TWO, _HALF = np.float32(1), np.float32(2), np.float32(0.5)
_GELU_SCALE, _GELU_CUBE, _ROOT_HALF = (
    np.float32(math.sqrt(2 / math.pi)),
    np.float32(0.044715),
    np.float32(math.sqrt(0.5)),
)
_P = np.float32(0.3275911)
_A1, _A2, _A3 = np.float32(0.254829592), np.float32(-0.284496736), np.float32(1.421413741)
_A4, _A5 = np.float32(-1.453152027), np.float32(1.061405429)


@compiled("float32(float32)")
def rounded(number: Any) -> Any:
    """To the nearest bfloat16 number."""
    bits = bits_of(number)
    return float_of((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000))


@compiled("uint16(float32)")
def short_of(number: Any) -> Any:
    """The bits of a number that is a bfloat16 number, or is rounded to one."""
    return np.uint16(bits_of(rounded(number)) >> np.uint32(16))


@compiled("float32(uint16)")
def wide(short: Any) -> Any:
    return float_of(np.uint32(short) << np.uint32(16))


@compiled("float32(float32)")
def exp(x: Any) -> Any:
    """Cephes' expf, which a compiler can compute for sixteen numbers at once."""
    x = min(max(x, _LEAST), _MOST)
    whole = x * _LOG2_E + _ROUNDER - _ROUNDER
    x = x - whole * _LN_2_HIGH - whole * _LN_2_LOW
    series = ((((_E0 * x + _E1) * x + _E2) * x + _E3) * x + _E4) * x + _E5
    power = float_of(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))
    return (series * x * x + x + _ONE) * power


@compiled("float32(float32)")
def tanh(x: Any) -> Any:
    return _ONE - _TWO / (exp(_TWO * x) + _ONE)


@compiled("float32(float32)")
def erf(x: Any) -> Any:
    """Abramowitz and Stegun 7.1.26; the error is below 1.5e-7."""
    size = abs(x)
    t = _ONE / (_ONE + _P * size)
    tail = ((((_A5 * t + _A4) * t + _A3) * t + _A2) * t + _A1) * t * exp(-size * size)
    return math.copysign(_ONE - tail, x)


@compiled("void(int64, float32[::1], float32[::1])")
def one_operand(op: int, out: Any, x: Any) -> None:
    count = len(out)
    if op == COPY:
        for i in range(count):
            out[i] = x[i]
    elif op == SILU:
        for i in range(count):
            out[i] = x[i] / (_ONE + exp(-x[i]))
    elif op == GELU:
        for i in range(count):
            out[i] = _HALF * x[i] * (_ONE + erf(x[i] * _ROOT_HALF))
    elif op == GELU_TANH:
        for i in range(count):
            out[i] = _HALF * x[i] * (_ONE + tanh(_GELU_SCALE * (x[i] + _GELU_CUBE * x[i] * x[i] * x[i])))
    elif op == TANH:
        for i in range(count):
            out[i] = tanh(x[i])
    elif op == SIGMOID:
        for i in range(count):
            out[i] = _ONE / (_ONE + exp(-x[i]))
    elif op == RELU:
        for i in range(count):
            out[i] = max(x[i], np.float32(0))
    elif op == RSQRT:
        for i in range(count):
            out[i] = _ONE / np.float32(math.sqrt(x[i]))
    elif op == SQRT:
        for i in range(count):
            out[i] = np.float32(math.sqrt(x[i]))
    elif op == EXP:
        for i in range(count):
            out[i] = exp(x[i])


@compiled("void(int64, float32[::1], float32[::1], float32[::1])")
def two_operands(op: int, out: Any, x: Any, y: Any) -> None:
    count = len(out)
    if op == ADD:
        for i in range(count):
            out[i] = x[i] + y[i]
    elif op == SUB:
        for i in range(count):
            out[i] = x[i] - y[i]
    elif op == MUL:
        for i in range(count):
            out[i] = x[i] * y[i]
    else:
        for i in range(count):
            out[i] = x[i] / y[i]


@compiled("void(int64, float32[::1], float32[::1], float32)")
def with_one(op: int, out: Any, x: Any, y: Any) -> None:
    """`two_operands` where the second is a single number."""
    count = len(out)
    if op == ADD:
        for i in range(count):
            out[i] = x[i] + y
    elif op == SUB:
        for i in range(count):
            out[i] = x[i] - y
    elif op == MUL:
        for i in range(count):
            out[i] = x[i] * y
    else:
        for i in range(count):
            out[i] = x[i] / y


@compiled("void(float32[::1])")
def round_all(out: Any) -> None:
    for i in range(len(out)):
        out[i] = rounded(out[i])


@compiled("float32(float32[::1])", fastmath=True)
def sum_of(x: Any) -> Any:
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i]
    return total


@compiled("float32(float32[::1])", fastmath=True)
def largest_of(x: Any) -> Any:
    best = x[0]
    for i in range(len(x)):
        best = max(best, x[i])
    return best
