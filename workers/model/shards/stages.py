"""One stage of a model: some of its layers, which get states from the stage before.

A stage's model is the whole model, in which stand-ins take the place of the layers of other stages, of the embedding on
all stages but the first, and of the output layer on all but the last. So names, layer numbers and the model's own code
around its layers stay what they are. Hooks exchange states, and logits go from the last stage to the first. Knows
modules of transformers; must not know files, how ranks communicate (`StageLinks` does), KV or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.errors import UnsupportedModel, cause
from workers.attention import LayerProbe
from workers.model.contained import layer_list

NUM_ROWS = 4
"""Rows of the pass that checks a stage."""


class StageLinks(Protocol):
    """A rank's connections to other stages. Tensors are contiguous."""

    def receive(self, like: Tensor) -> Tensor:
        """The states of the stage before, with the shape and the type of `like`."""
        ...

    def send(self, states: Tensor) -> None:
        """Send states to the stage after."""
        ...

    def logits(self, own: Tensor) -> Tensor:
        """On rank 0 the last stage's logits; on other ranks anything of their shape, such as `own`."""
        ...


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Stage `index` of `count`."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this stage. If they cannot be divided equally, the first stages have one more."""
        share, spare = divmod(num_layers, self.count)
        first = self.index * share + min(self.index, spare)
        return range(first, first + share + (self.index < spare))

    def check(self, model: Any) -> None:
        """Raises: UnsupportedModel for a model, which may lack weights, that cannot have this number of stages."""
        kind, num_layers = model.config.model_type, model.config.num_hidden_layers
        if self.count > num_layers:
            raise UnsupportedModel(f"pipeline_parallel is {self.count}, but {kind} has {num_layers} layers")
        if self.count > 1 and not isinstance(model.get_output_embeddings(), nn.Linear):
            raise UnsupportedModel(f"{kind} has no linear output layer: set pipeline_parallel to 1")
        if self.count > 1:
            layer_list(model)


class Elsewhere(nn.Module):
    """Stands in for a module of another stage, with the attributes that the model's code may read of it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        own = vars(self)
        own.update({name: value for name, value in vars(module).items() if name not in own})
        self.forward = forward
        if isinstance(weight := getattr(module, "weight", None), Tensor):  # whose device some code reads
            self.register_buffer("weight", weight.new_empty(0), persistent=False)


def is_elsewhere(model: Any, name: str) -> bool:
    """Whether another stage has the module of this name."""
    module = model
    for part in name.split("."):
        module = getattr(module, part, None)
        if isinstance(module, Elsewhere):
            return True
    return False


class StageModel:
    """The model of one stage, and its hooks."""

    def __init__(self, model: Any, stage: PipelineStage) -> None:
        """Cut a model without weights down to the stage. Raises: UnsupportedModel."""
        stage.check(model)
        _, layers = layer_list(model)
        self.stage, self._model = stage, model
        self.layers = stage.layers(len(layers))
        self._first, self._last = layers[self.layers.start], layers[self.layers.stop - 1]
        for index in {*range(len(layers))} - {*self.layers}:
            layers[index] = Elsewhere(layers[index], lambda *args, **kwargs: _states(args, kwargs))
        self.idle: nn.Module | None = None
        """The embedding if its weights are here for the output layer alone."""
        self._fill = 0.0
        self._leave_out_ends()

    def _leave_out_ends(self) -> None:
        """Leave out the embedding and the output layer, where another stage has them."""
        embedding: Any = self._model.get_input_embeddings()
        self._output: Any = self._model.get_output_embeddings()
        like = embedding.weight.new_empty(0, embedding.weight.shape[1])
        is_tied = f"{_name(self._model, self._output)}.weight" in self._model.all_tied_weights_keys
        if not self.stage.is_first:
            if self.stage.is_last and is_tied:
                self.idle = embedding
                embedding.forward = lambda ids: self._no_states(ids, like)
            else:
                _replace(self._model, embedding, lambda ids: self._no_states(ids, like))
        if not self.stage.is_last:
            num_tokens = len(self._output.weight)
            self._output = _replace(
                self._model, self._output, lambda rows: rows.new_zeros(()).expand(*rows.shape[:-1], num_tokens)
            )

    def _no_states(self, ids: Tensor, like: Tensor) -> Tensor:
        return torch.full((*ids.shape, like.shape[1]), self._fill, dtype=like.dtype, device=ids.device)

    def hooks(self, links: StageLinks) -> Iterator[RemovableHandle]:
        """Attach the links to the model, after what else is attached to it."""
        if not self.stage.is_first:
            yield self._first.register_forward_pre_hook(
                lambda _, args, kwargs: _with_states(links.receive(_states(args, kwargs)), args, kwargs),
                with_kwargs=True,
            )
        if not self.stage.is_last:
            yield self._last.register_forward_hook(lambda _, args, states: links.send(states))  # noqa: ARG005
        yield self._output.register_forward_hook(lambda _, args, output: links.logits(output))  # noqa: ARG005

    @torch.inference_mode()
    def check(self) -> None:
        """Check that what this stage sends depends on the states that it receives and on tokens, and nothing else.

        A model whose later layers also read the embedding, or earlier layers, would be computed wrongly. Needs weights,
        and no links. Raises: UnsupportedModel.
        """
        kind, first = self._model.config.model_type, self.layers.start
        try:
            once, again = (self._sent(fill) for fill in (1.0, 0.0))
            is_same = len(once) > 0 and all(map(torch.equal, once, again))
        except Exception as error:  # the model's own code may raise anything
            raise UnsupportedModel(
                f"{kind} cannot be divided before layer {first}, set pipeline_parallel to 1: {cause(error)}"
            ) from error
        if not is_same:
            raise UnsupportedModel(
                f"{kind} reads more from layer {first} on than the layers before give: set pipeline_parallel to 1"
            )

    def _sent(self, fill: float) -> list[Tensor]:
        """Return what this stage sends if the states that replace the embedding's are all `fill`."""
        self._fill, links = fill, _FixedLinks()
        hooks = list(self.hooks(links))
        try:
            _run(self._model, _MixingProbe())
        finally:
            for hook in hooks:
                hook.remove()
        return links.sent


@dataclass(slots=True)
class _FixedLinks:
    """Links that give the same states each time."""

    sent: list[Tensor] = field(default_factory=list)

    def receive(self, like: Tensor) -> Tensor:
        return torch.linspace(-1, 1, like.numel(), dtype=like.dtype, device=like.device).view(like.shape)

    def send(self, states: Tensor) -> None:
        self.sent.append(states)

    def logits(self, own: Tensor) -> Tensor:
        self.sent.append(own)
        return own


class _MixingProbe(LayerProbe):
    """Stands for attention whose output depends on queries, keys and values."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *kind: Any, **of_layer: Any) -> Tensor:
        output = LayerProbe.attend(self, layer, query, key, value, *kind, **of_layer)
        return output + query.mean() + key.mean() + value.mean()


def _run(model: Any, probe: LayerProbe) -> None:
    rows = torch.arange(NUM_ROWS, device=model.device)
    model(input_ids=0 * rows[None], position_ids=rows[None], use_cache=False, logits_to_keep=rows, plan=probe)


def _replace(model: Any, module: nn.Module, forward: Callable[..., Any]) -> Elsewhere:
    parent, _, leaf = _name(model, module).rpartition(".")
    found = Elsewhere(module, forward)
    setattr(model.get_submodule(parent), leaf, found)
    return found


def _name(model: Any, module: nn.Module) -> str:
    found: str = next(name for name, each in model.named_modules() if each is module)
    return found


def _states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _with_states(states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments of a layer, with these states."""
    return ((states, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": states})
