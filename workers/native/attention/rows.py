"""Attention of a program: keys and values are written to their slots, and read by the rows that see them.

Numba compiles this file at its first import, and keeps the code. Knows slots; must not know sequences.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from workers.native.arithmetic import exp, largest_of, round_all, short_of, sum_of, tanh
from workers.native.attention.reads import AHEAD, PART, TOGETHER, to_shorts
from workers.native.attention.tiles import score, weigh
from workers.native.compiler import compiled
from workers.native.intrinsics import bits_of, float_of, store_float, store_short
from workers.native.registers import place
from workers.native.vectors import HAS_PAIRS

MADE_OF: Final = "39bf69ff78c6a91d"
"""Digest of the files that this one compiles in (see `machine`)."""
QUERIES: Final = 8
"""Queries over the same keys that are computed together, so that memory is read once for all of them."""
ROWS: Final = 8
"""Rows of a chain that are computed together. All read the keys of the last; a key that a row does not see weighs 0."""
SPARE: Final = AHEAD + TOGETHER
"""Offsets beyond those of the longest sequence that lists have room for."""
_HIDDEN = np.float32(-np.inf)
_EXPONENT = np.uint32(0x7F800000)


def num_scratch(num_kv: int, key_width: int, value_width: int) -> int:
    """Numbers of scratch memory for sequences of up to `num_kv` tokens, a multiple of 16."""
    return QUERIES * (num_kv + int(_padded(key_width)) + int(_padded(value_width)))


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


@compiled("void(float32[::1], int64, int64, float32, float32, boolean, float32)")
def _to_weights(scores: Any, start: int, end: int, scale: Any, softcap: Any, has_sink: bool, sink: Any) -> None:
    """Softmax from `start` to `end`, with one more score that has no value if there is a sink; 0 elsewhere."""
    scores[:start] = 0
    scores[end:] = 0
    seen = scores[start:end]
    if softcap > 0:
        for i in range(len(seen)):
            seen[i] = softcap * tanh(seen[i] * scale / softcap)
        scale = np.float32(1)
    largest = largest_of(seen) * scale
    if has_sink:
        largest = max(largest, sink)
    for i in range(len(seen)):
        seen[i] = exp(seen[i] * scale - largest)
    total = sum_of(seen)
    if has_sink:
        total += exp(sink - largest)
    share = np.float32(1) / total
    for i in range(len(seen)):
        seen[i] *= share


@compiled("int64(int64)")
def _padded(width: int) -> Any:
    return (width + PART - 1) // PART * PART


@compiled("int64(int64[::1], int64[::1])")
def _first_seen(code: Any, read: Any) -> Any:
    """The first of its sequence's tokens that a row sees, by the layer's window."""
    return max(0, read[1] + read[3] - code[12]) if code[12] else 0


@compiled("int64(int64[:, ::1], int64, int64)")
def _rows_together(reads: Any, row: int, count: int) -> Any:
    """Number of rows from this one on that continue one chain."""
    num = 1
    while (
        num < min(ROWS, count - row)
        and reads[row, 3] == reads[row + num, 3] == 0
        and reads[row + num, 0] == reads[row, 0]
        and reads[row + num, 1] == reads[row, 1] + num
    ):
        num += 1
    return num


@compiled("void(int64[::1], int64[::1], int64, int64[::1], int64[::1], int64[::1])")
def _find(code: Any, read: Any, first_seen: int, blocks: Any, nodes: Any, offsets: Any) -> None:
    """Byte offsets of the keys, then of the values, that a row sees from its sequence's token `first_seen` on.

    `read`: a number of slots from a stretch of blocks, then a stretch of single slots. The last one is repeated, since
    keys are read by fours and values by pairs.
    """
    item = 4 - 2 * code[13]
    key_bytes, value_bytes, room = item * code[10], item * code[11], len(offsets) // 2
    first_block, num_in_blocks, first_node, num_nodes, block_tokens = read
    num_all = num_in_blocks + num_nodes
    i = first_seen
    while i < num_all:
        within = i % block_tokens if i < num_in_blocks else 0
        if i < num_in_blocks:
            slot = blocks[first_block + i // block_tokens] * block_tokens
            end = min(num_in_blocks, i - within + block_tokens)
        else:
            slot, end = nodes[first_node + i - num_in_blocks], i + 1
        for each in range(end - i):
            offsets[i - first_seen + each] = (slot + within + each) * key_bytes
            offsets[room + i - first_seen + each] = (slot + within + each) * value_bytes
        i = end
    count = num_all - first_seen
    for i in range(count, count + TOGETHER - 1):
        offsets[i], offsets[room + i] = offsets[count - 1], offsets[room + count - 1]


@compiled("UniTuple(int64, 2)(int64, int64, int64)")
def _row_and_head(number: int, num_rows: int, group: int) -> Any:
    """Row and head of a query. Queries are counted by groups of heads, then by rows, then by heads."""
    of_group, inner = number // (num_rows * group), number % (num_rows * group)
    return inner // group, of_group * group + inner % group


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64, float32[::1])")
def _take_queries(
    code: Any, memory: Any, base: int, count: int, row: int, num_rows: int, first: int, num: int, queries: Any
) -> None:
    """Copy `num` queries as the products read them: padded, and in bfloat16 where the processor has pairs."""
    width, padded = code[16], _padded(code[16])
    for i in range(num):
        within, head = _row_and_head(first + i, num_rows, code[15])
        start = place(code, 0, base, count, row + within) + head * width
        query = queries[i * padded : (i + 1) * padded]
        query[:width] = memory[start : start + width]
        query[width:] = 0
        if code[13] and HAS_PAIRS:
            to_shorts(query.ctypes.data, padded, query.ctypes.data)


@compiled(
    "void(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64, int64[:, ::1], float32[::1], int64)"
)
def _to_all_weights(
    code: Any, memory: Any, row: int, num_rows: int, first_seen: int, num_seen: int, first: int, num: int, reads: Any,
    scores: Any, room: int,
) -> None:  # fmt: skip
    """The weights of `num` queries in place of their scores, in bfloat16 where the processor has pairs."""
    scale, softcap = float_of(np.uint32(code[18])), float_of(np.uint32(code[19]))
    num_padded = min(room, _padded(num_seen + 1))
    for i in range(num):
        within, head = _row_and_head(first + i, num_rows, code[15])
        read = reads[row + within]
        start, end = _first_seen(code, read) - first_seen, read[1] + read[3] - first_seen
        sink = memory[code[21] + head] if code[20] else _HIDDEN
        weights = scores[i * room : i * room + num_padded]
        _to_weights(weights, start, end, scale, softcap, code[20] != 0, sink)
        if code[13] and HAS_PAIRS:
            to_shorts(weights.ctypes.data, num_padded, weights.ctypes.data)


@compiled("void(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64, float32[::1])")
def _give_outputs(
    code: Any, memory: Any, base: int, count: int, row: int, num_rows: int, first: int, num: int, outputs: Any
) -> None:
    """Copy the outputs of `num` queries to their rows' registers."""
    width, padded = code[17], _padded(code[17])
    for i in range(num):
        within, head = _row_and_head(first + i, num_rows, code[15])
        start = place(code, 6, base, count, row + within) + head * width
        target = memory[start : start + width]
        target[:] = outputs[i * padded : i * padded + width]
        if code[13]:
            round_all(target)


@compiled("boolean(float32[::1])")
def _are_finite(numbers: Any) -> Any:
    found = np.uint32(0)
    for i in range(len(numbers)):
        found |= np.uint32((bits_of(numbers[i]) & _EXPONENT) == _EXPONENT)
    return found == 0


@compiled(
    "boolean(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64, int64, int64[:, ::1], int64[::1],"
    "float32[::1])"
)
def _attend_together(
    code: Any, memory: Any, base: int, count: int, row: int, num_rows: int, first_seen: int, first: int, num: int,
    reads: Any, offsets: Any, scratch: Any,
) -> Any:  # fmt: skip
    """Attention of `num` queries of some rows that read the same keys, the `first` and those after it.

    Returns False if the rows have to be computed apart.
    """
    is_short, item = code[13] != 0, 4 - 2 * code[13]
    of_group, last = first // (num_rows * code[15]), reads[row + num_rows - 1]
    num_seen, room = last[1] + last[3] - first_seen, len(offsets) // 2 - SPARE
    key_width, value_width = _padded(code[16]), _padded(code[17])
    queries = scratch[QUERIES * room : QUERIES * (room + key_width)]
    outputs = scratch[QUERIES * (room + key_width) :]
    keys, values = code[8] + item * of_group * code[16], code[9] + item * of_group * code[17]
    scores, found = scratch.ctypes.data, outputs.ctypes.data
    key_offsets, value_offsets = offsets.ctypes.data, offsets[len(offsets) // 2 :].ctypes.data
    _take_queries(code, memory, base, count, row, num_rows, first, num, queries)
    asked = queries.ctypes.data
    score(num, asked, 4 * key_width, key_offsets, num_seen, keys, code[16], is_short, scores, 4 * room)
    _to_all_weights(code, memory, row, num_rows, first_seen, num_seen, first, num, reads, scratch, room)
    outputs[: num * value_width] = 0
    weigh(num, scores, 4 * room, value_offsets, num_seen, values, code[17], is_short, found, 4 * value_width)
    _give_outputs(code, memory, base, count, row, num_rows, first, num, outputs)
    return num_rows == 1 or _are_finite(outputs[: num * value_width])


@compiled(
    "void(int64[::1], float32[::1], int64, int64, int64, int64, int64, int64, int64, int64[:, ::1], int64[::1],"
    "float32[::1])"
)
def _attend_apart(
    code: Any, memory: Any, base: int, count: int, row: int, num_rows: int, first_seen: int, first: int, num: int,
    reads: Any, offsets: Any, scratch: Any,
) -> None:  # fmt: skip
    """The same, a query at a time: 0 times what a later row's value holds is no number if that is infinite."""
    for i in range(num):
        within, head = _row_and_head(first + i, num_rows, code[15])
        read = reads[row + within]
        beyond = len(offsets) // 2 + read[1] + read[3] - first_seen
        kept, offsets[beyond] = offsets[beyond], offsets[beyond - 1]
        _attend_together(
            code, memory, base, count, row + within, 1, first_seen, head, 1, reads, offsets, scratch
        )  # fmt: skip
        offsets[beyond] = kept


@compiled(
    "void(int64[::1], float32[::1], int64, int64, int64, int64, int64[:, ::1], int64[::1], int64[::1], int64[::1],"
    "float32[::1])"
)
def attend(
    code: Any, memory: Any, base: int, count: int, thread: int, num_threads: int, reads: Any, blocks: Any, nodes: Any,
    offsets: Any, scratch: Any,
) -> None:  # fmt: skip
    """This thread's share of the attention of all rows, by the number of keys. A row reads `reads[row]` (`_find`)."""
    num_heads, group = code[14], code[15]
    total = row = 0
    while row < count:
        num_rows = _rows_together(reads, row, count)
        last = reads[row + num_rows - 1]
        total += num_rows * num_heads * (last[1] + last[3] - _first_seen(code, reads[row]) // 2 * 2)
        row += num_rows
    start, end = total * thread // num_threads, total * (thread + 1) // num_threads
    done = row = 0
    while row < count:
        num_rows = _rows_together(reads, row, count)
        first_seen, last = _first_seen(code, reads[row]) // 2 * 2, reads[row + num_rows - 1]
        num_seen, num_queries = last[1] + last[3] - first_seen, num_rows * num_heads
        query = min(max(0, -((done - start) // num_seen)), num_queries)
        end_query = min(max(0, -((done - end) // num_seen)), num_queries)
        if query < end_query:
            _find(code, last, first_seen, blocks, nodes, offsets)
        while query < end_query:
            of_group = num_rows * group
            num = min(QUERIES, of_group - query % of_group, end_query - query)
            if not _attend_together(
                code, memory, base, count, row, num_rows, first_seen, query, num, reads, offsets, scratch
            ):  # fmt: skip
                _attend_apart(
                    code, memory, base, count, row, num_rows, first_seen, query, num, reads, offsets, scratch
                )  # fmt: skip
            query += num
        done += num_seen * num_queries
        row += num_rows
