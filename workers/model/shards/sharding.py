"""One rank's shard of a model: its part of each weight, and the collectives that combine the ranks' results.

Knows transformers' tensor-parallel plans. Must not know files, how ranks communicate (`Collectives` does), KV or steps.
Meaning of a plan's styles (idea: Shoeybi et al. 2019, arXiv:1909.08053, section 3):

    colwise                 output features are split; the next layer takes the rank's own features
    colwise_gather_output   the same, with an all-gather of the outputs
    rowwise                 input features are split, with an all-reduce of the products; one rank adds the bias
    rowwise_split_input     the same for an input that every rank has whole
    embedding_rowwise       the vocabulary is split, with an all-reduce; a rank gives zeros for other ranks' tokens
    replicate               whole on every rank, as is everything that the plan does not name

So a layer has two all-reduces: after its attention and after its MLP. If there are fewer KV heads than ranks, several
ranks hold the same head.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.errors import UnsupportedModel
from workers.model.experts import OWN_EXPERTS, ParameterShards, parameter_shards
from workers.native.ranks.shared import Exchange

GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
COLUMNS = GATHERED | {"colwise"}
SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
ROWS = SPLIT_INPUT | {"rowwise"}
VOCABULARY = frozenset({"embedding_rowwise"})
WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"})
KEY_VALUE = frozenset({"k_proj", "v_proj"})


class Collectives(Protocol):
    """Collectives of a model's ranks. All ranks make the same calls in the same order."""

    @property
    def exchange(self) -> Exchange | None:
        """Memory in which native code makes these collectives itself; None if ranks share none."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, concatenated in the last dimension."""
        ...


@dataclass(frozen=True, slots=True)
class LocalCollectives:
    """Results of the right shapes without other ranks, to probe a model before the ranks have met."""

    size: int
    exchange: None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.size, dim=-1)


@dataclass(frozen=True, slots=True)
class CompilableCollectives:
    """These collectives; compiled code calls them as operators (`workers.runtime.backends.operators`)."""

    own: Collectives
    num_ranks: int

    @property
    def exchange(self) -> Exchange | None:
        return self.own.exchange

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            return self.own.all_reduce(tensor)
        torch.ops.outrider.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            return self.own.all_gather(tensor)
        return torch.ops.outrider.all_gather(tensor, self.num_ranks)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class ModuleShard:
    """One rank's part of one module."""

    module: nn.Module
    style: str
    span: slice
    """This rank's part of the features or of the vocabulary."""
    total: int
    """Number of features or tokens on all ranks together."""
    max_share: int
    """Number of features or tokens on the rank with the most."""
    has_bias: bool = True
    """False on all ranks but one if products are summed, because the bias is added once."""

    @property
    def is_summed(self) -> bool:
        """Whether ranks add up the module's outputs."""
        return self.style in ROWS | VOCABULARY

    def of(self, parameter: str, whole: Tensor | Any) -> Any:
        """This rank's part of a parameter; `whole` is a tensor, or a file's view of one."""
        if self.style in VOCABULARY:
            return F.pad(whole[self.span], (0, 0, 0, 1))  # plus a row of zeros for other ranks' tokens
        if self.style in ROWS:
            return whole[:] if parameter == "bias" else whole[:, self.span]
        return whole[self.span]

    def hooks(self, collectives: Collectives) -> Iterator[RemovableHandle]:
        """Attach the module's collectives to it."""
        if self.style in VOCABULARY:
            setattr(self.module, "padding_idx", None)  # noqa: B010  only training uses it, and rows are renumbered here
            rows = self._rows_of_tokens()
            yield self.module.register_forward_pre_hook(lambda _, args: (rows[args[0]],))
        if self.style in SPLIT_INPUT:
            yield self.module.register_forward_pre_hook(lambda _, args: (args[0][..., self.span],))
        if self.is_summed:
            yield self.module.register_forward_hook(lambda _, args, output: collectives.all_reduce(output))  # noqa: ARG005
        if self.style in GATHERED:
            yield self.module.register_forward_hook(lambda _, args, output: self._gathered(output, collectives))  # noqa: ARG005

    def _rows_of_tokens(self) -> Tensor:
        """The row of each token in this rank's part of the vocabulary; that of zeros for other ranks' tokens."""
        num_rows, device = self.span.stop - self.span.start, self.module.get_parameter("weight").device
        rows = torch.full((self.total,), num_rows, device=device)
        rows[self.span] = torch.arange(num_rows, device=device)
        return rows

    def _gathered(self, output: Tensor, collectives: Collectives) -> Tensor:
        num_missing = self.max_share - output.shape[-1]
        padded = F.pad(output, (0, num_missing)) if num_missing else output
        return collectives.all_gather(padded)[..., : self.total]


Shard: TypeAlias = ModuleShard | ParameterShards


def shards_of(model: Any, index: int, size: int, *, by_expert: bool = False) -> dict[str, Shard]:
    """The part of rank `index` of `size` in each module that is split, by the module's name.

    `by_expert`: a rank has whole experts, and not a part of each. `model` may be on the meta device.
    Raises: UnsupportedModel if it has no plan or cannot be split over `size` ranks.
    """
    kind, styles = model.config.model_type, dict(_styles(model, _plan(model, by_expert=by_expert)))
    if not (ROWS | {OWN_EXPERTS}) & set(styles.values()):
        raise UnsupportedModel(f"{kind} has no tensor-parallel plan in transformers; serve it on one rank")
    if by_expert and OWN_EXPERTS not in styles.values():
        raise UnsupportedModel(f"{kind} has no experts that can be split: set expert_parallel to false")
    _check_heads(model, styles, size)
    modules = dict(model.named_modules())
    shards: dict[str, Shard] = {
        name: parameter_shards(name, modules[name], styles.get(name, "local_params"), parts, index, size)
        for name, parts in _by_owner(styles, modules).items()
    }
    for name, style in styles.items():
        if name in modules and style not in WHOLE and name not in shards:
            shards[name] = _shard(name, style, model, index, size)
    return shards


def _plan(model: Any, *, by_expert: bool) -> dict[str, str]:
    """transformers' plan: for experts that of expert parallelism, if it is asked for or the only one."""
    tensor_plan, expert_plan = dict(model.tp_plan), dict(model.ep_plan)
    if not by_expert:
        expert_plan = {} if "moe_tp_experts" in tensor_plan.values() else expert_plan
    owners = [name for name, style in expert_plan.items() if style == OWN_EXPERTS]
    rest = {
        name: style
        for name, style in tensor_plan.items()
        if not any(name == owner or name.startswith(f"{owner}.") for owner in owners)
    }
    return rest | expert_plan


def _by_owner(styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, dict[str, str]]:
    """The plan's styles of parameters, by the name of the module that has them."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, style in styles.items():
        owner, _, parameter = name.rpartition(".")
        if name not in modules:
            found[owner][parameter] = style
    return found


def _check_heads(model: Any, styles: Mapping[str, str], size: int) -> None:
    """Check that no query head is split. Projections that are gathered again may split heads."""
    num_heads = model.config.num_attention_heads
    parents = (model.get_submodule(name.rpartition(".")[0]) for name, style in styles.items() if style == "colwise")
    if num_heads % size and any(hasattr(parent, "layer_idx") for parent in parents):
        raise UnsupportedModel(f"{model.config.model_type} has {num_heads} heads, no multiple of {size} ranks")


def _shard(name: str, style: str, model: Any, index: int, size: int) -> ModuleShard:
    module = _module(model, name, style)
    parent, _, leaf = name.rpartition(".")
    if style in VOCABULARY:
        total = module.num_embeddings
    else:
        total = module.in_features if style in ROWS else module.out_features
    if style in GATHERED | VOCABULARY:
        span = _uneven_split(total, index, size)
    elif style not in ROWS and leaf in KEY_VALUE:
        span = _heads(name, total, model.get_submodule(parent), index, size)
    else:
        span = _even_split(name, total, index, size)
    return ModuleShard(module, style, span, total, -(-total // size), has_bias=style not in ROWS or index == 0)


def _even_split(name: str, total: int, index: int, size: int) -> slice:
    if total % size:
        raise UnsupportedModel(f"{name} has {total} features, no multiple of {size} ranks")
    share = total // size
    return slice(index * share, (index + 1) * share)


def _uneven_split(total: int, index: int, size: int) -> slice:
    """Split into equal parts, except that the last ranks may have fewer features, or none."""
    share = -(-total // size)
    return slice(min(index * share, total), min((index + 1) * share, total))


def _heads(name: str, total: int, attention: Any, index: int, size: int) -> slice:
    """The KV heads that this rank's query heads read, as features."""
    head_dim: int | None = getattr(attention, "head_dim", None)
    if head_dim is None or total % head_dim:
        raise UnsupportedModel(f"{name} does not say how many heads it has; serve the model on one rank")
    num_heads = total // head_dim
    if num_heads % size and size % num_heads:
        raise UnsupportedModel(f"{name} has {num_heads} heads, neither a multiple nor a divisor of {size} ranks")
    first = index * num_heads // size
    return slice(first * head_dim, (first + max(1, num_heads // size)) * head_dim)


def _styles(model: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The plan's style of each module or parameter, by full name."""
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for name in names:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if pattern in plan:
            yield name, plan[pattern]


def _module(model: Any, name: str, style: str) -> Any:
    """The module with this name. Raises: UnsupportedModel for a style or a kind of module that is not supported."""
    module = model.get_submodule(name)
    expected = nn.Linear if style in COLUMNS | ROWS else nn.Embedding if style in VOCABULARY else None
    if expected is None or not isinstance(module, expected):
        raise UnsupportedModel(
            f"{name} of {model.config.model_type} is a {type(module).__name__} to be split as {style}, which is not "
            "supported here; serve it on one rank"
        )
    return module
