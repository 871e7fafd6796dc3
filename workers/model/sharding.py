"""One rank's slice of a model: which part of each weight it holds, and where the ranks' results are put together.

Knows transformers' tensor-parallel plans. Must not know files, how ranks talk (`Collectives` does), KV or steps. What
the styles of a plan mean here (Shoeybi et al. 2019, arXiv:1909.08053, section 3, has the idea):

    colwise                 output features are split; what follows works on the rank's own
    colwise_gather_output   the same, and the outputs are joined again: every rank has all of them
    rowwise                 input features are split; the ranks' products are added up, and the bias once
    rowwise_split_input     the same for an input that every rank has whole
    embedding_rowwise       the vocabulary is split; a rank answers zeros for tokens of the others
    replicate               whole on every rank, as is all that the plan does not name

So a layer adds up twice, after its attention and after its MLP. Where there are fewer heads of keys and values than
ranks, several ranks hold the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.errors import UnsupportedModel

JOINED = frozenset({"colwise_gather_output", "colwise_rep"})
COLUMNS = JOINED | {"colwise"}
SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
ROWS = SPLIT_INPUT | {"rowwise"}
VOCABULARY = frozenset({"embedding_rowwise"})
WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce"})
KEY_VALUE = frozenset({"k_proj", "v_proj"})


class Collectives(Protocol):
    """What the ranks of a model do together: all of them make the same calls in the same order."""

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        ...

    def join(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, one behind the other in the last dimension."""
        ...


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The shapes of the real thing, by one rank alone: for a model that is looked at before the ranks have met."""

    size: int

    def add_up(self, tensor: Tensor) -> Tensor:
        return tensor

    def join(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * self.size, dim=-1)


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank holds of one module."""

    module: nn.Module
    style: str
    span: slice
    """Of the features, or of the vocabulary, that are split."""
    total: int
    """How many of them all ranks hold together."""
    max_share: int
    """And the one with the most of them."""
    has_bias: bool = True
    """What is added up has its bias on one rank only."""

    def of(self, parameter: str, whole: Tensor | Any) -> Any:
        """This rank's part of a parameter; `whole` is a tensor, or a file's view of one."""
        if self.style in VOCABULARY:
            return F.pad(whole[self.span], (0, 0, 0, 1))  # and a row for the others' tokens
        if self.style in ROWS:
            return whole[:] if parameter == "bias" else whole[:, self.span]
        return whole[self.span]

    def hooks(self, collectives: Collectives) -> Iterator[RemovableHandle]:
        """Attach what the ranks do together to the module."""
        if self.style in VOCABULARY:
            setattr(self.module, "padding_idx", None)  # noqa: B010  it says which row learns nothing; rows have other numbers here
            yield self.module.register_forward_pre_hook(self._own_tokens)
        if self.style in SPLIT_INPUT:
            yield self.module.register_forward_pre_hook(lambda _, args: (args[0][..., self.span],))
        if self.style in ROWS | VOCABULARY:
            yield self.module.register_forward_hook(lambda _, args, output: collectives.add_up(output))  # noqa: ARG005
        if self.style in JOINED:
            yield self.module.register_forward_hook(lambda _, args, output: self._joined(output, collectives))  # noqa: ARG005

    def _own_tokens(self, _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """Rows of the rank's part of the vocabulary; other ranks' tokens have the row of zeros behind it."""
        num_rows = self.span.stop - self.span.start
        rows = args[0] - self.span.start
        return (torch.where((rows >= 0) & (rows < num_rows), rows, num_rows),)

    def _joined(self, output: Tensor, collectives: Collectives) -> Tensor:
        padded = F.pad(output, (0, self.max_share - output.shape[-1]))
        return collectives.join(padded)[..., : self.total]


@dataclass(frozen=True, slots=True)
class Slicer:
    """Cuts models for rank `index` of `size`."""

    index: int
    size: int

    def cuts(self, model: Any) -> dict[str, Cut]:
        """What the rank holds of each module that is not whole everywhere, by the module's name.

        `model` may be on the meta device. Raises: UnsupportedModel when it has no plan, or one that is not for so many.
        """
        kind, styles = model.config.model_type, dict(_styles(model))
        if not ROWS & set(styles.values()):
            raise UnsupportedModel(f"{kind} has no tensor-parallel plan in transformers; serve it on one rank")
        self._check_heads(model, styles)
        return {name: self._cut(name, style, model) for name, style in styles.items() if style not in WHOLE}

    def _check_heads(self, model: Any, styles: Mapping[str, str]) -> None:
        """Query heads stay in one piece; where attention is joined again they need not."""
        num_heads = model.config.num_attention_heads
        parents = (model.get_submodule(name.rpartition(".")[0]) for name, style in styles.items() if style == "colwise")
        if num_heads % self.size and any(hasattr(parent, "layer_idx") for parent in parents):
            raise UnsupportedModel(f"{model.config.model_type} has {num_heads} heads, no multiple of {self.size} ranks")

    def _cut(self, name: str, style: str, model: Any) -> Cut:
        module = _module(model, name, style)
        if style in ROWS:
            span, total = self._evenly(name, module.in_features), module.in_features
        elif style in JOINED | VOCABULARY:
            total = module.num_embeddings if style in VOCABULARY else module.out_features
            span = self._nearly_evenly(total)
        else:
            total = module.out_features
            parent, _, leaf = name.rpartition(".")
            is_key_value = leaf in KEY_VALUE
            span = self._heads(name, total, model.get_submodule(parent)) if is_key_value else self._evenly(name, total)
        return Cut(module, style, span, total, -(-total // self.size), has_bias=style not in ROWS or self.index == 0)

    def _evenly(self, name: str, total: int) -> slice:
        if total % self.size:
            raise UnsupportedModel(f"{name} has {total} features, no multiple of {self.size} ranks")
        share = total // self.size
        return slice(self.index * share, (self.index + 1) * share)

    def _nearly_evenly(self, total: int) -> slice:
        """The last ranks may have fewer than the others, or none."""
        share = -(-total // self.size)
        return slice(min(self.index * share, total), min((self.index + 1) * share, total))

    def _heads(self, name: str, total: int, attention: Any) -> slice:
        """The whole heads of keys or values that this rank's query heads read."""
        head_dim: int | None = getattr(attention, "head_dim", None)
        if head_dim is None or total % head_dim:
            raise UnsupportedModel(f"{name} does not say how many heads it has; serve the model on one rank")
        num_heads = total // head_dim
        if num_heads % self.size and self.size % num_heads:
            raise UnsupportedModel(
                f"{name} has {num_heads} heads, neither a multiple nor a divisor of {self.size} ranks"
            )
        first = self.index * num_heads // self.size
        return slice(first * head_dim, (first + max(1, num_heads // self.size)) * head_dim)


def _styles(model: Any) -> Iterator[tuple[str, str]]:
    """The plan's rules, each with the full name of what it is for."""
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for name in names:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if pattern in model.tp_plan:
            yield name, model.tp_plan[pattern]


def _module(model: Any, name: str, style: str) -> Any:
    """The module of that name. Raises: UnsupportedModel for a style or a kind of module that is not known here."""
    module = dict(model.named_modules()).get(name)
    expected = nn.Linear if style in COLUMNS | ROWS else nn.Embedding if style in VOCABULARY else None
    if expected is None or not isinstance(module, expected):
        kind = type(module).__name__ if module is not None else "parameter"
        raise UnsupportedModel(
            f"{name} of {model.config.model_type} is a {kind} to be split as {style}, which is not supported here; "
            "serve it on one rank"
        )
    return module
