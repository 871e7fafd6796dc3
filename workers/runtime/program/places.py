"""Places of a tensor's elements: the row of each, and its place in a register of the row.

Knows integers; must not know operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from workers.runtime.backend import BackendUnavailable

ROW: Final = 1 << 40
"""An element's address is this times its row, plus its place in the register."""


class Unsupported(BackendUnavailable):
    """An operation that no code expresses."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an operation: two loops, with the start and strides of the output and of each operand."""

    outer: int
    inner: int
    starts: Sequence[int]
    strides: Sequence[tuple[int, int]]


def split(places: Sequence[Tensor]) -> Sequence[Part]:
    """Cut the elements of a row into as few parts as two loops can express.  # places: [...] each"""
    found = _as_loops(places)
    if found is not None:
        return [found]
    if places[0].dim() == 0 or len(places[0]) == 0:
        raise Unsupported("it reads numbers that do not follow each other")
    if places[0].dim() == 1 and len(places[0]) > 1 and not all(_stride(place) is not None for place in places):
        raise Unsupported("it reads numbers in no regular order")
    if places[0].dim() == 1:
        raise Unsupported("it reads numbers that do not follow each other")
    return [part for index in range(len(places[0])) for part in split([place[index] for place in places])]


def _as_loops(places: Sequence[Tensor]) -> Part | None:
    shape = places[0].shape
    for num_outer in range(len(shape) + 1):
        inner = prod(shape[num_outer:])
        rows = [place.reshape(-1, inner) for place in places]
        inner_strides = [_stride(row[0]) for row in rows]
        fits = inner == 1 or (
            inner_strides[0] == 1
            and (len(rows) == 1 or inner_strides[1] == 1)
            and all(stride in (0, 1) for stride in inner_strides[2:])
        )
        if not fits or not all(_is_grid(row) for row in rows):
            continue
        outer_strides = [_stride(row[:, 0]) or 0 for row in rows]
        strides = [
            (outer, 1 if inner == 1 else (stride or 0))
            for outer, stride in zip(outer_strides, inner_strides, strict=True)
        ]
        return Part(len(rows[0]), inner, [int(row[0, 0]) for row in rows], strides)
    return None


def _is_grid(row: Tensor) -> bool:
    """Whether each row of a matrix is the one before plus a constant.  # [outer, inner]"""
    return _stride(row[:, 0]) is not None and torch.equal(row - row[:, :1], (row[0] - row[0, 0]).expand_as(row))


def _stride(row: Tensor) -> int | None:
    """The difference of each two that follow each other; 0 for a single one; None if it is not always the same."""
    if len(row) < 2:
        return 0
    steps = row[1:] - row[:-1]
    return int(steps[0]) if bool((steps == steps[0]).all()) else None


def row_dim_of(addresses: Tensor) -> int:
    """The dimension of rows; -1 for a value that all rows share."""
    rows = addresses // ROW
    for dim in range(addresses.dim()):
        if addresses.shape[dim] > 1 and bool((rows.select(dim, 0) != rows.select(dim, 1)).any()):
            return dim
    return -1


def by_row(addresses: Tensor, row_dim: int | None = None) -> Tensor:
    """Places of the first row's elements, in order. Raises: Unsupported if other rows have other places."""
    own = row_dim_of(addresses)
    dim = own if row_dim is None else row_dim
    if own not in (-1, dim):
        raise Unsupported("it combines different rows")
    places, rows = addresses % ROW, addresses // ROW
    first = places.select(dim, 0)
    if not torch.equal(places, first.unsqueeze(dim).expand_as(places)):
        raise Unsupported("rows are laid out differently")
    if own != -1:
        shape = [-1 if each == dim else 1 for each in range(addresses.dim())]
        if not torch.equal(rows, torch.arange(addresses.shape[dim]).view(shape).expand_as(rows)):
            raise Unsupported("it combines different rows")
    return first.reshape(-1)
