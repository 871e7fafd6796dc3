"""Runs a program of a model's forward pass: products, operations on rows, and attention, by a team of threads.

A program is three tables of integers (`workers.runtime.program` makes them). Registers are stretches of one
array of float32, of which each row of the step has its own. All threads run the same program, each on its share of a
stage, and wait for each other after each stage. Every row is computed by the same operations in the same order whatever
rows are beside it, so its bits do not depend on them.

Numba compiles this file at its first import, and keeps the code. Knows numbers; must not know models.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from workers.native.arithmetic import (
    ADD,
    DIV,
    LOOKUP,
    SUM,
    one_operand,
    round_all,
    short_of,
    sum_of,
    two_operands,
    wide,
    with_one,
)
from workers.native.attention.rows import attend, store
from workers.native.compiler import compiled
from workers.native.intrinsics import add_atomic, load_atomic, load_float, load_short, store_short, yield_processor
from workers.native.panels import PANELS
from workers.native.ranks.exchange import exchange
from workers.native.ranks.shared import ROUNDS
from workers.native.registers import place
from workers.native.vectors import HAS_PAIRS, PANEL

MADE_OF: Final = "2c93ca192b279aad"
"""Digest of the files that this one compiles in: Numba compiles it again when its own text changes, and looks at no
other. A test compares it."""
ROWS, PRODUCTS, ATTENTION, EXCHANGES = range(4)
"""Kinds of stages."""
PAIRS, BFLOAT16, FLOAT32, INT8, INT4 = range(5)
"""Kinds of weights: bfloat16 with and without the processor's products, float32, and integers with scales."""
REGISTER, CONSTANT, OF_ALL_ROWS = range(3)
"""Kinds of operands: of the stage's rows, the same for all rows, and of all rows in a stage of wanted rows."""
BLOCK: Final = 8
"""Rows that go through all operations of a stage together, so that they stay in the cache."""
SPINS: Final = 2000
"""Looks at the barrier before a waiting thread lets others run."""

_pairs = PANELS["pairs" if HAS_PAIRS else "bfloat16"]  # without the instruction the code could not be compiled
_bfloat16, _float32 = PANELS["bfloat16"], PANELS["float32"]
_int8, _int4 = PANELS["int8"], PANELS["int4"]


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64[::1], int64[::1])")
def _operate(code: Any, memory: Any, row: int, base: int, count: int, counts: Any, wanted: Any) -> None:
    """One operation on one row."""
    op, outer, inner = code[0], code[1], code[2]
    out = place(code, 3, base, count, row)
    if code[7] == CONSTANT:
        a = code[8]
    elif code[7] == REGISTER:
        a = place(code, 8, base, count, row)
    else:
        a = place(code, 8, counts[2], counts[0], wanted[row])
    b = code[13] if code[12] == CONSTANT else place(code, 13, base, count, row)
    for part in range(outer):
        o, x, y = out + part * code[5], a + part * code[10], b + part * code[15]
        if op == SUM:
            memory[o] = sum_of(memory[x : x + inner])
            target = memory[o : o + 1]
        else:
            target = memory[o : o + inner]
            if ADD <= op <= DIV:
                if code[16]:
                    two_operands(op, target, memory[x : x + inner], memory[y : y + inner])
                else:
                    with_one(op, target, memory[x : x + inner], memory[y])
            else:
                one_operand(op, target, memory[x : x + inner])
        if code[6]:
            round_all(target)


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64[::1], int64[::1])")
def _look_up(code: Any, memory: Any, row: int, base: int, count: int, ids: Any, positions: Any) -> None:
    """Copy a row of a table, by the row's token or position."""
    index = positions[row] if code[7] else ids[row]
    out = place(code, 3, base, count, row)
    address = code[8] + index * code[9]
    if code[10]:
        for i in range(code[2]):
            memory[out + i] = wide(load_short(address + 2 * i))
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
    x, x_bytes = address + 4 * place(code, 1, base, count, 0), 4 * code[2]
    if kind == PAIRS:
        for row in range(count):
            start = place(code, 1, base, count, row)
            for i in range(num_inputs):
                store_short(scratch + 2 * (row * code[10] + i), short_of(memory[start + i]))
            for i in range(num_inputs, code[10]):
                store_short(scratch + 2 * (row * code[10] + i), np.uint16(0))
        x, x_bytes = scratch, 2 * code[10]
    num_panels, width = code[9], code[4]
    for panel in range(num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads):
        out = place(code, 3, base, count, 0) + panel * PANEL
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
                round_all(target)


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
    "int64[::1], int64[::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], float32[::1], int64, float32[::1],"
    "int64[::1])"
)
def run(
    thread: int, num_threads: int, barrier: int, stages: Any, codes: Any, memory: Any, address: int, counts: Any,
    ids: Any, positions: Any, wanted: Any, slots: Any, reads: Any, blocks: Any, nodes: Any, offsets: Any, scores: Any,
    scratch: int, numbers: Any, state: Any,
) -> None:  # fmt: skip
    """Run a program. `counts`: rows, wanted rows, and where the registers of each begin in `memory`. `numbers` and
    `state`: what ranks share (`workers.native.ranks.shared`)."""
    rounds, num_exchanged = 0, state[ROUNDS]
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
        elif kind == EXCHANGES:
            for number in range(first_code, first_code + num_codes):
                num_exchanged = exchange(
                    codes[number], memory, base, count, thread, num_threads, numbers, state, num_exchanged
                )
        else:
            code = codes[first_code]
            store(code, memory, base, count, first, end, slots)
            rounds += 1
            _wait_for_all(barrier, num_threads, rounds)
            attend(code, memory, base, count, thread, num_threads, reads, blocks, nodes, offsets, scores)
        rounds += 1
        _wait_for_all(barrier, num_threads, rounds)
    if thread == 0:
        state[ROUNDS] = num_exchanged
