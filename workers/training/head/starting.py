"""A head's first weights, taken from its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workers.model import layer_list
from workers.training.head.eagle3 import HeadShape

INNER_RATIO = 4
"""Inner width of GPT-2's layers, and of others that do not name it, over their width."""


def shape_of(model: Any) -> HeadShape:
    """Sizes like those of the target's own layers; usual ones where its configuration does not name them (GPT-2)."""
    config = model.config
    parameters = getattr(config, "rope_parameters", None) or {}
    return HeadShape(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or INNER_RATIO * config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_theta=float(parameters.get("rope_theta", 10000.0)),
    )


def first_weights(model: Any, shape: HeadShape) -> dict[str, Tensor]:
    """The last layer's weights where the target has the like, else small random ones.

    The input of attention is an embedding beside a state: its columns are those of the first layer and of the last.
    `fc` begins with the highest of the three layers alone.
    """
    generator = torch.Generator().manual_seed(0)
    first, last = (dict(layer_list(model)[1][index].named_parameters()) for index in (0, -1))
    weights = {}
    for name, size in shape.tensors().items():
        weights[name] = torch.randn(size, generator=generator) * 0.02 if len(size) == 2 else torch.ones(size)
        own = _taken(name, first, last, model)
        if own is not None and tuple(own.shape) == size:
            weights[name] = own.detach().float().cpu()
    eye = torch.eye(shape.hidden_size)
    weights["fc.weight"] = torch.cat([torch.zeros_like(eye), torch.zeros_like(eye), eye], -1)
    return weights


def _taken(name: str, first: Mapping[str, Tensor], last: Mapping[str, Tensor], model: Any) -> Tensor | None:
    own = name.removeprefix("midlayer.")
    if own == "norm.weight":
        norm = getattr(model.base_model, "norm", None)
        return None if norm is None else norm.weight
    if own.startswith("self_attn.") and own[10] in "qkv" and own in first and own in last:
        return torch.cat([first[own], last[own]], -1)
    if own == "input_layernorm.weight":
        return first.get(own)
    return last.get("input_layernorm.weight" if own == "hidden_norm.weight" else own)
