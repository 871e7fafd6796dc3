"""LLVM code of attention: a few queries over the same keys and values, given by their byte offsets.

A query's sums are made of the same operations in the same order whatever queries are beside it. Knows instructions;
must not know blocks or sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workers.native.vectors import (
    F32,
    FLOATS,
    HAS_PAIRS,
    I16,
    I32,
    I64,
    INT,
    LANES,
    PAIRS,
    SHORTS,
    WORDS,
    call,
    fetch,
    fma,
    load_at,
    offset,
    shuffled,
    splat,
    store_at,
    widened,
)

AHEAD: Final = 16
"""Rows that are fetched ahead. Lists of offsets have this many more, and `TOGETHER`, of any rows."""
TOGETHER: Final = 4
"""Keys whose scores are made at once."""
PART: Final = 2 * LANES
"""Numbers of a query or an output that are taken at once. Both are padded to a multiple."""
_BITS = ir.VectorType(I16, PART)
_NONE: Final = ir.Constant(FLOATS, [0.0] * LANES)


class _Numbers:
    """Loads of keys and values, `PART` numbers at a time, and products with them."""

    def __init__(self, builder: Any, *, is_short: bool) -> None:
        self.builder, self.is_short, self.has_pairs = builder, is_short, is_short and HAS_PAIRS
        self.item_bytes = 2 if is_short else 4

    def load(self, address: Any, count: Any = None) -> list[Any]:
        """Load two vectors of numbers, or one of pairs. Numbers from `count` on are not read; they are 0."""
        if self.has_pairs:
            return [self._loaded(_BITS, address, count)]
        halves = [self.builder.add(address, I64(self.item_bytes * LANES * half)) for half in range(2)]
        counts = [count and self.builder.sub(count, I64(LANES * half)) for half in range(2)]
        kind = SHORTS if self.is_short else FLOATS
        loaded = [self._loaded(kind, *each) for each in zip(halves, counts, strict=True)]
        return [widened(self.builder, each) for each in loaded] if self.is_short else loaded

    def _loaded(self, kind: Any, address: Any, count: Any) -> Any:
        builder = self.builder
        if count is None:
            return load_at(builder, address, kind)
        size = kind.count
        lanes = ir.Constant(ir.VectorType(I64, size), list(range(size)))
        mask = builder.icmp_signed("<", lanes, splat(builder, count, size))
        pointer = builder.inttoptr(address, ir.PointerType(kind))
        name = f"llvm.masked.load.v{size}{'f32' if kind == FLOATS else 'i16'}.p0"
        none = ir.Constant(kind, [0] * size)
        return call(builder, name, pointer, I32(1), mask, none, result=kind)

    def multiplied(self, numbers: Sequence[Any], query: Any, total: Any) -> Any:
        """`total` and the products of a key's numbers with those of a query at an address."""
        builder = self.builder
        if self.has_pairs:
            (key,) = numbers
            return _dot(builder, total, load_at(builder, query, _BITS), key)
        for half, key in enumerate(numbers):
            asked = load_at(builder, builder.add(query, I64(4 * LANES * half)), FLOATS)
            total = fma(builder, asked, key, total)
        return total


def _dot(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """`total` and the products of pairs of bfloat16 numbers, given by their bits."""
    return call(
        builder, "llvm.x86.avx512bf16.dpbf16ps.512", total, builder.bitcast(a, PAIRS), builder.bitcast(b, PAIRS)
    )


def _in_parts(builder: Any, width: Any, part: Callable[[Any, Any], None]) -> None:
    """Code for each part of `width` numbers: `part(index, count)`, with a count if the part is not whole."""
    with cgutils.for_range(builder, builder.udiv(width, I64(PART))) as whole:
        part(whole.index, None)
    rest = builder.and_(width, I64(PART - 1))
    with builder.if_then(builder.icmp_signed("!=", rest, I64(0))):
        part(builder.udiv(width, I64(PART)), rest)


def _by_kind(builder: Any, is_short: Any, generate: Callable[[_Numbers], None]) -> None:
    with builder.if_else(is_short) as (short, wide):
        with short:
            generate(_Numbers(builder, is_short=True))
        with wide:
            generate(_Numbers(builder, is_short=False))


def _over_rows(generate_kind: Callable[[Any, Any, int, _Numbers], None], num_queries: int) -> Any:
    """An intrinsic for `num_queries` queries over rows of keys or values, given by their byte offsets."""

    @intrinsic  # type: ignore[untyped-decorator]
    def over_rows(
        typing: Any,  # noqa: ARG001
        given: Any,  # noqa: ARG001
        given_bytes: Any,  # noqa: ARG001
        offsets: Any,  # noqa: ARG001
        count: Any,  # noqa: ARG001
        rows: Any,  # noqa: ARG001
        width: Any,  # noqa: ARG001
        is_short: Any,  # noqa: ARG001
        out: Any,  # noqa: ARG001
        out_bytes: Any,  # noqa: ARG001
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            _by_kind(builder, args[6], lambda numbers: generate_kind(builder, args, num_queries, numbers))
            return context.get_dummy_value()

        return types.void(*[INT] * 6, types.boolean, INT, INT), generate

    return over_rows


def _scores(builder: Any, args: Any, num_queries: int, numbers: _Numbers) -> None:
    """Products of queries with `count` keys. Queries are bfloat16 where the processor has pairs."""
    queries, query_bytes, offsets, count, keys, width, _, out, out_bytes = args
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in range(TOGETHER)] for _ in range(num_queries)]
    asked = [offset(builder, queries, query_bytes, number) for number in range(num_queries)]
    part_bytes = PART * (2 if numbers.has_pairs else 4)
    with cgutils.for_range(builder, builder.udiv(builder.add(count, I64(TOGETHER - 1)), I64(TOGETHER))) as group:
        first = offset(builder, offsets, group.index, 8 * TOGETHER)
        starts = [_start(builder, keys, first, number) for number in range(TOGETHER)]
        ahead = [_start(builder, keys, first, AHEAD + number) for number in range(TOGETHER)]
        for place in (place for places in totals for place in places):
            builder.store(_NONE, place)

        def part(index: Any, left: Any) -> None:
            shift = builder.mul(index, I64(PART * numbers.item_bytes))
            for number in range(TOGETHER):
                _fetch(builder, builder.add(ahead[number], shift), PART * numbers.item_bytes)
                key = numbers.load(builder.add(starts[number], shift), left)
                for query, places in zip(asked, totals, strict=True):
                    at = offset(builder, query, index, part_bytes)
                    builder.store(numbers.multiplied(key, at, builder.load(places[number])), places[number])

        _in_parts(builder, width, part)
        for number, places in enumerate(totals):
            found = _sums(builder, [builder.load(place) for place in places])
            to = offset(builder, offset(builder, out, out_bytes, number), group.index, 4 * TOGETHER)
            store_at(builder, found, to)


def _start(builder: Any, base: Any, offsets: Any, number: int) -> Any:
    return builder.add(base, load_at(builder, builder.add(offsets, I64(8 * number)), I64))


def _fetch(builder: Any, address: Any, num_bytes: int) -> None:
    for line in range(0, num_bytes, 64):
        fetch(builder, builder.add(address, I64(line)))


def _sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """The sum of the lanes of each of four vectors.  # [4]"""
    eighths = [*range(8), *range(16, 24)]
    a, b = _folded(builder, vectors[0], vectors[1], eighths, 8), _folded(builder, vectors[2], vectors[3], eighths, 8)
    quarter = [lane + 8 * number for number in range(4) for lane in range(4)]
    found = _folded(builder, a, b, quarter, 4)
    for step in (2, 1):
        found = builder.fadd(found, shuffled(builder, found, found, [lane ^ step for lane in range(LANES)]))
    return shuffled(builder, found, found, [0, 4, 8, 12])


def _folded(builder: Any, a: Any, b: Any, lanes: Sequence[int], step: int) -> Any:
    """These lanes of two vectors, each added to the one `step` lanes on."""
    return builder.fadd(shuffled(builder, a, b, lanes), shuffled(builder, a, b, [lane + step for lane in lanes]))


def _weigh(builder: Any, args: Any, num_queries: int, numbers: _Numbers) -> None:
    """Add `count` rows of values, each times its weight, to outputs.

    Weights are bfloat16 where the processor has pairs; of an odd number of them the next one is 0.
    """
    weights, weight_bytes, offsets, count, values, width, _, out, out_bytes = args
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in range(2)] for _ in range(num_queries)]
    of_query = [offset(builder, weights, weight_bytes, number) for number in range(num_queries)]
    rows = 2 if numbers.has_pairs else 1
    num_steps = builder.udiv(builder.add(count, I64(rows - 1)), I64(rows))

    def part(index: Any, left: Any) -> None:
        shift = builder.mul(index, I64(PART * numbers.item_bytes))
        to = [
            [offset(builder, offset(builder, out, out_bytes, number), index, 4 * PART), 64 * half]
            for number in range(num_queries)
            for half in range(2)
        ]
        places = [place for pair in totals for place in pair]
        for (start, more), place in zip(to, places, strict=True):
            builder.store(load_at(builder, builder.add(start, I64(more)), FLOATS), place)
        with cgutils.for_range(builder, num_steps) as step:
            first = offset(builder, offsets, step.index, 8 * rows)
            for row in range(rows):
                ahead = builder.add(_start(builder, values, first, AHEAD + row), shift)
                _fetch(builder, ahead, PART * numbers.item_bytes)
            starts = [builder.add(_start(builder, values, first, row), shift) for row in range(rows)]
            loaded = [numbers.load(start, left) for start in starts]
            halves = _interleaved(builder, *(each for (each,) in loaded)) if numbers.has_pairs else loaded[0]
            for pair, query in zip(totals, of_query, strict=True):
                weight = load_at(builder, offset(builder, query, step.index, 4), I32 if numbers.has_pairs else F32)
                for half, place in zip(halves, pair, strict=True):
                    total, factor = builder.load(place), splat(builder, weight)
                    product = _dot if numbers.has_pairs else lambda builder, c, a, b: fma(builder, a, b, c)
                    builder.store(product(builder, total, factor, half), place)
        for (start, more), place in zip(to, places, strict=True):
            store_at(builder, builder.load(place), builder.add(start, I64(more)))

    _in_parts(builder, width, part)


def _interleaved(builder: Any, a: Any, b: Any) -> list[Any]:
    """Pairs of the numbers of two rows: of the first half, then of the second."""
    return [
        shuffled(builder, a, b, [lane + PART * row for lane in range(16 * half, 16 * half + 16) for row in range(2)])
        for half in range(2)
    ]


@intrinsic  # type: ignore[untyped-decorator]
def to_shorts(typing: Any, source: Any, count: Any, target: Any) -> Any:  # noqa: ARG001
    """Round a multiple of sixteen numbers to bfloat16. The target may be the source."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        source, count, target = args
        with cgutils.for_range(builder, builder.udiv(count, I64(LANES))) as each:
            numbers = load_at(builder, offset(builder, source, each.index, 4 * LANES), FLOATS)
            store_at(builder, _rounded(builder, numbers), offset(builder, target, each.index, 2 * LANES))
        return context.get_dummy_value()

    return types.void(INT, INT, INT), generate


def _rounded(builder: Any, numbers: Any) -> Any:
    """The bits of the nearest bfloat16 numbers."""
    bits = builder.bitcast(numbers, WORDS)
    one, half, shift = (ir.Constant(WORDS, [number] * LANES) for number in (1, 0x7FFF, 16))
    is_odd = builder.and_(builder.lshr(bits, shift), one)
    return builder.trunc(builder.lshr(builder.add(builder.add(bits, half), is_odd), shift), SHORTS)


scores_of_four, scores_of_two, scores_of_one = (_over_rows(_scores, number) for number in (4, 2, 1))
weigh_for_four, weigh_for_two, weigh_for_one = (_over_rows(_weigh, number) for number in (4, 2, 1))
