"""Latent attention with a latent KV: a token's KV is one vector that all heads read, not a key and a value for each.

A head's key and value are products of its weights with the token's latent c; a rotary part of the key, r, is common to
all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1). The weights can be moved to the other side of both products:

    q . (K c) = (K' q) . c          sum of w (V c) = V (sum of w c)

So the KV has [c, r] as the key of a single head, whose first numbers, c, are the value. Queries are multiplied by K',
outputs by V ("absorbed" weights). What is stored no longer depends on the number of heads, and all ranks store it.

Knows attention modules of transformers; must not know KV or plans.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

TO_QUERY: Final = "outrider_key_weights"
"""Name of a module's buffer with K of each head.  # [H, D_nope, R]"""
TO_OUTPUT: Final = "outrider_value_weights"
"""Name of a module's buffer with V of each head.  # [H, D_v, R]"""


def keep_latents(model: nn.Module) -> None:
    """Make all layers with latent attention hand latents to the attention function, if that makes KV smaller."""
    for module in model.modules():
        if _expands_as_known(module):
            _keep(module)


def is_latent(module: nn.Module) -> bool:
    """Whether the keys and values of this attention module are latents."""
    return hasattr(module, TO_QUERY)


def absorbed_query(module: nn.Module, query: Tensor) -> Tensor:
    """A query that is compared with latents.  # [1, H, T, D_nope + D_rope] -> [1, H, T, R + D_rope]"""
    weights = module.get_buffer(TO_QUERY)
    num_without_position = weights.shape[1]
    in_latents = torch.bmm(query[0, ..., :num_without_position], weights)[None]
    return torch.cat([in_latents, query[..., num_without_position:]], dim=3)


def expanded_output(module: nn.Module, output: Tensor) -> Tensor:
    """The heads' outputs, from sums of latents.  # [1, T, H, R] -> [1, T, H, D_v]"""
    weights = module.get_buffer(TO_OUTPUT)
    return torch.bmm(output[0].transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)[None]


def _expands_as_known(module: nn.Module) -> bool:
    """Whether the module expands latents by DeepSeek V3's code, which most other models copy."""
    code = getattr(getattr(type(module), "expand_kv", None), "__code__", None)
    known = DeepseekV3Attention.expand_kv.__code__
    return code is not None and (code.co_code, code.co_names) == (known.co_code, known.co_names)


def _keep(attention: Any) -> None:
    dims = attention.qk_nope_head_dim, attention.v_head_dim
    weights = attention.kv_b_proj.weight.detach()
    by_head = weights.view(-1, sum(dims), weights.shape[1])  # [H, D_nope + D_v, R]
    rotary = attention.qk_rope_head_dim
    if by_head.shape[2] + rotary >= by_head.shape[0] * (sum(dims) + rotary):
        return
    for name, part in zip((TO_QUERY, TO_OUTPUT), by_head.split(dims, dim=1), strict=True):
        attention.register_buffer(name, part, persistent=False)
    del attention.kv_b_proj
    attention.expand_kv = _joined


def _joined(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value of the single head.  # [1, 1, T, R], [1, 1, T, D_rope]"""
    key = torch.cat([latent, rotary], dim=3)
    return key, key[..., : latent.shape[3]]
