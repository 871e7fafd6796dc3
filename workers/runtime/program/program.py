"""A program: tables of integers and constants, for any number of rows.

Knows codes and registers; must not know operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.native.matrix import Matrix
from workers.runtime.program.codes import Codes
from workers.runtime.program.recorder import Operation
from workers.runtime.program.values import ALL, WANTED, Register, Stretch


@dataclass(slots=True)
class Program:
    """All inputs of `machine.run` except a step's rows."""

    stages: NDArray[np.int64]
    codes: NDArray[np.int64]
    constants: NDArray[np.float32]
    widths: tuple[int, int]
    """Numbers that a row, and a wanted row, has in all registers."""
    logits: Register
    vocab_size: int
    given: Register | None
    """Rows that the caller brings."""
    rows_of_ids: NDArray[np.int64] | None
    """Row of each token in the embedding of a rank that has only some; None if that is the token itself."""
    states: Sequence[Stretch]
    """The hidden states of each tapped layer, of all rows."""
    tables: Sequence[tuple[int, Tensor, int]]
    """Codes that look up a position, the recorded tensor that they need, and its dimension of rows."""
    positions: Tensor
    of_positions: Sequence[Operation]
    """Operations that compute these tensors from positions."""
    products: Sequence[tuple[int, Matrix]]
    """The code and the matrix of each product."""
    attended: Sequence[tuple[int, int]]
    """The code and the layer of each attention."""
    kept: Sequence[Any]
    """Tensors whose addresses are in the codes."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Stages and codes as tables, with all registers in their places."""

    stages: NDArray[np.int64]
    codes: NDArray[np.int64]
    widths: tuple[int, int]
    index_of: Mapping[int, int]
    """Row of each code, by its identity."""


def tables_of(codes: Codes, kept: Sequence[Register]) -> Tables:
    """`kept`: registers that are read after the last stage."""
    for register in kept:
        register.last_stage = len(codes.stages)
    widths = (_place(codes, ALL), _place(codes, WANTED))
    width = max(len(code) for stage in codes.stages for code, _ in stage.codes)
    rows: list[list[int]] = []
    stages = []
    index_of: dict[int, int] = {}
    for stage in codes.stages:
        stages.append([stage.kind, len(rows), len(stage.codes), stage.space])
        for code, registers in stage.codes:
            index_of[id(code)] = len(rows)
            rows.append(_placed(code, registers) + [0] * (width - len(code)))
    return Tables(np.array(stages, np.int64), np.array(rows, np.int64), widths, index_of)


def _place(codes: Codes, space: int) -> int:
    """Give registers their places; those of the same width share one if their times do not overlap."""
    registers = {id(each): each for stage in codes.stages for _, named in stage.codes for each in named.values()}
    mine = sorted((each for each in registers.values() if each.space == space), key=lambda each: each.first_stage)
    free: dict[int, list[tuple[int, int]]] = {}
    total = 0
    for register in mine:
        places = free.setdefault(register.width, [])
        reusable = next((place for place in places if place[1] < register.first_stage), None)
        if reusable is None:
            register.offset, total = total, total + register.width
        else:
            places.remove(reusable)
            register.offset = reusable[0]
        places.append((register.offset, register.last_stage))
    return total


def _placed(code: list[int], registers: Mapping[int, Register]) -> list[int]:
    """The code with its registers' places."""
    placed = code[:]
    for column, register in registers.items():
        placed[column] = (code[column] << 32) + register.offset  # where in the row, and where the row is
        placed[column + 1] = register.width
    return placed
