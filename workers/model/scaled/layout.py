"""Layouts of quantized weights: which tensors a weight has, their shapes, and how they become floats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[Shape, dict[str, tuple[Shape, ...]]]
"""A weight's shape, and the shapes that each of its tensors may have, by suffix."""
Spans: TypeAlias = Sequence[slice]
"""A part of a weight: from where to where, in each dimension."""
FLOAT_SCALES = frozenset({"F32", "F16", "BF16"})
EXPONENT_SCALES = frozenset({"U8", "F8_E8M0"})
"""Powers of two, which some files call bytes."""
INTEGERS = frozenset({"I32", "I64"})
WORD_BITS = 32
HALF_BYTE = 4


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors of a weight."""

    suffix: str
    """The end of its name, after the part that all parts of a weight share."""
    types: frozenset[str]
    """Types that it may have, as safetensors names them."""
    is_optional: bool = False


@dataclass(frozen=True)
class Layout(ABC):
    """How quantized weights are stored. Dimensions are the model's: rows are output features."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Its name in messages."""

    @property
    @abstractmethod
    def parts(self) -> tuple[StoredPart, ...]:
        """The tensors of a weight; values come first."""

    @property
    def weight(self) -> str:
        """The end of the weight's name, after the part that all its parts share."""
        return ".weight"

    @property
    def has_zero_biases(self) -> bool:
        """Whether modules without a bias may be stored with one of zeros."""
        return False

    @property
    def num_dimensions(self) -> int:
        """Dimensions of the stored values."""
        return 2

    @abstractmethod
    def shapes(self, stored: Mapping[str, Shape]) -> Shapes:
        """The shapes that the parts imply and must have. Some parts may have any shape."""

    @abstractmethod
    def read(self, views: Mapping[str, Any], spans: Spans) -> Tensor:
        """A part of the weight, as floats. Raises: ValueError for contents that make no weight."""


def ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def scales(values: Tensor) -> Tensor:
    """Scales as floats; bytes are exponents of two."""
    return (values.view(torch.float8_e8m0fnu) if values.dtype == torch.uint8 else values).float()


def unpacked(view: Any, bits: int, axis: int, spans: Spans, order: Sequence[int] | None = None) -> Tensor:
    """StoredPart of a matrix of unsigned integers of 4 or 8 bits, of which words of 32 bits hold several along `axis`.

    `order` says which of a word's integers, from the lowest bits up, is the first, the second and so on.
    """
    num_in_word = WORD_BITS // bits
    span, other = spans[axis], spans[1 - axis]
    words = slice(span.start // num_in_word, ceil_div(span.stop, num_in_word))
    packed: Tensor = view[words, other] if axis == 0 else view[other, words]
    whole = packed.contiguous()[..., None].view(torch.uint8)  # lower bits come first, as on all hosts that torch has
    if bits == HALF_BYTE:
        whole = nibbles(whole)
    if order is not None:
        whole = whole[..., list(order)]
    whole = (whole.transpose(1, 2) if axis == 0 else whole).flatten(axis, axis + 1)
    return whole.narrow(axis, span.start - words.start * num_in_word, span.stop - span.start)


def nibbles(packed: Tensor) -> Tensor:
    """The two halves of each byte of the last dimension, the lower first."""
    return torch.stack([packed & 15, packed >> HALF_BYTE], dim=-1).flatten(-2)


def affine(values: Tensor, zeros: Tensor | int, scale: Tensor) -> Tensor:
    """(values - zeros) * scale, in float32."""
    return values.float().sub_(zeros).mul_(scale)
