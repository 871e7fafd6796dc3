"""Integers in words of 32 bits: compressed-tensors' "pack-quantized", GPTQ and AWQ.

A weight is (integer - zero point) * scale. Zero point and scale are those of a row's group of columns. Sources:
compressed-tensors 0.20 (compressors/pack_quantized), GPTQModel 7.7 (nn_modules/qlinear), AutoAWQ 0.2.9 (packing_utils).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.model.scaled.layout import (
    FLOAT_SCALES,
    INTEGERS,
    WORD_BITS,
    Layout,
    Shape,
    Shapes,
    Spans,
    StoredPart,
    affine,
    ceil_div,
    unpacked,
)

WORDS = frozenset({"I32"})


@dataclass(frozen=True)
class Packed(Layout):
    """compressed-tensors, "pack-quantized": words along the rows, signed integers."""

    bits: int
    group_size: int | None
    """Columns with one scale; None if a row has one."""
    is_symmetric: bool
    has_order: bool = False
    """Whether groups are of columns in another order (`actorder`), which `weight_g_idx` tells."""

    @property
    def kind(self) -> str:
        return f"W{self.bits}A16"

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        return (
            StoredPart(".weight_packed", WORDS),
            StoredPart(".weight_scale", FLOAT_SCALES),
            StoredPart(".weight_shape", INTEGERS),
            *((StoredPart(".weight_g_idx", INTEGERS),) if self.has_order else ()),
            *(() if self.is_symmetric else (StoredPart(".weight_zero_point", WORDS | {"I8"}),)),
        )

    def shapes(self, stored: Mapping[str, Shape]) -> Shapes:
        rows, words = stored[".weight_packed"]
        columns = words * WORD_BITS // self.bits
        groups = ceil_div(columns, self.group_size or columns)
        return (rows, columns), {
            ".weight_scale": ((rows, groups),),
            ".weight_shape": ((2,),),
            ".weight_g_idx": ((columns,),),
            ".weight_zero_point": ((ceil_div(rows * self.bits, WORD_BITS), groups), (rows, groups)),
        }

    def read(self, views: Mapping[str, Any], spans: Spans) -> Tensor:
        rows, columns = spans
        num_rows, words = views[".weight_packed"].get_shape()
        num_columns = words * WORD_BITS // self.bits
        if (stated := views[".weight_shape"][...].tolist()) != [num_rows, num_columns]:
            raise ValueError(f"weight_shape says {stated}, but {[num_rows, num_columns]} are stored")
        scale: Tensor = views[".weight_scale"][rows, :].float()
        groups = _groups(views.get(".weight_g_idx"), columns, scale.shape[1], self.group_size or num_columns)
        values = unpacked(views[".weight_packed"], self.bits, 1, spans)
        if self.is_symmetric:
            return affine(values, 2 ** (self.bits - 1), scale[:, groups])
        zeros = self._zeros(views[".weight_zero_point"], rows, scale.shape[1])
        return affine(values, zeros[:, groups], scale[:, groups])

    def _zeros(self, view: Any, rows: slice, num_groups: int) -> Tensor:
        """Unsigned zero points. Early versions of compressed-tensors stored them signed and not packed."""
        if view.get_dtype() == "I8":
            signed: Tensor = view[rows, :]
            return signed.short().add_(2 ** (self.bits - 1))
        return unpacked(view, self.bits, 0, (rows, slice(0, num_groups)))


@dataclass(frozen=True)
class Gptq(Layout):
    """GPTQ: the matrix is transposed, with words along its input features."""

    bits: int
    group_size: int | None
    zero_offset: int
    """Added to stored zero points: 1 in the first version of the format, else 0."""
    has_order: bool = False
    """Whether groups are of columns in another order (`desc_act`), which `g_idx` tells."""

    @property
    def kind(self) -> str:
        return f"GPTQ int{self.bits}"

    @property
    def has_zero_biases(self) -> bool:
        return True

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        return (
            StoredPart(".qweight", WORDS),
            StoredPart(".scales", FLOAT_SCALES),
            StoredPart(".qzeros", WORDS),
            StoredPart(".g_idx", INTEGERS, is_optional=not self.has_order),
        )

    def shapes(self, stored: Mapping[str, Shape]) -> Shapes:
        words, rows = stored[".qweight"]
        columns = words * WORD_BITS // self.bits
        groups = ceil_div(columns, self.group_size or columns)
        return (rows, columns), {
            ".scales": ((groups, rows),),
            ".qzeros": ((groups, ceil_div(rows * self.bits, WORD_BITS)),),
            ".g_idx": ((columns,),),
        }

    def read(self, views: Mapping[str, Any], spans: Spans) -> Tensor:
        rows, columns = spans
        scale: Tensor = views[".scales"][:, rows].float()
        num_columns = views[".qweight"].get_shape()[0] * WORD_BITS // self.bits
        groups = _groups(views.get(".g_idx"), columns, len(scale), self.group_size or num_columns)
        zeros = unpacked(views[".qzeros"], self.bits, 1, (slice(0, len(scale)), rows))
        zeros = (zeros + self.zero_offset) & (2**self.bits - 1)
        values = unpacked(views[".qweight"], self.bits, 0, (columns, rows))
        return affine(values, zeros[groups], scale[groups]).T


@dataclass(frozen=True)
class Awq(Layout):
    """AWQ, version "gemm": the matrix is transposed, with words along its output features."""

    group_size: int | None

    ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
    BITS = 4

    @property
    def kind(self) -> str:
        return "AWQ int4"

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        return (StoredPart(".qweight", WORDS), StoredPart(".scales", FLOAT_SCALES), StoredPart(".qzeros", WORDS))

    def shapes(self, stored: Mapping[str, Shape]) -> Shapes:
        columns, words = stored[".qweight"]
        rows, groups = words * WORD_BITS // self.BITS, ceil_div(columns, self.group_size or columns)
        return (rows, columns), {".scales": ((groups, rows),), ".qzeros": ((groups, words),)}

    def read(self, views: Mapping[str, Any], spans: Spans) -> Tensor:
        rows, columns = spans
        scale: Tensor = views[".scales"][:, rows].float()
        groups = _groups(None, columns, len(scale), self.group_size or views[".qweight"].get_shape()[0])
        zeros = unpacked(views[".qzeros"], self.BITS, 1, (slice(0, len(scale)), rows), self.ORDER)
        values = unpacked(views[".qweight"], self.BITS, 1, (columns, rows), self.ORDER)
        return affine(values, zeros[groups], scale[groups]).T


def _groups(stored: Any | None, columns: slice, num_groups: int, group_size: int) -> Tensor:
    """The group of each column. Raises: ValueError for a group that has no scale."""
    if stored is None:
        return torch.arange(columns.start, columns.stop) // group_size
    groups: Tensor = stored[columns].long()
    if (groups == -1).all():  # compressed-tensors says so that there is no other order
        return _groups(None, columns, num_groups, group_size)
    if not 0 <= groups.min() <= groups.max() < num_groups:
        raise ValueError(f"g_idx names groups {int(groups.min())} to {int(groups.max())}, but there are {num_groups}")
    return groups
