"""Codes of linear layers, attention and tables.

Knows the machine's codes; must not know torch's operators.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from workers.native import arithmetic, machine
from workers.native.matrix import Matrix
from workers.native.ranks.shared import PART
from workers.native.vectors import PANEL
from workers.runtime.program.codes import Codes
from workers.runtime.program.places import Unsupported, by_row, row_dim_of
from workers.runtime.program.recorder import Attended, Exchanged, Product
from workers.runtime.program.values import ALL, Register, Value, filling

Made: TypeAlias = tuple[Value, list[int]]
"""A result, and its code."""


def product(codes: Codes, product: Product, rows: Value, matrix: Matrix) -> Made:
    rows = codes.contiguous(rows)
    register = Register(matrix.num_panels * PANEL, rows.register.space)
    code = [matrix.kind, 0, 0, 0, 0, *[0] * 9, int(product.result.dtype == torch.bfloat16)]
    registers, start = {1: rows.register, 3: register}, int(by_row(rows.addresses)[0])
    codes.emit(machine.PRODUCTS, register.space, code, registers, [rows.register], {1: start})
    return filling(register, product.result.shape, row_dim_of(rows.addresses)), code


def attention(codes: Codes, attended: Attended, query: Value, key: Value, value: Value) -> Made:
    kind, (_, num_heads, _, key_width) = attended.kind, attended.query.shape
    num_kv_heads, value_width = attended.key.shape[1], attended.value.shape[3]
    register = Register(num_heads * value_width, ALL)
    sinks = 0 if kind.sinks is None else codes.constant_vector(kind.sinks.detach().float().numpy())
    floats = (int(np.float32(number).view(np.uint32)) for number in (kind.scale, kind.softcap or 0.0))
    is_short = attended.result.dtype == torch.bfloat16
    code = [0] * 10 + [num_kv_heads * key_width, num_kv_heads * value_width, kind.window or 0, int(is_short)]
    code += [num_heads, num_heads // num_kv_heads, key_width, value_width, *floats, int(kind.sinks is not None), sinks]
    read = [codes.contiguous(each, at_start=True).register for each in (query, key, value)]  # by row, then by head
    codes.emit(machine.ATTENTION, ALL, code, {0: read[0], 2: read[1], 4: read[2], 6: register}, read)
    return filling(register, attended.result.shape, 1), code


def exchange(codes: Codes, exchanged: Exchanged, rows: Value) -> Value:
    """The sum of all ranks' rows, or their rows side by side. Raises: Unsupported."""
    rows = codes.contiguous(rows)
    row_dim, places = row_dim_of(rows.addresses), by_row(rows.addresses)
    if len(places) > PART or not (exchanged.is_sum or len(places) == exchanged.part.shape[-1]):
        raise Unsupported("its ranks exchange rows that are too wide, or parts of rows")
    num_ranks = exchanged.result.shape[-1] // exchanged.part.shape[-1]
    register = Register(num_ranks * len(places), rows.register.space)
    rounds = exchanged.is_sum and exchanged.result.dtype == torch.bfloat16
    code = [int(not exchanged.is_sum), 0, 0, 0, 0, len(places), int(rounds)]
    registers = {1: rows.register, 3: register}
    codes.emit(machine.EXCHANGES, register.space, code, registers, [rows.register], {1: int(places[0])})
    return filling(register, exchanged.result.shape, row_dim)


def lookup(codes: Codes, like: torch.Tensor, row_dim: int, *, by_position: bool) -> Made:
    """A row of a table for each row, in a value of a tensor's shape. The caller completes the code's last columns:
    the table's address, its stride, and whether it is bfloat16."""
    register = Register(like.numel() // like.shape[row_dim], ALL)
    code = [arithmetic.LOOKUP, 1, register.width, 0, 0, 0, 0, int(by_position), 0, 4 * register.width, 0]
    codes.emit(machine.ROWS, ALL, code, {3: register}, [])
    return filling(register, like.shape, row_dim), code
