"""One rank's part of a module's own parameters: of the experts of a layer, or of the sinks of its attention.

Knows the words of transformers' plans for parameters, and for the modules that own them. Must not know files.

    colwise, rowwise                 the last but one, or the last dimension is split; a vector has only one
    packed_colwise, packed_rowwise   the same for two halves side by side, each of which is split
    grouped_gemm                     the first dimension is split: whole experts
    moe_tp_experts                   each rank computes a part of every expert, with an all-reduce of the sums
    ep_dispatch_experts              each rank computes its own experts, with an all-reduce of the sums
    local_params                     no collective
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.errors import UnsupportedModel

if TYPE_CHECKING:
    from workers.model.shards.sharding import Collectives

COLUMNS, ROWS = frozenset({"colwise", "packed_colwise"}), frozenset({"rowwise", "packed_rowwise"})
WHOLE_EXPERTS = "grouped_gemm"
PART_STYLES = COLUMNS | ROWS | {WHOLE_EXPERTS}
OWN_EXPERTS = "ep_dispatch_experts"
SUMMED = frozenset({"moe_tp_experts", OWN_EXPERTS})
OWNER_STYLES = SUMMED | {"local_params"}


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a parameter."""

    dim: int
    spans: tuple[slice, ...]
    """One, or one of each half."""

    def of(self, whole: Tensor | Any) -> Tensor:
        """Read the part and nothing else; `whole` is a tensor, or a file's view of one."""
        parts = [whole[(slice(None),) * self.dim + (span,)] for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


@dataclass(frozen=True, slots=True)
class ParameterShards:
    """One rank's parts of one module's parameters."""

    module: Any
    style: str
    """The plan's word for the module."""
    parts: Mapping[str, RankPart]
    """This rank's part of each parameter, by name; parameters without an entry are whole."""
    has_bias: ClassVar[bool] = True
    span: ClassVar[slice] = slice(None)
    """No parameter of another module is tied to one of these."""

    @property
    def is_summed(self) -> bool:
        """Whether ranks add up the module's outputs."""
        return self.style in SUMMED

    def of(self, parameter: str, whole: Tensor | Any) -> Any:
        """This rank's part of a parameter; `whole` is a tensor, or a file's view of one."""
        part = self.parts.get(parameter)
        return whole[...] if part is None else part.of(whole)

    def hooks(self, collectives: Collectives) -> Iterator[RemovableHandle]:
        """Attach the module's collectives to it."""
        if self.style == OWN_EXPERTS:
            [span] = {part.spans[0].start: part.spans[0] for part in self.parts.values()}.values()
            self.module.num_experts = span.stop - span.start
            self.module._is_expert_parallel = True  # the experts' code then leaves out the number after the last
            yield self.module.register_forward_pre_hook(lambda _, args: _own_experts(span, *args))
        if self.is_summed:
            yield self.module.register_forward_hook(lambda _, args, output: collectives.all_reduce(output))  # noqa: ARG005


def _own_experts(span: slice, rows: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Renumber this rank's experts from 0; other ranks' get the number after the last, and weight 0."""
    num_own = span.stop - span.start
    own = experts - span.start
    is_other = (own < 0) | (own >= num_own)
    return rows, torch.where(is_other, num_own, own), weights.masked_fill(is_other, 0)


def parameter_shards(
    name: str, module: nn.Module, style: str, styles: Mapping[str, str], index: int, size: int
) -> ParameterShards:
    """The part of rank `index` of `size`; `styles` has the plan's words for parameters, by their names in the module.

    Raises: UnsupportedModel for words that are not known, and for sizes that cannot be split.
    """
    if style not in OWNER_STYLES or (style == OWN_EXPERTS) != (WHOLE_EXPERTS in styles.values()):
        raise UnsupportedModel(f"{name} is to be split as {style}, which is not supported here; serve it on one rank")
    if style == OWN_EXPERTS and not hasattr(module, "_is_expert_parallel"):
        raise UnsupportedModel(f"{name} has code of its own for experts, which cannot leave out those of other ranks")
    parts = {
        parameter: _part(f"{name}.{parameter}", tuple(module.get_parameter(parameter).shape), how, index, size)
        for parameter, how in styles.items()
    }
    return ParameterShards(module, style, parts)


def _part(name: str, shape: tuple[int, ...], style: str, index: int, size: int) -> RankPart:
    if style not in PART_STYLES:
        raise UnsupportedModel(f"{name} is to be split as {style}, which is not supported here; serve it on one rank")
    dim = 0 if style == WHOLE_EXPERTS else max(0, len(shape) - (2 if style in COLUMNS else 1))
    num_halves = 2 if style.startswith("packed") and len(shape) > 1 else 1
    total = shape[dim] // num_halves
    if total % size or shape[dim] % num_halves:
        what = "experts" if style == WHOLE_EXPERTS else "features"
        other = "false" if style == WHOLE_EXPERTS else "true"
        raise UnsupportedModel(
            f"{name} has {total} {what}, no multiple of {size} ranks: change tensor_parallel"
            + (f", or set expert_parallel to {other}" if len(shape) > 1 else "")
        )
    share = total // size
    return RankPart(
        dim,
        tuple(slice(half * total + index * share, half * total + (index + 1) * share) for half in range(num_halves)),
    )
