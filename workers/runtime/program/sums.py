"""Sums over a row's numbers, and the norms made of them.

Knows the machine's codes; must not know torch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from workers.native import arithmetic, machine
from workers.runtime.program.codes import NO_OPERAND, Codes
from workers.runtime.program.places import Unsupported, by_row, row_dim_of
from workers.runtime.program.values import Register, Value, filling


def total(codes: Codes, value: Value, dims: Sequence[int] = (-1,), *, keeps: bool = True) -> Value:
    """The sum over the last dimension. Raises: Unsupported for any other."""
    rank = value.addresses.dim()
    if [dim % rank for dim in dims] != [rank - 1]:
        raise Unsupported("it sums over more than the last dimension")
    shape = (*value.addresses.shape[:-1], 1)
    register = Register(prod(shape) // value.num_rows, value.register.space)
    out = filling(register, shape, row_dim_of(value.addresses))
    source, target = by_row(value.addresses), by_row(out.addresses)
    length = value.addresses.shape[-1]
    starts = source.view(-1, length)[:, 0]
    for place, start, row in zip(target.tolist(), starts.tolist(), source.view(-1, length), strict=True):
        if not torch.equal(row, torch.arange(start, start + length)):
            raise Unsupported("it sums numbers that do not follow each other")
        code = [arithmetic.SUM, 1, length, 0, 0, 0, 0, machine.REGISTER, 0, 0, 0, 1, *NO_OPERAND]
        registers, places = {3: register, 8: value.register}, {3: place, 8: start}
        codes.emit(machine.ROWS, register.space, code, registers, [value.register], places)
    return out if keeps else Value(register, out.addresses.squeeze(-1))


def mean(codes: Codes, value: Value) -> Value:
    return codes.computed(arithmetic.MUL, total(codes, value), codes.constant(1 / value.addresses.shape[-1]))


def layer_norm(codes: Codes, value: Value, weight: Value | None, bias: Value | None, epsilon: float) -> Value:
    centred = codes.computed(arithmetic.SUB, value, mean(codes, value))
    variance = mean(codes, codes.computed(arithmetic.MUL, centred, centred))
    scale = codes.computed(arithmetic.RSQRT, codes.computed(arithmetic.ADD, variance, codes.constant(epsilon)))
    found = codes.computed(arithmetic.MUL, centred, scale)
    if weight is not None:
        found = codes.computed(arithmetic.MUL, found, weight)
    return found if bias is None else codes.computed(arithmetic.ADD, found, bias)
