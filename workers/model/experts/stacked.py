"""Experts that a checkpoint stores one by one, seen as the one tensor that the model has, and read in parts.

Knows transformers' conversions of stored tensors. Must not know ranks, nor how a part is chosen.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist

from core.errors import CheckpointError, UnsupportedModel
from workers.model.checkpoint import renamed
from workers.model.experts.parameter_shards import RankPart
from workers.model.scaled import ScaledView

STACKS = (((MergeModulelist, 0),), ((MergeModulelist, 0), (Concatenate, 1)))
"""Conversions (steps, each with its dimension) that stack experts and join the rows of each expert's matrices."""


def by_model_name(views: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Views of a checkpoint's tensors by the model's names. Raises: CheckpointError; UnsupportedModel.

    UnsupportedModel is raised for stored tensors that have to be converted in other ways than being stacked.
    """
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, dict[Sequence[int], Any]]] = defaultdict(lambda: defaultdict(dict))
    for (stored, view), (name, converter, place) in zip(views.items(), renamed(views, model), strict=True):
        if converter is None:
            found[name] = view
        elif tuple((type(step), getattr(step, "dim", None)) for step in converter.operations) in STACKS:
            experts[name][place][tuple(map(int, re.findall(r"\d+", stored)))] = view
        else:
            raise UnsupportedModel(f"{stored} is not a weight as the model has it, and cannot be split; use one rank")
    wanted: Mapping[str, Tensor] = model.state_dict()
    for name, by_place in experts.items():
        if name in wanted:
            found[name] = _stacked(name, by_place, tuple(wanted[name].shape))
    return found


def _stacked(name: str, by_place: Mapping[int, Mapping[Sequence[int], Any]], shape: tuple[int, ...]) -> StackedView:
    """The view of all experts. Raises: CheckpointError if the number of matrices is wrong."""
    in_order = [[view for _, view in sorted(views.items())] for _, views in sorted(by_place.items())]
    if len(shape) != 3 or any(len(views) != shape[0] for views in in_order) or shape[1] % len(in_order):
        counts = ", ".join(str(len(views)) for views in in_order)
        raise CheckpointError(f"{name} is made of {counts} matrices, but config.json says {shape}")
    return StackedView(name, tuple(zip(*in_order, strict=True)), shape)


@dataclass(frozen=True, slots=True)
class StackedView:
    """A view of experts' matrices as one tensor: of it, only the parts asked for are read.  # [E, R, C]"""

    name: str
    matrices: Sequence[Sequence[Any]]
    """Files' views of each expert's matrices, equally high, of which the rows are put together."""
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> Tensor:
        """Raises: CheckpointError for a matrix of another shape."""
        spans = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        given = (*spans, *[slice(None)] * (len(self.shape) - len(spans)))
        experts, rows, columns = (range(size)[span] for span, size in zip(given, self.shape, strict=True))
        return torch.stack([self._rows(self.matrices[expert], rows, columns) for expert in experts])

    def _rows(self, matrices: Sequence[Any], rows: range, columns: range) -> Tensor:
        """These rows of an expert's matrices, one below the other."""
        height, parts = self.shape[1] // len(matrices), []
        for place, matrix in enumerate(matrices):
            first, end = (min(max(row - place * height, 0), height) for row in (rows.start, rows.stop))
            if first < end:
                part = matrix[first:end, columns.start : columns.stop]
                if part.shape != (end - first, len(columns)):
                    raise CheckpointError(f"an expert of {self.name} is too small: config.json says {self.shape}")
                parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def is_made(view: Any) -> bool:
    """Whether reading this view puts several experts together in the host's memory."""
    return isinstance(view, StackedView) or (isinstance(view, ScaledView) and len(view.get_shape()) == 3)


def each_expert(view: Any, num_experts: int, part: RankPart | None) -> Iterator[Tensor]:
    """This part of a view of experts, or all of it, read one expert at a time.  # [R, C] each"""
    splits_experts = part is not None and part.dim == 0
    own = part.spans[0] if part is not None and splits_experts else slice(0, num_experts)
    for index in range(own.start, own.stop):
        expert = OneExpert(view, index)
        yield (expert[...] if part is None or splits_experts else part.of(expert))[0]


@dataclass(frozen=True, slots=True)
class OneExpert:
    """A view of one of the experts of another view.  # [1, R, C]"""

    view: Any
    expert: int

    def __getitem__(self, index: Any) -> Tensor:
        spans = index[1:] if isinstance(index, tuple) else ()
        part: Tensor = self.view[(slice(self.expert, self.expert + 1), *spans)]
        return part
