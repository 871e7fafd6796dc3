"""Vector operations that Numba does not have, as LLVM code: bits of floats, sums of panels, attention, a barrier.

LLVM comes with Numba, so that none of this needs a C++ compiler. Vectors have sixteen numbers; LLVM cuts them into what
the processor has. Memory is given by addresses. Knows instructions; must not know models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES: Final = 16
"""Numbers in a vector."""
HAS_PAIRS: Final = bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))
"""Whether the processor multiplies pairs of bfloat16 numbers."""
PANEL: Final = 32
"""Outputs of a product that are summed at once: two vectors."""


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no type for bfloat16
    """LLVM's bfloat16."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_SHORTS, _BYTES, _PAIRS = ir.VectorType(_I16, LANES), ir.VectorType(_I8, LANES), ir.VectorType(_BFloat(), 2 * LANES)
_INT = types.int64


def _at(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, ir.PointerType(kind)), align=align)


def _put(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type)), align=1)


def _all(builder: Any, value: Any) -> Any:
    """A vector with `value` in each lane."""
    kind = ir.VectorType(value.type, LANES)
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, value, _I32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(_WORDS, [0] * LANES))


def _call(builder: Any, name: str, *args: Any, result: Any = None, fastmath: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result or args[0].type, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, args, fastmath=fastmath)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.{'v16f32' if a.type == _FLOATS else 'f32'}", a, b, c)


def _sum(builder: Any, vector: Any) -> Any:
    return _call(builder, "llvm.vector.reduce.fadd.v16f32", _F32(0.0), vector, fastmath=("reassoc",))


def _widened(builder: Any, shorts: Any) -> Any:
    """Sixteen bfloat16 numbers, given by their bits, as float32."""
    words = builder.shl(builder.zext(shorts, _WORDS), ir.Constant(_WORDS, [16] * LANES))
    return builder.bitcast(words, _FLOATS)


def _offset(builder: Any, address: Any, *factors: Any) -> Any:
    """`address` plus a product of integers."""
    product = factors[0] if not isinstance(factors[0], int) else _I64(factors[0])
    for factor in factors[1:]:
        product = builder.mul(product, factor if not isinstance(factor, int) else _I64(factor))
    return builder.add(address, product)


@intrinsic  # type: ignore[misc]
def bits_of(typing: Any, number: Any) -> Any:  # noqa: ARG001
    """The bits of a float32 number."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _I32)  # noqa: ARG005


@intrinsic  # type: ignore[misc]
def float_of(typing: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 number with these bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], _F32)  # noqa: ARG005


@intrinsic  # type: ignore[misc]
def load_float(typing: Any, address: Any) -> Any:  # noqa: ARG001
    """The float32 number at an address."""
    return types.float32(_INT), lambda context, builder, signature, args: _at(builder, args[0], _F32)  # noqa: ARG005


@intrinsic  # type: ignore[misc]
def load_short(typing: Any, address: Any) -> Any:  # noqa: ARG001
    """The 16-bit integer at an address."""
    return types.uint16(_INT), lambda context, builder, signature, args: _at(builder, args[0], _I16)  # noqa: ARG005


@intrinsic  # type: ignore[misc]
def store_float(typing: Any, address: Any, number: Any) -> Any:  # noqa: ARG001
    """Write a float32 number to an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        _put(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(_INT, types.float32), generate


@intrinsic  # type: ignore[misc]
def store_short(typing: Any, address: Any, number: Any) -> Any:  # noqa: ARG001
    """Write a 16-bit integer to an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        _put(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(_INT, types.uint16), generate


@intrinsic  # type: ignore[misc]
def add_atomic(typing: Any, address: Any, number: Any) -> Any:  # noqa: ARG001
    """Add to the integer at an address; returns what it was. Other threads see all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.PointerType(_I64)), args[1], "seq_cst")

    return _INT(_INT, _INT), generate


@intrinsic  # type: ignore[misc]
def load_atomic(typing: Any, address: Any) -> Any:  # noqa: ARG001
    """The integer at an address, as other threads have left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.load_atomic(builder.inttoptr(args[0], ir.PointerType(_I64)), "seq_cst", 8)

    return _INT(_INT), generate


@intrinsic  # type: ignore[misc]
def yield_processor(typing: Any) -> Any:  # noqa: ARG001
    """Let another thread of this processor run."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


# Sums of a panel: for each of a few rows, 32 outputs over all inputs, in the order of the inputs

AHEAD: Final = 4096
"""Bytes that weights are fetched ahead: the processor's own prefetching ends with each page."""


def _fetch_ahead(builder: Any, address: Any, num_bytes: int) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(_I8), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for line in range(0, num_bytes, 64):
        ahead = builder.inttoptr(builder.add(address, _I64(AHEAD + line)), ir.PointerType(_I8))
        builder.call(function, [ahead, _I32(0), _I32(3), _I32(1)])


_Step = Callable[[Any, Any, list[Any], list[list[Any]]], None]
"""(builder, number of this step, addresses of the rows, accumulators by row and vector)."""


def _panel(steps_of: Callable[[Any, Any], _Step]) -> Any:
    """An intrinsic that multiplies `count` rows by a panel of weights: eight at once, then four, two and one."""

    @intrinsic  # type: ignore[misc]
    def panel(
        typing: Any,
        rows: Any,
        row_bytes: Any,
        count: Any,
        weights: Any,
        scales: Any,
        steps: Any,
        out: Any,
        out_bytes: Any,
    ) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            rows, row_bytes, count, weights, scales, steps, out, out_bytes = args

            def tile(num_rows: int, first: Any) -> None:
                at, to = _offset(builder, rows, row_bytes, first), _offset(builder, out, out_bytes, first)
                addresses = [_offset(builder, at, row_bytes, row) for row in range(num_rows)]
                targets = [_offset(builder, to, out_bytes, row) for row in range(num_rows)]
                _sum_tile(builder, addresses, steps, steps_of(weights, scales), targets)

            with cgutils.for_range(builder, builder.lshr(count, _I64(3))) as loop:
                tile(8, builder.shl(loop.index, _I64(3)))
            for size in (4, 2, 1):
                has_tile = builder.icmp_signed("!=", builder.and_(count, _I64(size)), _I64(0))
                with builder.if_then(has_tile):
                    tile(size, builder.and_(count, _I64(-2 * size)))
            return context.get_dummy_value()

        return types.void(*[_INT] * 8), generate

    return panel


def _sum_tile(builder: Any, rows: list[Any], steps: Any, step: _Step, targets: list[Any]) -> None:
    sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(2)] for _ in rows]
    for place in (place for places in sums for place in places):
        builder.store(ir.Constant(_FLOATS, [0.0] * LANES), place)
    with cgutils.for_range(builder, steps) as loop:
        step(builder, loop.index, rows, sums)
    for target, places in zip(targets, sums, strict=True):
        for half, place in enumerate(places):
            _put(builder, builder.load(place), _offset(builder, target, 64 * half))


def _pair_step(weights: Any, scales: Any) -> _Step:  # noqa: ARG001
    """Two inputs a step, by the processor's product of bfloat16 pairs."""

    def step(builder: Any, index: Any, rows: list[Any], sums: list[list[Any]]) -> None:
        address = _offset(builder, weights, index, 2 * 64)
        _fetch_ahead(builder, address, 2 * 64)
        halves = [_at(builder, builder.add(address, _I64(64 * half)), _PAIRS) for half in range(2)]
        for row, places in zip(rows, sums, strict=True):
            pair = builder.bitcast(_all(builder, _at(builder, _offset(builder, row, index, 4), _I32)), _PAIRS)
            for half, place in zip(halves, places, strict=True):
                total = _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", builder.load(place), pair, half)
                builder.store(total, place)

    return step


def _single_step(load: Callable[[Any, Any, int], Any], input_bytes: int) -> Callable[[Any, Any], _Step]:
    """One input a step, in float32. `load(builder, address, half)` gives sixteen weights."""

    def steps_of(weights: Any, scales: Any) -> _Step:  # noqa: ARG001
        def step(builder: Any, index: Any, rows: list[Any], sums: list[list[Any]]) -> None:
            address = _offset(builder, weights, index, PANEL * input_bytes)
            _fetch_ahead(builder, address, PANEL * input_bytes)
            halves = [load(builder, builder.add(address, _I64(LANES * input_bytes * half)), half) for half in range(2)]
            for row, places in zip(rows, sums, strict=True):
                number = _all(builder, _at(builder, _offset(builder, row, index, 4), _F32))
                for half, place in zip(halves, places, strict=True):
                    builder.store(_fma(builder, number, half, builder.load(place)), place)

        return step

    return steps_of


def _load_bytes(builder: Any, address: Any, half: int) -> Any:  # noqa: ARG001
    return builder.sitofp(_at(builder, address, _BYTES), _FLOATS)


GROUP: Final = 32
"""Inputs that share a scale in int4."""


def _group_step(weights: Any, scales: Any) -> _Step:
    """32 inputs a step, in int4: eight inputs a 32-bit word of each output, then the group's scales."""

    def step(builder: Any, index: Any, rows: list[Any], sums: list[list[Any]]) -> None:
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        for half in range(2):
            parts = [zero for _ in rows]
            for word in range(GROUP // 8):
                start = _offset(builder, weights, index, GROUP * PANEL // 2)
                address = builder.add(start, _I64(word * PANEL * 4 + half * LANES * 4))
                _fetch_ahead(builder, address, LANES * 4)
                words = _at(builder, address, _WORDS)
                for nibble in range(8):
                    signed = builder.ashr(
                        builder.shl(words, ir.Constant(_WORDS, [28 - 4 * nibble] * LANES)),
                        ir.Constant(_WORDS, [28] * LANES),
                    )
                    numbers = builder.sitofp(signed, _FLOATS)
                    offset = 4 * (8 * word + nibble)
                    for number, row in enumerate(rows):
                        place = builder.add(_offset(builder, row, index, 4 * GROUP), _I64(offset))
                        parts[number] = _fma(builder, _all(builder, _at(builder, place, _F32)), numbers, parts[number])
            scale = _at(
                builder, builder.add(_offset(builder, scales, index, PANEL * 4), _I64(half * LANES * 4)), _FLOATS
            )
            for part, places in zip(parts, sums, strict=True):
                builder.store(_fma(builder, scale, part, builder.load(places[half])), places[half])

    return step


_STEPS: Final = {
    "pairs": _pair_step,
    "bfloat16": _single_step(lambda builder, at, _: _widened(builder, _at(builder, at, _SHORTS)), 2),
    "float32": _single_step(lambda builder, at, _: _at(builder, at, _FLOATS), 4),
    "int8": _single_step(_load_bytes, 1),
    "int4": _group_step,
}
PANELS: Final = {kind: _panel(step) for kind, step in _STEPS.items()}
"""For each kind of weights: (rows, row bytes, row count, weights, scales, steps, outputs, output row bytes). A row's sums
are the same for any number of rows."""


# Attention of one query over rows of keys and values, given by their byte offsets


@intrinsic  # type: ignore[misc]
def scores_of(typing: Any, query: Any, offsets: Any, count: Any, keys: Any, width: Any, is_short: Any, out: Any) -> Any:  # noqa: ARG001
    """Products of a query [width] with `count` keys, to `out` [count]. Keys are bfloat16 if `is_short`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        query, offsets, count, keys, width, is_short, out = args
        with builder.if_else(is_short) as (short, wide):
            with short:
                widen = lambda at: _widened(builder, _at(builder, at, _SHORTS))  # noqa: E731
                _scores(builder, args, 2, widen, lambda at: _widened_one(builder, at))
            with wide:
                _scores(builder, args, 4, lambda at: _at(builder, at, _FLOATS), lambda at: _at(builder, at, _F32))
        return context.get_dummy_value()

    return types.void(_INT, _INT, _INT, _INT, _INT, types.boolean, _INT), generate


def _widened_one(builder: Any, address: Any) -> Any:
    bits = builder.shl(builder.zext(_at(builder, address, _I16), _I32), _I32(16))
    return builder.bitcast(bits, _F32)


def _scores(
    builder: Any, args: Any, item_bytes: int, load: Callable[[Any], Any], load_one: Callable[[Any], Any]
) -> None:
    query, offsets, count, keys, width, _, out = args
    total, rest = cgutils.alloca_once(builder, _FLOATS), cgutils.alloca_once(builder, _F32)
    with cgutils.for_range(builder, count) as each:
        key = builder.add(keys, _at(builder, _offset(builder, offsets, each.index, 8), _I64))
        builder.store(ir.Constant(_FLOATS, [0.0] * LANES), total)
        with cgutils.for_range(builder, builder.udiv(width, _I64(LANES))) as part:
            numbers = load(_offset(builder, key, part.index, LANES * item_bytes))
            asked = _at(builder, _offset(builder, query, part.index, LANES * 4), _FLOATS)
            builder.store(_fma(builder, asked, numbers, builder.load(total)), total)
        builder.store(_sum(builder, builder.load(total)), rest)
        first = builder.and_(width, _I64(-LANES))
        with cgutils.for_range(builder, builder.sub(width, first)) as left:
            index = builder.add(first, left.index)
            number = load_one(_offset(builder, key, index, item_bytes))
            asked = _at(builder, _offset(builder, query, index, 4), _F32)
            builder.store(_fma(builder, asked, number, builder.load(rest)), rest)
        _put(builder, builder.load(rest), _offset(builder, out, each.index, 4))


def _weigher(num_vectors: int) -> Any:
    """An intrinsic: the sum of `count` rows of values, each times its weight, to `out` [16 * num_vectors]."""

    @intrinsic  # type: ignore[misc]
    def weigh(typing: Any, weights: Any, offsets: Any, count: Any, values: Any, is_short: Any, out: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            with builder.if_else(args[4]) as (short, wide):
                with short:
                    _weigh(builder, args, num_vectors, 2, lambda at: _widened(builder, _at(builder, at, _SHORTS)))
                with wide:
                    _weigh(builder, args, num_vectors, 4, lambda at: _at(builder, at, _FLOATS))
            return context.get_dummy_value()

        return types.void(_INT, _INT, _INT, _INT, types.boolean, _INT), generate

    return weigh


def _weigh(builder: Any, args: Any, num_vectors: int, item_bytes: int, load: Callable[[Any], Any]) -> None:
    weights, offsets, count, values, _, out = args
    totals = [cgutils.alloca_once(builder, _FLOATS) for _ in range(num_vectors)]
    for total in totals:
        builder.store(ir.Constant(_FLOATS, [0.0] * LANES), total)
    with cgutils.for_range(builder, count) as each:
        row = builder.add(values, _at(builder, _offset(builder, offsets, each.index, 8), _I64))
        weight = _all(builder, _at(builder, _offset(builder, weights, each.index, 4), _F32))
        for number, total in enumerate(totals):
            numbers = load(builder.add(row, _I64(number * LANES * item_bytes)))
            builder.store(_fma(builder, weight, numbers, builder.load(total)), total)
    for number, total in enumerate(totals):
        _put(builder, builder.load(total), builder.add(out, _I64(number * LANES * 4)))


weigh_four, weigh_one = _weigher(4), _weigher(1)
