"""Registers of a program, and values: tensors of a recording, by the place of each element in a register.

Knows integers; must not know operations or codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from workers.runtime.program.places import ROW, Unsupported, row_dim_of

ALL, WANTED = range(2)
"""Kinds of rows: all rows of a step, and those whose logits are wanted."""
CONSTANTS = -1
"""Space of numbers that all rows share."""


@dataclass(eq=False, slots=True)
class Register:
    """A stretch of numbers that each row has."""

    width: int
    space: int
    stage: int = -1
    """Last stage that writes it."""
    first_stage: int = -1
    last_stage: int = -1
    """Last stage that reads it."""
    offset: int = -1


@dataclass(slots=True)
class Value:
    """A tensor of the recording: where each of its elements is."""

    register: Register
    addresses: Tensor

    @property
    def num_rows(self) -> int:
        return self.addresses.shape[row_dim_of(self.addresses)]

    @property
    def is_single(self) -> bool:
        """Whether the last dimension is one number."""
        addresses = self.addresses
        return addresses.dim() == 0 or addresses.stride(-1) == 0 or addresses.shape[-1] == 1


@dataclass(frozen=True, slots=True)
class Stretch:
    """Numbers of a row that follow each other in a register."""

    register: Register
    start: int
    width: int


def filling(register: Register, shape: Sequence[int], row_dim: int) -> Value:
    """A value that fills a register, in the order of its dimensions; the register may be wider."""
    num_rows = shape[row_dim]
    inner = [size for dim, size in enumerate(shape) if dim != row_dim]
    places = torch.arange(prod(inner)).view(inner).unsqueeze(row_dim)
    rows = (torch.arange(num_rows) * ROW).view([-1 if dim == row_dim else 1 for dim in range(len(shape))])
    return Value(register, rows + places)


def space_of(values: Sequence[Value]) -> int:
    """The kind of rows that these values have in common. Raises: Unsupported."""
    spaces = {value.register.space for value in values} - {CONSTANTS}
    if len(spaces) != 1:
        raise Unsupported("it combines wanted rows with others")
    return spaces.pop()
