"""LLVM code of vectors: their types, loads and stores by address, products and sums.

Vectors have sixteen numbers; LLVM cuts them into what the processor has. Knows LLVM; must not know what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types

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


I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
SHORTS, BYTES, PAIRS = ir.VectorType(I16, LANES), ir.VectorType(I8, LANES), ir.VectorType(_BFloat(), 2 * LANES)
INT = types.int64


def load_at(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, ir.PointerType(kind)), align=align)


def store_at(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type)), align=1)


def fetch(builder: Any, address: Any) -> None:
    """Have the line at an address brought to the cache; any address may be given."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, ir.PointerType(I8)), I32(0), I32(3), I32(1)])


def splat(builder: Any, value: Any, num_lanes: int = LANES) -> Any:
    """A vector with `value` in each lane."""
    empty = ir.Constant(ir.VectorType(value.type, num_lanes), ir.Undefined)
    first = builder.insert_element(empty, value, I32(0))
    return shuffled(builder, first, empty, [0] * num_lanes)


def shuffled(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """These lanes of two vectors, the second one's after the first one's."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), [*lanes]))


def call(builder: Any, name: str, *args: Any, result: Any = None, fastmath: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result or args[0].type, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, args, fastmath=fastmath)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.{'v16f32' if a.type == FLOATS else 'f32'}", a, b, c)


def widened(builder: Any, shorts: Any) -> Any:
    """Sixteen bfloat16 numbers, given by their bits, as float32."""
    words = builder.shl(builder.zext(shorts, WORDS), ir.Constant(WORDS, [16] * LANES))
    return builder.bitcast(words, FLOATS)


def offset(builder: Any, address: Any, *factors: Any) -> Any:
    """`address` plus a product of integers."""
    product = factors[0] if not isinstance(factors[0], int) else I64(factors[0])
    for factor in factors[1:]:
        product = builder.mul(product, factor if not isinstance(factor, int) else I64(factor))
    return builder.add(address, product)
