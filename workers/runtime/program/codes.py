"""The codes of a program: operations on values, in stages that all threads run together, and constants.

Knows the machine's codes; must not know torch's operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from workers.native import arithmetic, machine
from workers.runtime.program.places import Part, Unsupported, by_row, row_dim_of, split
from workers.runtime.program.values import CONSTANTS, Register, Value, filling, space_of

MAX_PARTS: Final = 64
"""Codes that one operation may take."""
NO_OPERAND: Final = (machine.CONSTANT, 0, 0, 0, 0)
"""Columns of an operand that an operation does not have."""


@dataclass(slots=True)
class Stage:
    """Codes that all threads run before they wait for each other."""

    kind: int
    space: int
    codes: list[tuple[list[int], dict[int, Register]]] = field(default_factory=list)
    """Codes, and the registers whose offset and width belong at a column and the next one."""


class Codes:
    """Collects codes in as few stages as their order allows."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._constants: list[NDArray[np.float32]] = []
        self._num_constants = 0

    @property
    def constants(self) -> NDArray[np.float32]:
        return np.concatenate([np.zeros(0, np.float32), *self._constants])

    def constant(self, number: float) -> Value:
        start = self.constant_vector(np.array([number], np.float32))
        return Value(Register(1, CONSTANTS), torch.tensor(start))

    def constant_vector(self, numbers: NDArray[np.float32]) -> int:
        """Add constants. Returns the place of the first."""
        self._constants.append(numbers)
        self._num_constants += numbers.size
        return self._num_constants - numbers.size

    def computed(self, code: int, *operands: Value) -> Value:
        """An operation's result in float32, in the shape that its operands are broadcast to."""
        sizes = (value.addresses.shape for value in operands)
        shape = torch.broadcast_shapes(*sizes)  # type: ignore[no-untyped-call]
        return self.make(code, operands, shape, rounds=False)

    def make(self, code: int, operands: Sequence[Value], shape: Sequence[int], *, rounds: bool) -> Value:
        """An operation's result, in a register of its own."""
        space = space_of(operands)
        spread = [Value(value.register, value.addresses.expand(shape)) for value in operands]
        row_dim = max(row_dim_of(value.addresses) for value in spread)
        register = Register(prod(shape) // shape[row_dim], space)
        out = filling(register, shape, row_dim)
        self.write(code, out, spread, rounds=rounds)
        return out

    def contiguous(self, value: Value, *, at_start: bool = False) -> Value:
        """The value, or a copy of it, whose numbers of a row follow each other."""
        places = by_row(value.addresses)
        start = int(places[0])
        if torch.equal(places, torch.arange(start, start + len(places))) and not (at_start and start):
            return value
        return self.make(arithmetic.COPY, [value], value.addresses.shape, rounds=False)

    def write(self, code: int, out: Value, operands: Sequence[Value], *, rounds: bool) -> None:
        """Write an operation's result into the places of `out`. Raises: Unsupported."""
        if len(operands) == 2 and code in (arithmetic.ADD, arithmetic.MUL) and operands[0].is_single:
            operands = operands[::-1]
        row_dim, shape = row_dim_of(out.addresses), out.addresses.shape
        places = [by_row(value.addresses.expand(shape), row_dim) for value in (out, *operands)]
        inner_shape = [size for dim, size in enumerate(shape) if dim != row_dim]
        parts = split([place.view(inner_shape) for place in places])
        if len(parts) > MAX_PARTS:
            raise Unsupported("it reads numbers that do not follow each other")
        for part in parts:
            self._emit_part(code, out.register, operands, part, rounds=rounds)

    def _emit_part(self, op: int, out: Register, operands: Sequence[Value], part: Part, *, rounds: bool) -> None:
        code = [op, part.outer, part.inner, 0, 0, part.strides[0][0], int(rounds)]
        registers, starts = {3: out}, {3: part.starts[0]}
        for column, value, start, strides in zip((7, 12), operands, part.starts[1:], part.strides[1:], strict=False):
            is_constant = value.register.space == CONSTANTS
            code += [machine.CONSTANT if is_constant else machine.REGISTER, start, 0, *strides]
            if not is_constant:
                registers[column + 1], starts[column + 1] = value.register, start
        code += NO_OPERAND if len(operands) == 1 else ()
        read = [value.register for value in operands if value.register.space != CONSTANTS]
        self.emit(machine.ROWS, out.space, code, registers, read, starts)

    def emit(
        self, kind: int, space: int, code: list[int], registers: dict[int, Register], read: Sequence[Register],
        starts: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Add a code to the first stage that may run it. `starts`: places within registers, by column."""
        for column, start in (starts or {}).items():
            code[column] = start
        after = max([register.stage for register in read], default=-1)
        index = self._stage_for(kind, space, after)
        self.stages[index].codes.append((code, registers))
        for register in read:
            register.last_stage = max(register.last_stage, index)
        for register in registers.values():
            if all(register is not each for each in read):
                register.first_stage = index if register.first_stage < 0 else min(register.first_stage, index)
                register.stage = max(register.stage, index)
                register.last_stage = max(register.last_stage, index)

    def _stage_for(self, kind: int, space: int, after: int) -> int:
        for index in range(max(after, 0), len(self.stages)):
            stage = self.stages[index]
            is_open = stage.kind == kind != machine.ATTENTION and stage.space == space
            if is_open and (index > after or kind == machine.ROWS):
                return index
        self.stages.append(Stage(kind, space))
        return len(self.stages) - 1
