"""Attention of a program: keys and values are written to their slots, and read by the rows that see them.

Numba compiles this file at its first import, and keeps the code. Knows slots; must not know sequences.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from workers.native.arithmetic import exp, largest_of, round_all, short_of, sum_of, tanh, wide
from workers.native.attention.reads import scores_of, weigh_four, weigh_one
from workers.native.compiler import compiled
from workers.native.intrinsics import float_of, load_float, load_long, load_short, store_float, store_short
from workers.native.registers import place

MADE_OF: Final = "803b88b8a39383c0"
"""Digest of the files that this one compiles in (see `machine`)."""
TOGETHER: Final = 4
"""Heads that read the same keys and are computed together, so that memory is read once for all of them."""
STRETCH: Final = 128
"""Keys, or values, that all of these heads read before the next ones: they stay in the processor's first cache."""
_HIDDEN = np.float32(-np.inf)


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64, int64[::1])")
def store(code: Any, memory: Any, base: int, count: int, first: int, end: int, slots: Any) -> None:
    """Write keys and values of some rows to their slots."""
    for row in range(first, end):
        for which in range(2):
            width = code[10 + which]
            start = place(code, 2 + 2 * which, base, count, row)
            if code[13]:
                target = code[8 + which] + slots[row] * 2 * width
                for i in range(width):
                    store_short(target + 2 * i, short_of(memory[start + i]))
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
            scores[i] = softcap * tanh(scores[i] / softcap)
    largest = largest_of(scores)
    if has_sink:
        largest = max(largest, sink)
    for i in range(len(scores)):
        scores[i] = exp(scores[i] - largest)
    total = sum_of(scores)
    if has_sink:
        total += exp(sink - largest)
    for i in range(len(scores)):
        scores[i] /= total


@compiled("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])")
def _find(code: Any, read: Any, blocks: Any, nodes: Any, offsets: Any) -> Any:
    """Byte offsets of the keys, then of the values, that a row sees; returns their number.

    `read`: a number of slots from a stretch of blocks, then a stretch of single slots.
    """
    window, item = code[12], 4 - 2 * code[13]
    key_bytes, value_bytes, room = item * code[10], item * code[11], len(offsets) // 2
    first_block, num_in_blocks, first_node, num_nodes, block_tokens = read
    num_all = num_in_blocks + num_nodes
    skipped = max(0, num_all - window) if window else 0
    i = skipped
    while i < num_all:
        within = i % block_tokens if i < num_in_blocks else 0
        if i < num_in_blocks:
            slot = blocks[first_block + i // block_tokens] * block_tokens
            end = min(num_in_blocks, i - within + block_tokens)
        else:
            slot, end = nodes[first_node + i - num_in_blocks], i + 1
        for each in range(end - i):
            offsets[i - skipped + each] = (slot + within + each) * key_bytes
            offsets[room + i - skipped + each] = (slot + within + each) * value_bytes
        i = end
    return num_all - skipped


@compiled("void(int64, int64, int64, int64, int64, boolean, int64)")
def _weigh(weights: int, offsets: int, count: int, values: int, width: int, is_short: bool, out: int) -> None:
    """Add `count` values [width], each times its weight, to `out`."""
    item, part = 2 if is_short else 4, 0
    while part + 64 <= width:
        weigh_four(weights, offsets, count, values + item * part, is_short, out + 4 * part)
        part += 64
    while part + 16 <= width:
        weigh_one(weights, offsets, count, values + item * part, is_short, out + 4 * part)
        part += 16
    for left in range(part, width):
        total = load_float(out + 4 * left)
        for i in range(count):
            at = values + load_long(offsets + 8 * i) + item * left
            total += load_float(weights + 4 * i) * (wide(load_short(at)) if is_short else load_float(at))
        store_float(out + 4 * left, total)


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64, int64, int64[::1], float32[::1])")
def _attend_together(
    code: Any, memory: Any, query: int, start: int, head: int, num_heads: int, group: int, num_seen: int, address: int,
    offsets: Any, scores: Any,
) -> None:  # fmt: skip
    """Attention of heads that read the same keys. `start`: where their outputs are in `memory`."""
    is_short, item, key_width, value_width = code[13] != 0, 4 - 2 * code[13], code[16], code[17]
    keys, values = code[8] + item * group * key_width, code[9] + item * group * value_width
    key_offsets, room = offsets.ctypes.data, len(scores) // TOGETHER
    value_offsets = key_offsets + 8 * (len(offsets) // 2)
    for first in range(0, num_seen, STRETCH):
        count = min(STRETCH, num_seen - first)
        for i in range(num_heads):
            found = scores.ctypes.data + 4 * (i * room + first)
            scores_of(query + 4 * i * key_width, key_offsets + 8 * first, count, keys, key_width, is_short, found)
    scale, softcap = float_of(np.uint32(code[18])), float_of(np.uint32(code[19]))
    for i in range(num_heads):
        sink = memory[code[21] + head + i] if code[20] else _HIDDEN
        _to_weights(scores[i * room : i * room + num_seen], scale, softcap, code[20] != 0, sink)
    memory[start : start + num_heads * value_width] = 0
    for first in range(0, num_seen, STRETCH):
        count = min(STRETCH, num_seen - first)
        for i in range(num_heads):
            out = address + 4 * (start + i * value_width)
            weights = scores.ctypes.data + 4 * (i * room + first)
            _weigh(weights, value_offsets + 8 * first, count, values, value_width, is_short, out)
    if is_short:
        round_all(memory[start : start + num_heads * value_width])


@compiled(
    "void(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64[:, ::1], int64[::1], int64[::1],"
    "int64[::1], float32[::1])"
)
def attend(
    code: Any, memory: Any, address: int, base: int, count: int, first: int, end: int, reads: Any, blocks: Any,
    nodes: Any, offsets: Any, scores: Any,
) -> None:  # fmt: skip
    """Attention of the pairs of a row and a head from `first` to `end`. A row reads `reads[row]` (`_find`)."""
    num_heads, group = code[14], code[15]
    last_row, num_seen, pair = -1, 0, first
    while pair < end:
        row, head = pair // num_heads, pair % num_heads
        if row != last_row:
            last_row, num_seen = row, _find(code, reads[row], blocks, nodes, offsets)
        together = min(TOGETHER, group - head % group, end - pair)
        query = address + 4 * (place(code, 0, base, count, row) + head * code[16])
        start = place(code, 6, base, count, row) + head * code[17]
        _attend_together(
            code, memory, query, start, head, together, head // group, num_seen, address, offsets, scores
        )  # fmt: skip
        pair += together
