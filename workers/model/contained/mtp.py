"""The layer of a checkpoint that predicts one token more (multi-token prediction, MTP), seen as a model of one layer.

It joins a token's embedding with the hidden state before it, runs one decoder layer of the model's own kind, and has a
final norm. Checkpoints name it in two ways, N is the number of the model's own layers:

    model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm, self_attn, mlp, ...}                   DeepSeek, GLM
    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0.{self_attn, mlp, ...}   Qwen

The embedding and the output layer are the model's own unless the layer has some. Knows configurations and names; must
not know how a head computes (`workers.heads.mtp`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from core.errors import CheckpointError, UnsupportedModel
from workers.model.contained.language_model import Rename
from workers.model.contained.layers import LayerSubset

LAYER: Final = re.compile(r"^model\.layers\.(\d+)\.")
JOINING: Final = ("enorm", "hnorm", "eh_proj")
"""Weights that join the inputs: norms of embedding and state, then a projection of both side by side."""
OWN_NAMES: Final = {
    "enorm.weight": "enorm",
    "hnorm.weight": "hnorm",
    "eh_proj.weight": "eh_proj",
    "shared_head.norm.weight": "model.norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "model.embed_tokens.weight",
}
QWEN_NAMES: Final = {
    "pre_fc_norm_embedding.weight": "enorm",
    "pre_fc_norm_hidden.weight": "hnorm",
    "fc.weight": "eh_proj",
    "norm.weight": "model.norm.weight",
}
SHARED: Final = ("model.embed_tokens.weight", "lm_head.weight")
ENDS: Final = (".eh_proj.weight", "mtp.fc.weight")


@dataclass(frozen=True, slots=True)
class MtpKind:
    """How a family computes its MTP layer. Source: vLLM's models, which their authors wrote or checked."""

    blanks_first: bool
    """Whether the embedding of the first row is zero."""
    passes_norm_on: bool
    """Whether a guess's feature is the normalized output, as the target's is; else the output itself."""


_QWEN: Final = MtpKind(blanks_first=False, passes_norm_on=True)
_GLM: Final = MtpKind(blanks_first=True, passes_norm_on=False)
MTP_KINDS: Final[Mapping[str, MtpKind]] = {
    "deepseek_v3": MtpKind(blanks_first=True, passes_norm_on=True),
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}


def has_mtp(names: Iterable[str]) -> bool:
    """Whether a checkpoint with tensors of these names has MTP layers."""
    return any(name.endswith(ENDS) for name in names)


def without_mtp(names: Iterable[str | None], num_layers: int) -> Rename:
    """Leaves out the tensors of MTP layers. A layer beyond the model's own is one if it has any of `JOINING`; others
    stay, for the check of names: they are of a model with more layers than its configuration says."""
    joining = [name for name in names if name and _name_of_head(name, num_layers) in JOINING]
    prefixes = ("mtp.", *{layer[0] for name in joining if (layer := LAYER.match(name))})
    return lambda name: None if name.startswith(prefixes) else name


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """The MTP layer of a checkpoint."""

    config: Any
    """Configuration of the model of one layer."""
    kind: MtpKind
    num_layers: int
    """Number of the target's own layers."""
    own: frozenset[str]
    """The one-layer model's names of tensors that the layer has."""

    def rename(self, name: str) -> str | None:
        """The one-layer model's name for a stored tensor; None if it has no such tensor."""
        own = _name_of_head(name, self.num_layers)
        if own is None:
            return name if name in SHARED and name not in self.own else None
        return None if own in JOINING else own

    def joining(self, name: str) -> str | None:
        """The name in `JOINING` of a stored tensor; None if it is none of them."""
        own = _name_of_head(name, self.num_layers)
        return own if own in JOINING else None


def find_mtp(path: Path, config: Any, names: Iterable[str | None]) -> MtpLayer:
    """The MTP layer of the checkpoint at `path`, whose model has this configuration; names as the model has them.

    Raises: CheckpointError without a whole layer; UnsupportedModel for other families, and for several layers.
    """
    num_layers = config.num_hidden_layers
    own = frozenset(found for name in names if name and (found := _name_of_head(name, num_layers)))
    if not own:
        raise CheckpointError(f"{path} has no MTP layer: none of its tensors are of layer {num_layers} or of mtp")
    kind = MTP_KINDS.get(config.model_type)
    if kind is None:
        raise UnsupportedModel(
            f"the MTP layer of {path} is of model type {config.model_type}; those of {', '.join(MTP_KINDS)} are served"
        )
    numbers = {int(layer[1]) for name in own if (layer := LAYER.match(name))}
    if numbers - {0}:
        raise UnsupportedModel(f"{path} has {len(numbers)} MTP layers, one for each guess; only a single one is served")
    if missing := [name for name in JOINING if name not in own]:
        qwen = next(stored for stored, own in QWEN_NAMES.items() if own == missing[0])
        raise CheckpointError(f"the MTP layer of {path} lacks {missing[0]}.weight, or {qwen} by Qwen's names")
    return MtpLayer(_one_layer(config), kind, num_layers, own)


def _name_of_head(name: str, num_layers: int) -> str | None:
    """One of `JOINING`, or the one-layer model's name; None for a tensor of the target itself."""
    layer = LAYER.match(name)
    if layer is not None and int(layer[1]) >= num_layers:
        inner = name[layer.end() :]
        return OWN_NAMES.get(inner, f"model.layers.{int(layer[1]) - num_layers}.{inner}")
    if name.startswith("mtp."):
        inner = name.removeprefix("mtp.")
        return QWEN_NAMES.get(inner, f"model.{inner}")
    return None


def _one_layer(config: Any) -> Any:
    """Configuration of a model with one layer like the last that has attention over all tokens, and with experts."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    last = max(number for number, kind in enumerate(kinds) if kind == "full_attention")
    found = LayerSubset((last,)).config_of(config)
    if getattr(found, "first_k_dense_replace", None):
        found.first_k_dense_replace = 0
    return found
