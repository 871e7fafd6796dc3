"""Runs a program of a model's forward pass: products, operations on rows, and attention, by a team of threads.

A program is three tables of integers (`workers.runtime.program.assembly` makes them). Registers are stretches of one
array of float32, of which each row of the step has its own. All threads run the same program, each on its share of a
stage, and wait for each other after each stage. Every row is computed by the same operations in the same order whatever
rows are beside it, so its bits do not depend on them.

Numba compiles this file at its first import, and keeps the code. Knows numbers; must not know models.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from workers.native.compiler import compiled
from workers.native.intrinsics import (
    HAS_PAIRS,
    PANEL,
    PANELS,
    add_atomic,
    bits_of,
    float_of,
    load_atomic,
    load_float,
    load_short,
    scores_of,
    store_float,
    store_short,
    weigh_four,
    weigh_one,
    yield_processor,
)

INTRINSICS: Final = "eb8c370d3f17391e"
"""Digest of intrinsics.py: Numba compiles this file again when its text changes, and does not look at what it
imports."""
ROWS, PRODUCTS, ATTENTION = range(3)
"""Kinds of stages."""
PAIRS, BFLOAT16, FLOAT32, INT8, INT4 = range(5)
"""Kinds of weights: bfloat16 with and without the processor's products, float32, and integers with scales."""
COPY, ADD, SUB, MUL, DIV, RSQRT, SUM, SILU, GELU, GELU_TANH, TANH, SIGMOID, RELU, SQRT, EXP, LOOKUP = range(16)
"""Operations on rows."""
REGISTER, CONSTANT, OF_ALL_ROWS = range(3)
"""Kinds of operands: of the stage's rows, the same for all rows, and of all rows where the stage has the wanted ones."""
BLOCK: Final = 8
"""Rows that go through all operations of a stage together, so that they stay in the cache."""
SPINS: Final = 2000
"""Looks at the barrier before a waiting thread lets others run."""

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
_HIDDEN = np.float32(-np.inf)

_pairs = PANELS["pairs" if HAS_PAIRS else "bfloat16"]  # without the instruction the code could not be compiled
_bfloat16, _float32 = PANELS["bfloat16"], PANELS["float32"]
_int8, _int4 = PANELS["int8"], PANELS["int4"]


@compiled("float32(float32)")
def _rounded(number: Any) -> Any:
    """To the nearest bfloat16 number."""
    bits = bits_of(number)
    return float_of((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000))


@compiled("uint16(float32)")
def _short(number: Any) -> Any:
    """The bits of a number that is a bfloat16 number, or is rounded to one."""
    return np.uint16(bits_of(_rounded(number)) >> np.uint32(16))


@compiled("float32(uint16)")
def _wide(short: Any) -> Any:
    return float_of(np.uint32(short) << np.uint32(16))


@compiled("float32(float32)")
def _exp(x: Any) -> Any:
    """Cephes' expf, which a compiler can compute for sixteen numbers at once."""
    x = min(max(x, _LEAST), _MOST)
    whole = x * _LOG2_E + _ROUNDER - _ROUNDER
    x = x - whole * _LN_2_HIGH - whole * _LN_2_LOW
    series = ((((_E0 * x + _E1) * x + _E2) * x + _E3) * x + _E4) * x + _E5
    power = float_of(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))
    return (series * x * x + x + _ONE) * power


@compiled("float32(float32)")
def _tanh(x: Any) -> Any:
    return _ONE - _TWO / (_exp(_TWO * x) + _ONE)


@compiled("float32(float32)")
def _erf(x: Any) -> Any:
    """Abramowitz and Stegun 7.1.26; the error is below 1.5e-7."""
    size = abs(x)
    t = _ONE / (_ONE + _P * size)
    tail = ((((_A5 * t + _A4) * t + _A3) * t + _A2) * t + _A1) * t * _exp(-size * size)
    return math.copysign(_ONE - tail, x)


@compiled("void(int64, float32[::1], float32[::1])")
def _one_operand(op: int, out: Any, x: Any) -> None:
    count = len(out)
    if op == COPY:
        for i in range(count):
            out[i] = x[i]
    elif op == SILU:
        for i in range(count):
            out[i] = x[i] / (_ONE + _exp(-x[i]))
    elif op == GELU:
        for i in range(count):
            out[i] = _HALF * x[i] * (_ONE + _erf(x[i] * _ROOT_HALF))
    elif op == GELU_TANH:
        for i in range(count):
            out[i] = _HALF * x[i] * (_ONE + _tanh(_GELU_SCALE * (x[i] + _GELU_CUBE * x[i] * x[i] * x[i])))
    elif op == TANH:
        for i in range(count):
            out[i] = _tanh(x[i])
    elif op == SIGMOID:
        for i in range(count):
            out[i] = _ONE / (_ONE + _exp(-x[i]))
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
            out[i] = _exp(x[i])


@compiled("void(int64, float32[::1], float32[::1], float32[::1])")
def _two_operands(op: int, out: Any, x: Any, y: Any) -> None:
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
def _with_one(op: int, out: Any, x: Any, y: Any) -> None:
    """`_two_operands` where the second is a single number."""
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
def _round_all(out: Any) -> None:
    for i in range(len(out)):
        out[i] = _rounded(out[i])


@compiled("float32(float32[::1])", fastmath=True)
def _sum(x: Any) -> Any:
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i]
    return total


@compiled("float32(float32[::1])", fastmath=True)
def _largest(x: Any) -> Any:
    best = x[0]
    for i in range(len(x)):
        best = max(best, x[i])
    return best


@compiled("int64(int64[::1], int64, int64, int64, int64)")
def _place(code: Any, column: int, base: int, count: int, row: int) -> Any:
    """Where a row's numbers begin: a register's place is (place in the row << 32) + place of the register."""
    return base + (code[column] & 0xFFFFFFFF) * count + row * code[column + 1] + (code[column] >> 32)


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64[::1], int64[::1])")
def _operate(code: Any, memory: Any, row: int, base: int, count: int, counts: Any, wanted: Any) -> None:
    """One operation on one row."""
    op, outer, inner = code[0], code[1], code[2]
    out = _place(code, 3, base, count, row)
    if code[7] == CONSTANT:
        a = code[8]
    elif code[7] == REGISTER:
        a = _place(code, 8, base, count, row)
    else:
        a = _place(code, 8, counts[2], counts[0], wanted[row])
    b = code[13] if code[12] == CONSTANT else _place(code, 13, base, count, row)
    for part in range(outer):
        o, x, y = out + part * code[5], a + part * code[10], b + part * code[15]
        if op == SUM:
            memory[o] = _sum(memory[x : x + inner])
            target = memory[o : o + 1]
        else:
            target = memory[o : o + inner]
            if ADD <= op <= DIV:
                if code[16]:
                    _two_operands(op, target, memory[x : x + inner], memory[y : y + inner])
                else:
                    _with_one(op, target, memory[x : x + inner], memory[y])
            else:
                _one_operand(op, target, memory[x : x + inner])
        if code[6]:
            _round_all(target)


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64[::1], int64[::1])")
def _look_up(code: Any, memory: Any, row: int, base: int, count: int, ids: Any, positions: Any) -> None:
    """Copy a row of a table, by the row's token or position."""
    index = positions[row] if code[7] else ids[row]
    out = _place(code, 3, base, count, row)
    address = code[8] + index * code[9]
    if code[10]:
        for i in range(code[2]):
            memory[out + i] = _wide(load_short(address + 2 * i))
    else:
        for i in range(code[2]):
            memory[out + i] = load_float(address + 4 * i)


@compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _multiply(kind: int, x: int, x_bytes: int, rows: int, w: int, s: int, steps: int, out: int, out_bytes: int) -> None:
    """The products of rows with one panel of weights."""
    if kind == PAIRS:
        _pairs(x, x_bytes, rows, w, s, steps, out, out_bytes)
    elif kind == BFLOAT16:
        _bfloat16(x, x_bytes, rows, w, s, steps, out, out_bytes)
    elif kind == FLOAT32:
        _float32(x, x_bytes, rows, w, s, steps, out, out_bytes)
    elif kind == INT8:
        _int8(x, x_bytes, rows, w, s, steps, out, out_bytes)
    else:
        _int4(x, x_bytes, rows, w, s, steps, out, out_bytes)


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64)")
def _product(
    code: Any, memory: Any, address: int, base: int, count: int, scratch: int, thread: int, num_threads: int
) -> None:
    """A linear layer for all rows: this thread's share of the panels."""
    kind, num_inputs, bias, scales = code[0], code[8], code[7], code[6]
    x, x_bytes = address + 4 * _place(code, 1, base, count, 0), 4 * code[2]
    if kind == PAIRS:
        for row in range(count):
            start = _place(code, 1, base, count, row)
            for i in range(num_inputs):
                store_short(scratch + 2 * (row * code[10] + i), _short(memory[start + i]))
            for i in range(num_inputs, code[10]):
                store_short(scratch + 2 * (row * code[10] + i), np.uint16(0))
        x, x_bytes = scratch, 2 * code[10]
    num_panels, width = code[9], code[4]
    for panel in range(num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads):
        out = _place(code, 3, base, count, 0) + panel * PANEL
        group_scales = scales + panel * code[13]
        _multiply(
            kind, x, x_bytes, count, code[5] + panel * code[12], group_scales, code[11], address + 4 * out, 4 * width
        )
        for row in range(count):
            target = memory[out + row * width : out + row * width + PANEL]
            if kind == INT8:
                for i in range(PANEL):
                    target[i] *= load_float(scales + 4 * (panel * PANEL + i))
            if bias:
                for i in range(PANEL):
                    target[i] += load_float(bias + 4 * (panel * PANEL + i))
            if code[14]:
                _round_all(target)


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64, int64[::1])")
def _store(code: Any, memory: Any, base: int, count: int, first: int, end: int, slots: Any) -> None:
    """Write keys and values of some rows to their slots."""
    for row in range(first, end):
        for which in range(2):
            width = code[10 + which]
            start = _place(code, 2 + 2 * which, base, count, row)
            if code[13]:
                target = code[8 + which] + slots[row] * 2 * width
                for i in range(width):
                    store_short(target + 2 * i, _short(memory[start + i]))
            else:
                target = code[8 + which] + slots[row] * 4 * width
                for i in range(width):
                    store_float(target + 4 * i, memory[start + i])


@compiled("void(float32[::1], float32, float32, boolean, float32)")
def _to_weights(scores: Any, scale: Any, softcap: Any, has_sink: bool, sink: Any) -> None:
    """Softmax, with one more score that has no value if there is a sink."""
    for i in range(len(scores)):
        scores[i] *= scale
    if softcap > 0:
        for i in range(len(scores)):
            scores[i] = softcap * _tanh(scores[i] / softcap)
    largest = _largest(scores)
    if has_sink:
        largest = max(largest, sink)
    for i in range(len(scores)):
        scores[i] = _exp(scores[i] - largest)
    total = _sum(scores)
    if has_sink:
        total += _exp(sink - largest)
    for i in range(len(scores)):
        scores[i] /= total


@compiled(
    "void(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64[:, ::1], int64[::1], int64[::1], int64[::1], float32[::1])"
)
def _attend(
    code: Any, memory: Any, address: int, base: int, count: int, first: int, end: int, reads: Any, blocks: Any,
    nodes: Any, offsets: Any, scores: Any,
) -> None:  # fmt: skip
    """Attention of some pairs of a row and a head.

    A row reads `reads[row]`: a number of slots from a stretch of blocks, then a stretch of single slots.
    """
    num_heads, group, window, is_short = code[14], code[15], code[12], code[13] != 0
    key_width, value_width, item = code[16], code[17], 4 - 2 * code[13]
    key_bytes, value_bytes = item * code[10], item * code[11]
    scale, softcap = float_of(np.uint32(code[18])), float_of(np.uint32(code[19]))
    last_row = -1
    skipped = num_seen = 0
    key_offsets, value_offsets = offsets[: len(offsets) // 2], offsets[len(offsets) // 2 :]
    for pair in range(first, end):
        row, head = pair // num_heads, pair % num_heads
        if row != last_row:
            last_row = row
            first_block, num_in_blocks, first_node, num_nodes, block_tokens = reads[row]
            num_all = num_in_blocks + num_nodes
            skipped = max(0, num_all - window) if window else 0
            num_seen = num_all - skipped
            for i in range(skipped, num_all):
                if i < num_in_blocks:
                    slot = blocks[first_block + i // block_tokens] * block_tokens + i % block_tokens
                else:
                    slot = nodes[first_node + i - num_in_blocks]
                key_offsets[i - skipped], value_offsets[i - skipped] = slot * key_bytes, slot * value_bytes
        query = address + 4 * (_place(code, 0, base, count, row) + head * key_width)
        keys = code[8] + item * (head // group) * key_width
        found = scores[:num_seen]
        scores_of(query, key_offsets.ctypes.data, num_seen, keys, key_width, is_short, scores.ctypes.data)
        _to_weights(found, scale, softcap, code[20] != 0, memory[code[21] + head] if code[20] else _HIDDEN)
        values = code[9] + item * (head // group) * value_width
        out = address + 4 * (_place(code, 6, base, count, row) + head * value_width)
        part = 0
        while part + 64 <= value_width:
            weigh_four(
                scores.ctypes.data, value_offsets.ctypes.data, num_seen, values + item * part, is_short, out + 4 * part
            )
            part += 64
        while part + 16 <= value_width:
            weigh_one(
                scores.ctypes.data, value_offsets.ctypes.data, num_seen, values + item * part, is_short, out + 4 * part
            )
            part += 16
        for place in range(part, value_width):
            total = np.float32(0)
            for i in range(num_seen):
                at = values + value_offsets[i] + item * place
                total += found[i] * (_wide(load_short(at)) if is_short else load_float(at))
            memory[_place(code, 6, base, count, row) + head * value_width + place] = total
        if code[13]:
            start = _place(code, 6, base, count, row) + head * value_width
            _round_all(memory[start : start + value_width])


@compiled("void(int64, int64, int64)")
def _wait_for_all(barrier: int, num_threads: int, rounds: int) -> None:
    """Wait until all threads are here for the `rounds`-th time."""
    if num_threads == 1:
        return
    add_atomic(barrier, 1)
    spins = 0
    while load_atomic(barrier) < rounds * num_threads:
        spins += 1
        if spins > SPINS:
            yield_processor()


@compiled(
    "void(int64, int64, int64, int64[:, ::1], int64[:, ::1], float32[::1], int64, int64[::1], int64[::1], int64[::1],"
    "int64[::1], int64[::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], float32[::1], int64)"
)
def run(
    thread: int, num_threads: int, barrier: int, stages: Any, codes: Any, memory: Any, address: int, counts: Any,
    ids: Any, positions: Any, wanted: Any, slots: Any, reads: Any, blocks: Any, nodes: Any, offsets: Any, scores: Any,
    scratch: int,
) -> None:  # fmt: skip
    """Run a program. `counts`: rows, wanted rows, and where the registers of each begin in `memory`."""
    rounds = 0
    for stage in range(len(stages)):
        kind, first_code, num_codes, space = stages[stage]
        count, base = counts[space], counts[2 + space]
        first, end = count * thread // num_threads, count * (thread + 1) // num_threads
        if kind == ROWS:
            for start in range(first, end, BLOCK):
                for number in range(first_code, first_code + num_codes):
                    code = codes[number]
                    for row in range(start, min(end, start + BLOCK)):
                        if code[0] == LOOKUP:
                            _look_up(code, memory, row, base, count, ids, positions)
                        else:
                            _operate(code, memory, row, base, count, counts, wanted)
        elif kind == PRODUCTS:
            for number in range(first_code, first_code + num_codes):
                _product(codes[number], memory, address, base, count, scratch, thread, num_threads)
        else:
            code = codes[first_code]
            _store(code, memory, base, count, first, end, slots)
            rounds += 1
            _wait_for_all(barrier, num_threads, rounds)
            pairs = count * code[14]
            _attend(
                code, memory, address, base, count, pairs * thread // num_threads, pairs * (thread + 1) // num_threads,
                reads, blocks, nodes, offsets, scores,
            )  # fmt: skip
        rounds += 1
        _wait_for_all(barrier, num_threads, rounds)
