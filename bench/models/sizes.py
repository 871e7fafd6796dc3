"""Sizes of Llamas: by name, by number of parameters, by shape.

Knows the number of parameters of a shape, and the usual shape for that number; must not know weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

UNIT_MULTIPLE = 64
"""The number of MLP units is a multiple of this, so that no matrix kernel has to pad."""
USUAL_LAYER = 10.5
"""Parameters of a layer over the square of its width, as in current models."""
USUAL_ASPECT = 64
"""Width over number of layers, as in current models."""


class CannotGrow(ValueError):
    """The source is not a plain Llama, or the requested shape does not contain it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a Llama."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """The shape in a checkpoint's config.json."""
        return cls(**{name: config[name] for name in cls.__slots__})

    @property
    def num_parameters(self) -> int:
        return self.num_hidden_layers * self.layer_parameters + self.end_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: four matrices of attention, three of the MLP, two norms."""
        rows = 2 * (self.num_query_rows + self.num_key_rows) + 3 * self.intermediate_size + 2
        return rows * self.hidden_size

    @property
    def num_query_rows(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def num_key_rows(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def end_parameters(self) -> int:
        """Parameters of the embedding, the output matrix (grown models have their own) and the last norm."""
        return (2 * self.vocab_size + 1) * self.hidden_size

    @property
    def group(self) -> int:
        """Number of query heads that share a key-value head."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True, slots=True)
class Size:
    """A size by number of parameters, optionally with width and number of layers."""

    num_parameters: float
    hidden_size: int | None = None
    num_hidden_layers: int | None = None


SIZES = {
    "123M": Size(123e6, 1024, 12),
    "478M": Size(478e6, 1024, 24),
    "7B": Size(7e9, 4096, 32),
}


def parse_size(text: str) -> Size:
    """Parse a name in SIZES, or a count like 10M. Raises: ValueError."""
    if text in SIZES:
        return SIZES[text]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB])", text)
    if not found or not float(found[1]):
        raise ValueError(f"a size is one of {', '.join(SIZES)} or a count like 10M, got {text!r}")
    return Size(float(found[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[found[2]])


def shape_of_size(source: Shape, size: Size) -> Shape:
    """A shape with about `size.num_parameters`: given or usual width and number of layers, and MLP units for the rest.

    Raises: CannotGrow if the source alone is larger.
    """
    width = size.hidden_size or _usual_width(source, size.num_parameters)
    num_heads = width // source.head_dim
    num_key_value_heads = max(source.num_key_value_heads, num_heads // 4)
    least = replace(source, hidden_size=width, num_attention_heads=num_heads, num_key_value_heads=num_key_value_heads)
    usual_layers = int(_usual_depth(source, size.num_parameters, width))
    most_layers = int((size.num_parameters - least.end_parameters) / least.layer_parameters)
    num_layers = size.num_hidden_layers or max(source.num_hidden_layers, min(usual_layers, most_layers))
    rest = size.num_parameters - least.end_parameters - num_layers * least.layer_parameters
    num_added = round(rest / (3 * width * num_layers) / UNIT_MULTIPLE) * UNIT_MULTIPLE
    if num_added < 0:
        raise CannotGrow(f"{size.num_parameters:.3g} parameters have no room for the source in {num_layers} x {width}")
    return replace(least, num_hidden_layers=num_layers, intermediate_size=source.intermediate_size + num_added)


def _usual_width(source: Shape, num_parameters: float) -> int:
    """The source's width times a power of four whose proportions are closest to `USUAL_ASPECT`."""
    widths = [source.hidden_size << 2 * power for power in range(1, 6)]
    depths = {width: _usual_depth(source, num_parameters, width) for width in (source.hidden_size, *widths)}
    possible = [width for width, depth in depths.items() if depth >= 1]
    return min(possible, key=lambda width: abs(log(depths[width] * USUAL_ASPECT / width)), default=source.hidden_size)


def _usual_depth(source: Shape, num_parameters: float, width: int) -> float:
    return (num_parameters - 2 * source.vocab_size * width) / (USUAL_LAYER * width**2)


def read_shape(model: Path) -> Shape:
    """Read the shape of the checkpoint at `model`."""
    return Shape.of(json.loads((model / "config.json").read_text()))
