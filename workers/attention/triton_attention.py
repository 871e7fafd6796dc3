"""Attention over block tables as Triton kernels: one for every kind of row, model and step.

A program computes a tile of rows of one sequence, for heads that share a KV head, over a part (a split) of the KV that
they see. A second kernel joins the splits by their log-sum-exps. Rows times heads fill a tensor core's operand; splits
fill the GPU if few rows read much KV. Trees, windows, softcaps, sinks, and values narrower than keys are conditions
within the loop, compiled only if needed.

Knows arithmetic and the arrays of `workers.step.paged_plan`. Must not know models. Import it only where Triton is
installed, which comes with torch for CUDA.
Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691) and its split-KV decoding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.attention.paged import LayerKind, PagedReads
from workers.shared_memory import num_stages
from workers.step.kv_dtype import FP8, FP8_MAX
from workers.step.paged_plan import WORD_BITS

BLOCK_N = 64
"""Rows of KV that a program reads at a time."""
MAX_TILE = 128
"""Largest number of rows times heads of a program. More heads that share KV are split into chunks."""
PROGRAMS = 264
"""Programs that fill a GPU: two for each multiprocessor of a large one."""
MAX_SPLITS = 32
MAX_STAGES = 3
"""Blocks of KV in flight, if shared memory has room for them."""
MIN_DOT = 16
"""Smallest size of a tensor core's operand."""
WIDE = 512
"""Widths of key and value added up, above which tiles are as small as can be: those of latents take 80 KiB, not 448."""


class TritonKernel:
    """Stores a layer's new KV, and attends to it."""

    def __init__(self, *, is_deterministic: bool = False) -> None:
        """`is_deterministic`: without splits and without fused multiply-adds.

        The number of splits depends on the batch; without splits, long contexts take several times as long. The
        compiler fuses only code without masks, and whether a block of KV is masked depends on the tile's other rows.
        """
        self._max_splits = 1 if is_deterministic else MAX_SPLITS
        self._is_fused = not is_deterministic

    @staticmethod
    def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write the rows [1, H, T, D] to their slots of the pools [S, H, D]."""
        num_heads, num_rows, key_dim = key.shape[1:]
        value_dim = value.shape[3]
        size = triton.next_power_of_2(max(key_dim, value_dim))
        _store[(num_rows, num_heads)](
            keys, values, key, value, slots, keys.stride(0), values.stride(0), *key.stride()[1:], *value.stride()[1:],
            KEY_DIM=key_dim, VALUE_DIM=value_dim, SIZE=size, LARGEST=FP8_MAX if keys.dtype == FP8 else 0.0,
            num_warps=1 if size <= 256 else 4,
        )  # fmt: skip

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, reads: PagedReads, kind: LayerKind) -> Tensor:
        """Attention of rows [T, H, D] over pools [S, H_kv, D] and [S, H_kv, D_v].  # [T, H, D_v]"""
        num_rows, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = values.shape[1:]
        output = query.new_empty(num_rows, num_heads, value_dim)
        group = num_heads // num_kv_heads
        sizes = [max(MIN_DOT, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim)]
        max_tile, block_n = (MIN_DOT, MIN_DOT) if sum(sizes) > WIDE else (MAX_TILE, BLOCK_N)
        heads = min(triton.next_power_of_2(group), max_tile // reads.tile_rows)
        num_chunks = triton.cdiv(group, heads)
        splits = _num_splits(reads, num_kv_heads * num_chunks, self._max_splits)
        parts, logarithms = output, output  # not written without splits
        if splits > 1:
            parts = torch.empty(splits, num_rows, num_heads, value_dim, dtype=torch.float32, device=query.device)
            logarithms = torch.empty(splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
        block_m = max(MIN_DOT, reads.tile_rows * heads)
        stages = num_stages(query.device, block_n * sum(sizes) * query.itemsize, MAX_STAGES)
        most_programs = len(reads.tiles) * num_kv_heads * num_chunks * splits
        _attend[(min(most_programs, 2 * PROGRAMS),)](
            query, keys, values, output, parts, logarithms,
            reads.num_tiles, reads.tiles, reads.seen, reads.positions, reads.masks, reads.table,
            kind.sinks, kind.scale, kind.softcap or 0.0, kind.window or 0,
            query.stride(0), query.stride(1), query.stride(2),
            keys.stride(0), values.stride(0), reads.table.stride(0), num_rows,
            HEADS=num_heads, KV_HEADS=num_kv_heads, GROUP=group, TILE_HEADS=heads, CHUNKS=num_chunks,
            TILE_ROWS=reads.tile_rows, BLOCK_M=block_m, BLOCK_N=block_n, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            KEY_SIZE=sizes[0], VALUE_SIZE=sizes[1],
            BLOCK_TOKENS=reads.block_tokens, NUM_WORDS=reads.masks.shape[1], WORD_BITS=WORD_BITS,
            SPLITS=splits, PROGRAMS=PROGRAMS, HAS_WINDOW=kind.window is not None,
            HAS_SOFTCAP=kind.softcap is not None, HAS_SINKS=kind.sinks is not None,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=4 if block_m <= 64 else 8, num_stages=stages, enable_fp_fusion=self._is_fused,
        )  # fmt: skip
        if splits > 1:
            _join[(num_rows, num_heads)](
                parts, logarithms, output, reads.num_tiles, kind.sinks, num_rows,
                HEADS=num_heads, PROGRAM_HEADS=num_kv_heads * num_chunks, VALUE_DIM=value_dim,
                VALUE_SIZE=triton.next_power_of_2(value_dim), SPLITS=splits, PROGRAMS=PROGRAMS,
                HAS_SINKS=kind.sinks is not None, num_warps=4,
            )  # fmt: skip
        return output


def _num_splits(reads: PagedReads, num_heads: int, limit: int) -> int:
    """Number of splits that fill the GPU if tiles are as few as possible: a power of two, at most one per KV block."""
    wanted: int = PROGRAMS // (triton.cdiv(len(reads.seen), reads.tile_rows) * num_heads)
    most: int = triton.cdiv(reads.table.shape[1] * reads.block_tokens, BLOCK_N)
    return 1 << (max(1, min(wanted, most, limit)).bit_length() - 1)


@triton.jit  # type: ignore[untyped-decorator]  # Triton's own, as below
def _store(
    keys: tl.tensor, values: tl.tensor, key: tl.tensor, value: tl.tensor, slots: tl.tensor,
    keys_slot: tl.tensor, values_slot: tl.tensor, key_head: tl.tensor, key_row: tl.tensor, key_dim: tl.tensor,
    value_head: tl.tensor, value_row: tl.tensor, value_dim: tl.tensor,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr,
) -> None:  # fmt: skip
    """`LARGEST`: the largest number that float8 pools hold; 0 for others."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    dim = tl.arange(0, SIZE)
    new = tl.load(key + head * key_head + row * key_row + dim * key_dim, mask=dim < KEY_DIM)
    new = _as_stored(new, LARGEST)
    tl.store(keys + slot * keys_slot + head * KEY_DIM + dim, new, mask=dim < KEY_DIM)
    new = tl.load(value + head * value_head + row * value_row + dim * value_dim, mask=dim < VALUE_DIM)
    new = _as_stored(new, LARGEST)
    tl.store(values + slot * values_slot + head * VALUE_DIM + dim, new, mask=dim < VALUE_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _as_stored(new: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Rounded to float8 e4m3, to the nearest even one and at most `LARGEST`; infinite numbers and NaN become NaN.
    Converting it is then exact, on any device. `LARGEST` 0: as it is."""
    if LARGEST > 0:
        number = new.to(tl.float32)
        limited = tl.where(number > LARGEST, LARGEST, tl.where(number < -LARGEST, -LARGEST, number))
        bits = limited.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # three binary digits
        small = (limited + 24576.0) - 24576.0  # multiples of 2 ** -9, below the normal numbers
        new = tl.where(tl.abs(limited) < 0.015625, small, normal)
        new = tl.where(tl.abs(number) < float("inf"), new, number - number)
    return new


@triton.jit  # type: ignore[untyped-decorator]
def _splits_now(
    num_tiles: tl.tensor, PROGRAM_HEADS: tl.constexpr, SPLITS: tl.constexpr, PROGRAMS: tl.constexpr
) -> tl.tensor:
    """Number of splits used in this step: fewer if it has many tiles."""
    return tl.minimum(tl.maximum(PROGRAMS // tl.maximum(num_tiles * PROGRAM_HEADS, 1), 1), SPLITS)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _attend(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, output: tl.tensor, parts: tl.tensor, logarithms: tl.tensor,
    num_tiles: tl.tensor, tiles: tl.tensor, seen: tl.tensor, positions: tl.tensor, masks: tl.tensor, table: tl.tensor,
    sinks: tl.tensor, scale: tl.tensor, softcap: tl.tensor, window: tl.tensor,
    query_row: tl.tensor, query_head: tl.tensor, query_dim: tl.tensor,
    keys_slot: tl.tensor, values_slot: tl.tensor, table_row: tl.tensor, num_rows: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, CHUNKS: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, NUM_WORDS: tl.constexpr, WORD_BITS: tl.constexpr, SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Each program loops over tiles, heads and splits, so one recorded grid serves steps with few and many tiles."""
    num_now = tl.load(num_tiles)
    splits = _splits_now(num_now, KV_HEADS * CHUNKS, SPLITS, PROGRAMS)
    member = tl.arange(0, BLOCK_M)
    key_dim, value_dim = tl.arange(0, KEY_SIZE), tl.arange(0, VALUE_SIZE)
    for item in range(tl.program_id(0), num_now * KV_HEADS * CHUNKS * splits, tl.num_programs(0)):
        split, part = item % splits, item // splits
        kv_head, chunk = part % KV_HEADS, part // KV_HEADS % CHUNKS
        tile = tiles + 4 * (part // (KV_HEADS * CHUNKS))
        first, count, sequence, tile_end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
        blocks = table + sequence.to(tl.int64) * table_row

        # One operand: for each row, the heads that share this KV head.
        of_row, of_group = member // TILE_HEADS, chunk * TILE_HEADS + member % TILE_HEADS
        is_real = (of_row < TILE_ROWS) & (of_row < count) & (of_group < GROUP)
        row, head = (first + of_row).to(tl.int64), kv_head * GROUP + of_group
        sees = tl.load(seen + row, mask=is_real, other=0)
        rows = tl.load(
            query + row[:, None] * query_row + head[:, None] * query_head + key_dim[None, :] * query_dim,
            mask=is_real[:, None] & (key_dim < KEY_DIM)[None, :],
            other=0.0,
        )

        begin = 0
        position = sees
        if HAS_WINDOW:
            position = tl.load(positions + row, mask=is_real, other=1 << 30)
            begin = tl.maximum(tl.min(position) - window + 1, 0) // BLOCK_N * BLOCK_N
        share = tl.cdiv(tl.cdiv(tl.maximum(tile_end - begin, 0), BLOCK_N), splits) * BLOCK_N
        begin += split * share
        end = tl.minimum(tile_end, begin + share)
        # Every row sees all KV up to `plain_end`, so without windows nothing is masked there.
        plain_end = tl.min(tl.where(is_real, sees, 1 << 30)) // BLOCK_N * BLOCK_N
        plain_end = begin if HAS_WINDOW else tl.maximum(tl.minimum(plain_end, end), begin)

        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, VALUE_SIZE], tl.float32)
        for start in range(begin, plain_end, BLOCK_N):
            largest, total, sums = _add_block(
                largest, total, sums, rows, row, is_real, sees, position, start, end, blocks,
                keys + kv_head * KEY_DIM, values + kv_head * VALUE_DIM, masks, scale, softcap, window,
                keys_slot, values_slot, KEY_DIM, VALUE_DIM, KEY_SIZE, VALUE_SIZE, BLOCK_N, BLOCK_TOKENS,
                NUM_WORDS, WORD_BITS, False, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip
        for start in range(plain_end, end, BLOCK_N):
            largest, total, sums = _add_block(
                largest, total, sums, rows, row, is_real, sees, position, start, end, blocks,
                keys + kv_head * KEY_DIM, values + kv_head * VALUE_DIM, masks, scale, softcap, window,
                keys_slot, values_slot, KEY_DIM, VALUE_DIM, KEY_SIZE, VALUE_SIZE, BLOCK_N, BLOCK_TOKENS,
                NUM_WORDS, WORD_BITS, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
            )  # fmt: skip

        is_out = is_real[:, None] & (value_dim < VALUE_DIM)[None, :]
        place = (row * HEADS + head)[:, None] * VALUE_DIM + value_dim[None, :]
        if SPLITS == 1:
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=is_real, other=0.0).to(tl.float32)
                base = tl.maximum(largest, sink)
                sums = sums * tl.exp(largest - base)[:, None]
                total = total * tl.exp(largest - base) + tl.exp(sink - base)
            result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(output + place, result.to(output.dtype.element_ty), mask=is_out)
        else:
            result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
            before = split.to(tl.int64) * num_rows * HEADS
            tl.store(parts + before * VALUE_DIM + place, result, mask=is_out)
            logarithm = tl.where(total == 0.0, float("-inf"), largest + tl.log(total))
            tl.store(logarithms + before + row * HEADS + head, logarithm, mask=is_real)


@triton.jit  # type: ignore[untyped-decorator]
def _add_block(
    largest: tl.tensor, total: tl.tensor, sums: tl.tensor, rows: tl.tensor, row: tl.tensor, is_real: tl.tensor,
    sees: tl.tensor, position: tl.tensor, start: tl.tensor, end: tl.tensor, blocks: tl.tensor,
    keys: tl.tensor, values: tl.tensor, masks: tl.tensor, scale: tl.tensor, softcap: tl.tensor, window: tl.tensor,
    keys_slot: tl.tensor, values_slot: tl.tensor,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_TOKENS: tl.constexpr, NUM_WORDS: tl.constexpr, WORD_BITS: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Online softmax over one more block of KV."""
    key_dim, value_dim = tl.arange(0, KEY_SIZE), tl.arange(0, VALUE_SIZE)
    kv_row = start + tl.arange(0, BLOCK_N)
    is_kv = kv_row < end
    if BLOCK_TOKENS % BLOCK_N == 0:  # all rows are in one block
        slot = tl.load(blocks + start // BLOCK_TOKENS).to(tl.int64) * BLOCK_TOKENS + start % BLOCK_TOKENS
        slots = slot + tl.arange(0, BLOCK_N)
    else:
        block = tl.load(blocks + kv_row // BLOCK_TOKENS, mask=is_kv, other=0)
        slots = block.to(tl.int64) * BLOCK_TOKENS + kv_row % BLOCK_TOKENS
    key_mask, value_mask = (key_dim < KEY_DIM)[:, None], (value_dim < VALUE_DIM)[None, :]
    if IS_MASKED:
        key_mask, value_mask = key_mask & is_kv[None, :], value_mask & is_kv[:, None]
    key = tl.load(keys + slots[None, :] * keys_slot + key_dim[:, None], mask=key_mask, other=0.0).to(rows.dtype)
    value = tl.load(values + slots[:, None] * values_slot + value_dim[None, :], mask=value_mask, other=0.0)
    value = value.to(rows.dtype)
    scores = tl.dot(rows, key, input_precision=PRECISION) * scale
    if HAS_SOFTCAP:
        scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap  # tanh
    if IS_MASKED:
        is_seen = kv_row[None, :] < sees[:, None]
        if HAS_WINDOW:
            is_seen &= position[:, None] - kv_row[None, :] < window
        if NUM_WORDS > 0:
            node = kv_row[None, :] - sees[:, None]
            is_node = (node >= 0) & (node < NUM_WORDS * WORD_BITS) & is_real[:, None]
            word = tl.load(masks + row[:, None] * NUM_WORDS + node // WORD_BITS, mask=is_node, other=0)
            is_seen |= is_node & ((word >> (node % WORD_BITS)) & 1 != 0)
        # A weight of 0 times NaN is NaN: only rows that see such a value may get it.
        is_sound = value - value == 0.0
        has_sound = tl.min(is_sound.to(tl.int32), 1) != 0
        value = tl.where(is_sound, value, 0.0)
        scores = tl.where(has_sound[None, :], scores, float("nan"))
        scores = tl.where(is_seen & is_kv[None, :], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp(scores - base[:, None])
    old = tl.exp(largest - base)
    sums = sums * old[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return new_largest, total * old + tl.sum(weights, 1), sums


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _join(
    parts: tl.tensor, logarithms: tl.tensor, output: tl.tensor, num_tiles: tl.tensor, sinks: tl.tensor,
    num_rows: tl.tensor,
    HEADS: tl.constexpr, PROGRAM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, PROGRAMS: tl.constexpr, HAS_SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """The softmax over all splits of one row and head."""
    head = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    split, dim = tl.arange(0, SPLITS), tl.arange(0, VALUE_SIZE)
    is_used = split < _splits_now(tl.load(num_tiles), PROGRAM_HEADS, SPLITS, PROGRAMS)
    logarithm = tl.load(logarithms + split * num_rows * HEADS + place, mask=is_used, other=float("-inf"))
    base = tl.max(logarithm, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    weights = tl.exp(logarithm - base)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp(sink - base)
    part = tl.load(
        parts + (split[:, None] * num_rows * HEADS + place) * VALUE_DIM + dim[None, :],
        mask=(weights > 0.0)[:, None] & (dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + place * VALUE_DIM + dim, result.to(output.dtype.element_ty), mask=dim < VALUE_DIM)
