"""Operations on single numbers and addresses that Numba does not have.

LLVM comes with Numba, so that none of this needs a C++ compiler. Memory is given by addresses. Knows instructions; must
not know models.
"""

from __future__ import annotations

from time import CLOCK_MONOTONIC as MONOTONIC
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from workers.native.vectors import F32, I16, I32, I64, INT, load_at, store_at


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing: Any, number: Any) -> Any:  # noqa: ARG001
    """The bits of a float32 number."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], I32)  # noqa: ARG005


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typing: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 number with these bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)  # noqa: ARG005


@intrinsic  # type: ignore[untyped-decorator]
def load_float(typing: Any, address: Any) -> Any:  # noqa: ARG001
    """The float32 number at an address."""
    return types.float32(INT), lambda context, builder, signature, args: load_at(builder, args[0], F32)  # noqa: ARG005


@intrinsic  # type: ignore[untyped-decorator]
def load_short(typing: Any, address: Any) -> Any:  # noqa: ARG001
    """The 16-bit integer at an address."""
    return types.uint16(INT), lambda context, builder, signature, args: load_at(builder, args[0], I16)  # noqa: ARG005


@intrinsic  # type: ignore[untyped-decorator]
def store_float(typing: Any, address: Any, number: Any) -> Any:  # noqa: ARG001
    """Write a float32 number to an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        store_at(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(INT, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_short(typing: Any, address: Any, number: Any) -> Any:  # noqa: ARG001
    """Write a 16-bit integer to an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        store_at(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(INT, types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_atomic(typing: Any, address: Any, number: Any) -> Any:  # noqa: ARG001
    """Add to the integer at an address; returns what it was. Other threads see all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ir.PointerType(I64)), args[1], "seq_cst")

    return INT(INT, INT), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_atomic(typing: Any, address: Any) -> Any:  # noqa: ARG001
    """The integer at an address, as other threads have left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.load_atomic(builder.inttoptr(args[0], ir.PointerType(I64)), "seq_cst", 8)

    return INT(INT), generate


@intrinsic  # type: ignore[untyped-decorator]
def clock_s(typing: Any) -> Any:  # noqa: ARG001
    """Seconds of a clock that nobody sets."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        kind = ir.ArrayType(I64, 2)  # seconds and nanoseconds
        time = cgutils.alloca_once(builder, kind)
        declared = ir.FunctionType(I32, [I32, ir.PointerType(kind)])
        function = cgutils.get_or_insert_function(builder.module, declared, "clock_gettime")
        builder.call(function, [I32(MONOTONIC), time])
        return builder.extract_value(builder.load(time), 0)

    return INT(), generate


@intrinsic  # type: ignore[untyped-decorator]
def yield_processor(typing: Any) -> Any:  # noqa: ARG001
    """Let another thread of this processor run."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate
