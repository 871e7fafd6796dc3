"""An EAGLE-3 head with gradients: one decoder layer, unrolled over its own hidden states.

Row p of a pass has the feature g_p of position p and the embedding of the token at p + 1, at RoPE position p; its
output guesses the token at p + 2. Step j of a chain that starts at p goes on with the last step's output as feature and
the token at p + 1 + j. It attends to the first pass's rows up to p, and to the earlier steps of its own chain: exactly
the KV that a server has there. Weights have the names of the published format (docs/howto/draft-with-a-head.md).

Source: Li et al. 2025 (arXiv 2503.01840), section 3.2, training-time test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

NUM_FEATURES = 3
"""Layers of the target whose hidden states a row reads."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head; those of the target's own layers, so that its weights can start as one of them."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Published names and shapes of the trained tensors."""
        hidden, inner = self.hidden_size, self.intermediate_size
        rows = {"q": self.num_heads * self.head_dim, "k": self.num_kv_heads * self.head_dim}
        rows["v"] = rows["k"]
        return {
            "fc.weight": (hidden, NUM_FEATURES * hidden),
            **{f"midlayer.self_attn.{each}_proj.weight": (rows[each], 2 * hidden) for each in "qkv"},
            "midlayer.self_attn.o_proj.weight": (hidden, rows["q"]),
            "midlayer.mlp.gate_proj.weight": (inner, hidden),
            "midlayer.mlp.up_proj.weight": (inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inner),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "norm.weight": (hidden,),
        }


class Eagle3(nn.Module):
    """The trained tensors of a head, by their published names."""

    def __init__(self, shape: HeadShape, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.shape = shape
        self._names = list(tensors)
        self._weights = nn.ParameterList(nn.Parameter(tensor.clone()) for tensor in tensors.values())

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._weights, strict=True))

    def unrolled(self, features: Tensor, embeddings: list[Tensor], positions: Tensor, mask: Tensor) -> Iterator[Tensor]:
        """Outputs of each step, before the last norm.  # [B, S, hidden] each

        `features` [B, S, 3 hidden]; `embeddings` has those of the tokens at p + 1, p + 2, ... of each row, one for each
        step [B, S, hidden]; `positions` [B, S]; `mask` [B, 1, S, S] is added to scores.
        """
        of, shape = self.tensors(), self.shape
        layer = {name.removeprefix("midlayer."): tensor for name, tensor in of.items()}
        state, keys, values = linear(features, of["fc.weight"]), list[Tensor](), list[Tensor]()
        for step, embedded in enumerate(embeddings):
            normed = self._norm(state, "hidden_norm", layer)
            read = torch.cat([self._norm(embedded, "input_layernorm", layer), normed], -1)
            made = (linear(read, layer[f"self_attn.{each}_proj.weight"]) for each in "qkv")
            query, key, value = (_by_head(rows, shape) for rows in made)
            turn = _rotation(positions + step, shape)
            keys.append(_rotated(key, turn))
            values.append(value)
            mixed = _attended(_rotated(query, turn), keys, values, mask)
            state = state + linear(mixed, layer["self_attn.o_proj.weight"])
            read = self._norm(state, "post_attention_layernorm", layer)
            inner = silu(linear(read, layer["mlp.gate_proj.weight"])) * linear(read, layer["mlp.up_proj.weight"])
            state = state + linear(inner, layer["mlp.down_proj.weight"])
            yield state

    def normed(self, states: Tensor) -> Tensor:
        """Inputs of the output layer."""
        return self._norm(states, "norm", self.tensors())

    def _norm(self, states: Tensor, name: str, tensors: dict[str, Tensor]) -> Tensor:
        size = states.shape[-1]
        return rms_norm(states.float(), (size,), tensors[f"{name}.weight"].float(), self.shape.rms_norm_eps)


def _by_head(rows: Tensor, shape: HeadShape) -> Tensor:
    """# [B, S, n · head_dim] -> [B, n, S, head_dim]"""
    return rows.view(*rows.shape[:2], -1, shape.head_dim).transpose(1, 2)


def _rotation(positions: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
    """# 2 x [B, 1, S, head_dim]"""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device) / shape.head_dim
    angles = positions[:, None, :, None] / shape.rope_theta**exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotated(rows: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = rows.chunk(2, -1)
    cos, sin = turn
    return (rows * cos + torch.cat([-second, first], -1) * sin).to(rows.dtype)


def _attended(query: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Attention over the first pass's rows, by `mask`, and over this row's own later steps.  # [B, S, n · head_dim]"""
    groups = query.shape[1] // keys[0].shape[1]
    first_keys, first_values = keys[0].repeat_interleave(groups, 1), values[0].repeat_interleave(groups, 1)
    if len(keys) == 1:
        mixed = scaled_dot_product_attention(query, first_keys, first_values, attn_mask=mask.to(query.dtype))
        return mixed.transpose(1, 2).flatten(2)
    query = query * query.shape[-1] ** -0.5
    own_keys, own_values = (torch.stack(each[1:], 3).repeat_interleave(groups, 1) for each in (keys, values))
    scores = (query @ first_keys.transpose(2, 3)).float() + mask
    own = (query[:, :, :, None] * own_keys).sum(-1).float()  # [B, n, S, steps]
    shares = torch.cat([scores, own], -1).softmax(-1).to(query.dtype)
    size = mask.shape[-1]
    mixed = shares[..., :size] @ first_values + (shares[..., size:, None] * own_values).sum(3)
    return mixed.transpose(1, 2).flatten(2)
