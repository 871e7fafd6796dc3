"""Finds the tensors of each quantized weight in a checkpoint, checks their headers, and reads weights as floats."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from core.errors import CheckpointError, UnsupportedModel
from workers.model.scaled.layout import Layout, Shape, Spans, StoredPart

CHUNK_ELEMENTS = 1 << 24
"""Elements that are dequantized at a time, so that intermediate results need little memory."""
EVERY_LINEAR = "Linear"
UNUSED = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale")
"""Scales of activations that a weight's module may have: activations are not quantized here."""
UNUSED_OF_KV = (".k_scale", ".v_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    file: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Group:
    """Weights with one layout."""

    layout: Layout
    targets: tuple[str, ...] = (EVERY_LINEAR,)
    """Names of modules, patterns of names after "re:", or classes of modules."""

    def names(self, module: str) -> bool:
        """Whether a target is this module's name, or a pattern of it."""
        return any(
            re.match(target[3:], module) if target.startswith("re:") else target == module for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantized weight and the names of its tensors."""

    module: str
    layout: Layout
    names: Mapping[str, str]
    """Full names by the suffixes of the layout's parts."""

    @property
    def name(self) -> str:
        return self.module + self.layout.weight

    @property
    def values(self) -> str:
        """Name of the tensor with the values."""
        return self.names[self.layout.parts[0].suffix]


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """How a checkpoint stores its quantized weights."""

    groups: tuple[Group, ...]
    has_kv_scales: bool = False

    @property
    def kinds(self) -> str:
        """The kinds of weights, as messages name them."""
        return " and ".join(dict.fromkeys(group.layout.kind for group in self.groups))

    def weights(self, dtypes: Mapping[str, str]) -> list[Weight]:
        """All quantized weights among these tensors."""
        found = ((name, self._layout(name, dtype)) for name, dtype in dtypes.items())
        return [_weight(name, layout, dtypes) for name, layout in found if layout is not None]

    def _layout(self, name: str, dtype: str) -> Layout | None:
        """The layout of the weight whose values this tensor has. A module's own name counts before its class."""
        fitting = []
        for group in self.groups:
            values = group.layout.parts[0]
            if name.endswith(values.suffix) and dtype in values.types:
                if group.names(name.removesuffix(values.suffix)):
                    return group.layout
                fitting += [group.layout] if EVERY_LINEAR in group.targets else []
        return fitting[0] if fitting else None

    def rest(self, names: Iterable[str], weights: Sequence[Weight]) -> list[str]:
        """Tensors that belong to no quantized weight."""
        used = {name for weight in weights for name in weight.names.values()}
        used |= {weight.module + suffix for weight in weights for suffix in UNUSED}
        kv_scales = UNUSED_OF_KV if self.has_kv_scales else ()
        return [name for name in names if name not in used and not name.endswith(kv_scales)]


def _weight(values: str, layout: Layout, known: Container[str]) -> Weight:
    module = values.removesuffix(layout.parts[0].suffix)
    names = {part.suffix: module + part.suffix for part in layout.parts}
    for part in layout.parts:
        if part.is_optional and names[part.suffix] not in known:
            del names[part.suffix]
    return Weight(module, layout, names)


def as_read(path: Path, stored: Mapping[str, StoredTensor], scaled: ScaledWeights) -> dict[str, StoredTensor]:
    """The tensors as they are read: weights are floats. Raises: CheckpointError, UnsupportedModel."""
    weights = scaled.weights({name: tensor.dtype for name, tensor in stored.items()})
    found = {name: stored[name] for name in scaled.rest(stored, weights)}
    for weight in weights:
        file = stored[weight.values].file
        found[weight.name] = StoredTensor(file, _checked_shape(path, weight, stored), "F32")
    return found


def _checked_shape(path: Path, weight: Weight, stored: Mapping[str, StoredTensor]) -> Shape:
    """A weight's shape. Raises: CheckpointError for a missing tensor, or one of another shape; UnsupportedModel."""
    values = stored[weight.values]
    if len(values.shape) != weight.layout.num_dimensions:
        raise UnsupportedModel(f"{weight.values} in {path} is {values.shape}, which {weight.layout.kind} is not")
    for part in weight.layout.parts:
        _check_type(path, weight, part, stored)
    shape, allowed = weight.layout.shapes({suffix: stored[name].shape for suffix, name in weight.names.items()})
    for suffix, name in weight.names.items():
        if suffix in allowed and stored[name].shape not in allowed[suffix]:
            needs = allowed[suffix][0]
            raise CheckpointError(f"{name} in {path} is {stored[name].shape}, but a weight of {shape} needs {needs}")
    return shape


def _check_type(path: Path, weight: Weight, part: StoredPart, stored: Mapping[str, StoredTensor]) -> None:
    if (name := weight.names.get(part.suffix)) is None:
        return
    if name not in stored:
        raise CheckpointError(f"{weight.values} in {path} has no {name}, which {weight.layout.kind} needs")
    if (dtype := stored[name].dtype) not in part.types:
        allowed = ", ".join(sorted(part.types))
        raise UnsupportedModel(f"{name} in {path} is stored as {dtype}, but {weight.layout.kind} needs {allowed}")


def views(files: Sequence[Path], stack: ExitStack, scaled: ScaledWeights | None) -> dict[str, Any]:
    """Views of all tensors by name; a quantized weight has one, which reads floats. `stack` closes the files."""
    opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
    found = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118  it is no mapping
    if scaled is None:
        return found
    weights = scaled.weights({name: view.get_dtype() for name, view in found.items()})
    plain = {name: found[name] for name in scaled.rest(found, weights)}
    return plain | {weight.name: ScaledView(files[0].parent, weight, _parts(weight, found)) for weight in weights}


def _parts(weight: Weight, views: Mapping[str, Any]) -> dict[str, Any]:
    return {suffix: views[name] for suffix, name in weight.names.items()}


def zero_biases(files: Sequence[Path], names: Iterable[str], scaled: ScaledWeights) -> set[str]:
    """The members of `names` that are biases of zeros. Tools write them for GPTQ where a module has no bias."""
    with ExitStack() as stack:
        found = views(files, stack, scaled)
        weights = [view.weight for view in found.values() if isinstance(view, ScaledView)]
        biases = {f"{weight.module}.bias" for weight in weights if weight.layout.has_zero_biases}
        return {name for name in biases.intersection(names) if not found[name][...].any()}


@dataclass(frozen=True, slots=True)
class ScaledView:
    """A view of a quantized weight, as a file has one of a float tensor: its parts are read as floats."""

    path: Path
    weight: Weight
    parts: Mapping[str, Any]
    """Views of the weight's tensors by their suffixes."""

    def get_shape(self) -> Shape:
        return self.weight.layout.shapes({suffix: tuple(view.get_shape()) for suffix, view in self.parts.items()})[0]

    def __getitem__(self, index: Any) -> Tensor:
        """A part of the weight; `index` has slices without steps. Raises: CheckpointError for NaN or infinity."""
        spans = _spans(index, self.get_shape())
        rows, *others = spans
        step = max(1, CHUNK_ELEMENTS // max(1, prod(span.stop - span.start for span in others)))
        begins = range(rows.start, max(rows.stop, rows.start + 1), step)
        chunks = (self._read((slice(begin, min(begin + step, rows.stop)), *others)) for begin in begins)
        if len(begins) == 1:
            return next(chunks)
        whole = torch.empty(0)
        for begin, chunk in zip(begins, chunks, strict=True):
            if begin == rows.start:
                whole = chunk.new_empty([span.stop - span.start for span in spans])
            whole[begin - rows.start :][: len(chunk)] = chunk
        return whole

    def _read(self, spans: Spans) -> Tensor:
        try:
            part = self.weight.layout.read(self.parts, spans)
        except ValueError as error:
            raise CheckpointError(f"{self.weight.name} in {self.path} cannot be dequantized: {error}") from error
        if not part.sum(dtype=torch.float32).isfinite():
            raise CheckpointError(f"{self.weight.name} in {self.path} has a value or a scale that is NaN or infinite")
        return part


def _spans(index: Any, shape: Shape) -> Spans:
    """The parts in all dimensions that `index` means."""
    given = [slice(None)] if index is Ellipsis else list(index) if isinstance(index, tuple) else [index]
    given += [slice(None)] * (len(shape) - len(given))
    return [slice(*span.indices(size)[:2]) for span, size in zip(given, shape, strict=True)]
