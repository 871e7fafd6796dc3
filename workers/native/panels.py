"""LLVM code of products: a panel of 32 outputs for a few rows at a time, for each kind of weights.

Knows instructions; must not know layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workers.native.vectors import (
    BYTES,
    F32,
    FLOATS,
    I32,
    I64,
    INT,
    LANES,
    PAIRS,
    PANEL,
    SHORTS,
    WORDS,
    call,
    fetch,
    fma,
    load_at,
    offset,
    splat,
    store_at,
    widened,
)

TILE: Final = 8
"""Rows that are multiplied at once, of many."""
MIN_REST: Final = 5
MAX_REST: Final = MIN_REST + TILE - 1
"""Rows of the last tile of many. A tile of one or two rows waits for its own sums: it takes as long as one of four."""
AHEAD: Final = 4096
"""Bytes that weights are fetched ahead: the processor's own prefetching ends with each page."""


def _fetch_ahead(builder: Any, address: Any, num_bytes: int) -> None:
    for line in range(0, num_bytes, 64):
        fetch(builder, builder.add(address, I64(AHEAD + line)))


_Step = Callable[[Any, Any, list[Any], list[list[Any]]], None]
"""(builder, number of this step, addresses of the rows, accumulators by row and vector)."""


def _panel(steps_of: Callable[[Any, Any], _Step]) -> Any:
    """An intrinsic that multiplies `count` rows by a panel of weights: eight at once, then the rest."""

    @intrinsic  # type: ignore[untyped-decorator]
    def panel(
        typing: Any,  # noqa: ARG001
        rows: Any,  # noqa: ARG001
        row_bytes: Any,  # noqa: ARG001
        count: Any,  # noqa: ARG001
        weights: Any,  # noqa: ARG001
        scales: Any,  # noqa: ARG001
        steps: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        out_bytes: Any,  # noqa: ARG001
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            rows, row_bytes, count, weights, scales, steps, out, out_bytes = args

            def tile(num_rows: int, first: Any) -> None:
                at, to = offset(builder, rows, row_bytes, first), offset(builder, out, out_bytes, first)
                addresses = [offset(builder, at, row_bytes, row) for row in range(num_rows)]
                targets = [offset(builder, to, out_bytes, row) for row in range(num_rows)]
                _sum_tile(builder, addresses, steps, steps_of(weights, scales), targets)

            is_few = builder.icmp_signed("<=", count, I64(MAX_REST))
            num_tiles = builder.select(is_few, I64(0), builder.ashr(builder.sub(count, I64(MIN_REST)), I64(3)))
            with cgutils.for_range(builder, num_tiles) as loop:
                tile(TILE, builder.shl(loop.index, I64(3)))
            first = builder.shl(num_tiles, I64(3))
            rest = builder.sub(count, first)
            for size in range(1, MAX_REST + 1):
                with builder.if_then(builder.icmp_signed("==", rest, I64(size))):
                    tile(size, first)
            return context.get_dummy_value()

        return types.void(*[INT] * 8), generate

    return panel


def _sum_tile(builder: Any, rows: list[Any], steps: Any, step: _Step, targets: list[Any]) -> None:
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(2)] for _ in rows]
    for place in (place for places in sums for place in places):
        builder.store(ir.Constant(FLOATS, [0.0] * LANES), place)
    with cgutils.for_range(builder, steps) as loop:
        step(builder, loop.index, rows, sums)
    for target, places in zip(targets, sums, strict=True):
        for half, place in enumerate(places):
            store_at(builder, builder.load(place), offset(builder, target, 64 * half))


def _pair_step(weights: Any, scales: Any) -> _Step:  # noqa: ARG001
    """Two inputs a step, by the processor's product of bfloat16 pairs."""

    def step(builder: Any, index: Any, rows: list[Any], sums: list[list[Any]]) -> None:
        address = offset(builder, weights, index, 2 * 64)
        _fetch_ahead(builder, address, 2 * 64)
        halves = [load_at(builder, builder.add(address, I64(64 * half)), PAIRS) for half in range(2)]
        for row, places in zip(rows, sums, strict=True):
            pair = builder.bitcast(splat(builder, load_at(builder, offset(builder, row, index, 4), I32)), PAIRS)
            for half, place in zip(halves, places, strict=True):
                total = call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", builder.load(place), pair, half)
                builder.store(total, place)

    return step


def _single_step(load: Callable[[Any, Any, int], Any], input_bytes: int) -> Callable[[Any, Any], _Step]:
    """One input a step, in float32. `load(builder, address, half)` gives sixteen weights."""

    def steps_of(weights: Any, scales: Any) -> _Step:  # noqa: ARG001
        def step(builder: Any, index: Any, rows: list[Any], sums: list[list[Any]]) -> None:
            address = offset(builder, weights, index, PANEL * input_bytes)
            _fetch_ahead(builder, address, PANEL * input_bytes)
            halves = [load(builder, builder.add(address, I64(LANES * input_bytes * half)), half) for half in range(2)]
            for row, places in zip(rows, sums, strict=True):
                number = splat(builder, load_at(builder, offset(builder, row, index, 4), F32))
                for half, place in zip(halves, places, strict=True):
                    builder.store(fma(builder, number, half, builder.load(place)), place)

        return step

    return steps_of


def _load_bytes(builder: Any, address: Any, half: int) -> Any:  # noqa: ARG001
    return builder.sitofp(load_at(builder, address, BYTES), FLOATS)


GROUP: Final = 32
"""Inputs that share a scale in int4."""


def _group_step(weights: Any, scales: Any) -> _Step:
    """32 inputs a step, in int4: eight inputs a 32-bit word of each output, then the group's scales."""

    def step(builder: Any, index: Any, rows: list[Any], sums: list[list[Any]]) -> None:
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        for half in range(2):
            parts = [zero for _ in rows]
            for word in range(GROUP // 8):
                start = offset(builder, weights, index, GROUP * PANEL // 2)
                address = builder.add(start, I64(word * PANEL * 4 + half * LANES * 4))
                _fetch_ahead(builder, address, LANES * 4)
                words = load_at(builder, address, WORDS)
                for nibble in range(8):
                    signed = builder.ashr(
                        builder.shl(words, ir.Constant(WORDS, [28 - 4 * nibble] * LANES)),
                        ir.Constant(WORDS, [28] * LANES),
                    )
                    numbers = builder.sitofp(signed, FLOATS)
                    ahead = 4 * (8 * word + nibble)
                    for number, row in enumerate(rows):
                        place = builder.add(offset(builder, row, index, 4 * GROUP), I64(ahead))
                        parts[number] = fma(
                            builder, splat(builder, load_at(builder, place, F32)), numbers, parts[number]
                        )
            scale = load_at(
                builder, builder.add(offset(builder, scales, index, PANEL * 4), I64(half * LANES * 4)), FLOATS
            )
            for part, places in zip(parts, sums, strict=True):
                builder.store(fma(builder, scale, part, builder.load(places[half])), places[half])

    return step


_STEPS: Final = {
    "pairs": _pair_step,
    "bfloat16": _single_step(lambda builder, at, _: widened(builder, load_at(builder, at, SHORTS)), 2),
    "float32": _single_step(lambda builder, at, _: load_at(builder, at, FLOATS), 4),
    "int8": _single_step(_load_bytes, 1),
    "int4": _group_step,
}
PANELS: Final = {kind: _panel(step) for kind, step in _STEPS.items()}
"""For each kind of weights: (rows, row bytes, row count, weights, scales, steps, outputs, output row bytes). A row's
sums are the same for any number of rows."""
