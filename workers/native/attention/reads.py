"""LLVM code of attention: one query over rows of keys and values, given by their byte offsets.

Knows instructions; must not know blocks or sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workers.native.vectors import (
    F32,
    FLOATS,
    I16,
    I32,
    I64,
    INT,
    LANES,
    SHORTS,
    fetch,
    fma,
    load_at,
    offset,
    splat,
    store_at,
    sum_of,
    widened,
)

AHEAD: Final = 16
"""Rows that are fetched ahead. Lists of offsets have this many more, of any rows."""


@intrinsic  # type: ignore[untyped-decorator]
def scores_of(typing: Any, query: Any, offsets: Any, count: Any, keys: Any, width: Any, is_short: Any, out: Any) -> Any:  # noqa: ARG001
    """Products of a query [width] with `count` keys, to `out` [count]. Keys are bfloat16 if `is_short`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        with builder.if_else(args[5]) as (short, wide):
            with short:
                widen = lambda at: widened(builder, load_at(builder, at, SHORTS))  # noqa: E731
                _scores(builder, args, 2, widen, lambda at: _widened_one(builder, at))
            with wide:
                _scores(builder, args, 4, lambda at: load_at(builder, at, FLOATS), lambda at: load_at(builder, at, F32))
        return context.get_dummy_value()

    return types.void(INT, INT, INT, INT, INT, types.boolean, INT), generate


def _widened_one(builder: Any, address: Any) -> Any:
    bits = builder.shl(builder.zext(load_at(builder, address, I16), I32), I32(16))
    return builder.bitcast(bits, F32)


def _ahead(builder: Any, rows: Any, offsets: Any, index: Any) -> Any:
    """Address of the row that is read AHEAD rows later; of any row at the end."""
    return builder.add(rows, load_at(builder, offset(builder, offsets, builder.add(index, I64(AHEAD)), 8), I64))


def _scores(
    builder: Any, args: Any, item_bytes: int, load: Callable[[Any], Any], load_one: Callable[[Any], Any]
) -> None:
    query, offsets, count, keys, width, _, out = args
    total, rest = cgutils.alloca_once(builder, FLOATS), cgutils.alloca_once(builder, F32)
    with cgutils.for_range(builder, count) as each:
        key = builder.add(keys, load_at(builder, offset(builder, offsets, each.index, 8), I64))
        ahead = _ahead(builder, keys, offsets, each.index)
        builder.store(ir.Constant(FLOATS, [0.0] * LANES), total)
        with cgutils.for_range(builder, builder.udiv(width, I64(LANES))) as part:
            numbers = load(offset(builder, key, part.index, LANES * item_bytes))
            fetch(builder, offset(builder, ahead, part.index, LANES * item_bytes))
            asked = load_at(builder, offset(builder, query, part.index, LANES * 4), FLOATS)
            builder.store(fma(builder, asked, numbers, builder.load(total)), total)
        builder.store(sum_of(builder, builder.load(total)), rest)
        first = builder.and_(width, I64(-LANES))
        with cgutils.for_range(builder, builder.sub(width, first)) as left:
            index = builder.add(first, left.index)
            number = load_one(offset(builder, key, index, item_bytes))
            asked = load_at(builder, offset(builder, query, index, 4), F32)
            builder.store(fma(builder, asked, number, builder.load(rest)), rest)
        store_at(builder, builder.load(rest), offset(builder, out, each.index, 4))


def _weigher(num_vectors: int) -> Any:
    """An intrinsic: add `count` rows of values, each times its weight, to `out` [16 * num_vectors]."""

    @intrinsic  # type: ignore[untyped-decorator]
    def weigh(typing: Any, weights: Any, offsets: Any, count: Any, values: Any, is_short: Any, out: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            with builder.if_else(args[4]) as (short, wide):
                with short:
                    _weigh(builder, args, num_vectors, 2, lambda at: widened(builder, load_at(builder, at, SHORTS)))
                with wide:
                    _weigh(builder, args, num_vectors, 4, lambda at: load_at(builder, at, FLOATS))
            return context.get_dummy_value()

        return types.void(INT, INT, INT, INT, types.boolean, INT), generate

    return weigh


def _weigh(builder: Any, args: Any, num_vectors: int, item_bytes: int, load: Callable[[Any], Any]) -> None:
    weights, offsets, count, values, _, out = args
    totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(num_vectors)]
    for number, total in enumerate(totals):
        builder.store(load_at(builder, builder.add(out, I64(number * LANES * 4)), FLOATS), total)
    with cgutils.for_range(builder, count) as each:
        row = builder.add(values, load_at(builder, offset(builder, offsets, each.index, 8), I64))
        ahead = _ahead(builder, values, offsets, each.index)
        for line in range(0, num_vectors * LANES * item_bytes, 64):
            fetch(builder, builder.add(ahead, I64(line)))
        weight = splat(builder, load_at(builder, offset(builder, weights, each.index, 4), F32))
        for number, total in enumerate(totals):
            numbers = load(builder.add(row, I64(number * LANES * item_bytes)))
            builder.store(fma(builder, weight, numbers, builder.load(total)), total)
    for number, total in enumerate(totals):
        store_at(builder, builder.load(total), builder.add(out, I64(number * LANES * 4)))


weigh_four, weigh_one = _weigher(4), _weigher(1)
