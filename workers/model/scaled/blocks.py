"""Values of eight or four bits with a scale for each block, group, row or weight: FP8, int8, NVFP4, MXFP4 and MXFP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from workers.model.scaled.layout import (
    EXPONENT_SCALES,
    FLOAT_SCALES,
    Layout,
    Shape,
    Shapes,
    Spans,
    StoredPart,
    ceil_div,
    nibbles,
    scales,
)

FP8 = "F8_E4M3"
ONE: tuple[Shape, ...] = ((1,), ())


@dataclass(frozen=True)
class Blocks(Layout):
    """Floats or integers of eight bits."""

    dtype: str
    scale: str
    """Suffix of scales."""
    scale_types: frozenset[str] = FLOAT_SCALES | {"F8_E8M0"}
    block: Shape | None = None
    """Rows and columns with one scale; None if a scale is for a row or for a whole weight."""
    zero_point: str | None = None
    """Suffix of zero points, if there are any."""

    @property
    def kind(self) -> str:
        return "FP8" if self.dtype == FP8 else "int8"

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        zero = (StoredPart(self.zero_point, frozenset({self.dtype})),) if self.zero_point else ()
        return (StoredPart(".weight", frozenset({self.dtype})), StoredPart(self.scale, self.scale_types), *zero)

    def shapes(self, stored: Mapping[str, Shape]) -> Shapes:
        rows, columns = stored[".weight"]
        if self.block is not None:
            allowed: tuple[Shape, ...] = ((ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1])),)
        else:
            allowed = ((rows, 1), (rows,), (1,), (), (1, 1))
        return (rows, columns), {self.scale: allowed, **({self.zero_point: allowed} if self.zero_point else {})}

    def read(self, views: Mapping[str, Any], spans: Spans) -> Tensor:
        values: Tensor = views[".weight"][tuple(spans)].float()
        shape = views[".weight"].get_shape()
        if self.zero_point:
            values -= self._spread(views[self.zero_point][...].float(), shape, spans)
        return values.mul_(self._spread(scales(views[self.scale][...]), shape, spans))

    def _spread(self, scale: Tensor, shape: Shape, spans: Spans) -> Tensor:
        """Scales, or zero points, that broadcast over this part of a weight of `shape`."""
        rows, columns = shape
        height, width = self.block or (ceil_div(rows, scale.shape[0] if scale.ndim else 1), columns)
        scale = scale.reshape(ceil_div(rows, height), ceil_div(columns, width))
        row, column = (
            torch.arange(span.start, span.stop) // size for span, size in zip(spans, (height, width), strict=True)
        )
        return scale[row][:, column if width < columns else slice(None)]


@dataclass(frozen=True)
class Fp4(Layout):
    """Two values of four bits in a byte, the first in the lower bits; a scale for each group of a row's columns."""

    values: str
    group_size: int
    scale_types: frozenset[str]
    whole: str | None = None
    """Suffix of the scale of all scales, if there is one."""
    is_divided: bool = False
    """Whether scales are divided by it."""

    @property
    def kind(self) -> str:
        return "MXFP4" if self.scale_types == EXPONENT_SCALES else "NVFP4"

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        whole = (StoredPart(self.whole, FLOAT_SCALES),) if self.whole else ()
        return (StoredPart(self.values, frozenset({"U8"})), StoredPart(".weight_scale", self.scale_types), *whole)

    def shapes(self, stored: Mapping[str, Shape]) -> Shapes:
        rows, columns = stored[self.values][0], 2 * stored[self.values][1]
        allowed = {".weight_scale": ((rows, ceil_div(columns, self.group_size)),)}
        return (rows, columns), allowed | ({self.whole: ONE} if self.whole else {})

    def read(self, views: Mapping[str, Any], spans: Spans) -> Tensor:
        rows, columns = spans
        bytes_ = slice(columns.start // 2, ceil_div(columns.stop, 2))
        packed: Tensor = views[self.values][rows, bytes_]
        digits = nibbles(packed).narrow(1, columns.start % 2, columns.stop - columns.start)
        values = torch.tensor(FP4_VALUES)[digits.int()]
        scale = scales(views[".weight_scale"][rows, :])
        if self.whole:
            whole = views[self.whole][...].float()
            scale = scale / whole if self.is_divided else scale * whole
        return values.mul_(scale[:, torch.arange(columns.start, columns.stop) // self.group_size])


@dataclass(frozen=True)
class Mxfp4Experts(Layout):
    """All experts of a layer in one tensor, as gpt-oss has them: 32 values in 16 bytes, with an exponent."""

    GROUP_SIZE = 32

    @property
    def kind(self) -> str:
        return "MXFP4"

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        return (StoredPart("_blocks", frozenset({"U8"})), StoredPart("_scales", EXPONENT_SCALES))

    @property
    def weight(self) -> str:
        return ""

    @property
    def num_dimensions(self) -> int:
        return 4

    def shapes(self, stored: Mapping[str, Shape]) -> Shapes:
        experts, outputs, groups, _ = stored["_blocks"]
        allowed: dict[str, tuple[Shape, ...]] = {
            "_scales": ((experts, outputs, groups),),
            "_blocks": ((experts, outputs, groups, self.GROUP_SIZE // 2),),
        }
        return (experts, groups * self.GROUP_SIZE, outputs), allowed

    def read(self, views: Mapping[str, Any], spans: Spans) -> Tensor:
        """In bfloat16, which has all these values. The model's experts are transposed: [experts, inputs, outputs]."""
        experts, inputs, outputs = spans
        groups = slice(inputs.start // self.GROUP_SIZE, ceil_div(inputs.stop, self.GROUP_SIZE))
        exponents = views["_scales"][experts, outputs, groups].view(torch.uint8)
        whole: Tensor = convert_moe_packed_tensors(views["_blocks"][experts, outputs, groups], exponents)
        return whole.narrow(1, inputs.start - groups.start * self.GROUP_SIZE, inputs.stop - inputs.start)
