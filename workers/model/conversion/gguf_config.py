"""The configuration that a GGUF file states. Everything that it states must be in the result, or the file is refused.

transformers reads most of it, and skips what it does not know. Must not know tensors, except those with rotary factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from core.errors import CheckpointError, UnsupportedModel, cause
from workers.model.servable import check_architecture

STATEMENTS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
}
"""Keys of a file's architecture, with the configuration's names. Other keys are refused."""
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
DELTA_NET = {
    "full_attention_interval": "full_attention_interval",
    "rope.dimension_count": "rotary_dim",
    "rope.dimension_sections": "mrope_section",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.inner_size": "linear_value_size",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
ARCHITECTURES: dict[str, dict[str, str]] = {
    "gemma2": {},
    "gemma3": {},
    "gpt2": {"context_length": "n_positions", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
    "lfm2": {
        "attention.head_count_kv": "kv_heads_by_layer",
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "shortconv.l_cache": "conv_L_cache",
    },
    "llama": {},
    "minimax-m2": {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
        "expert_gating_func": "gating_func",
        "rope.dimension_count": "rotary_dim",
    },
    "phi3": {
        "rope.dimension_count": "rotary_dim",
        "rope.scaling.attn_factor": "attention_factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    "qwen2": {},
    "qwen35": DELTA_NET,
    "qwen35moe": DELTA_NET | EXPERTS | SHARED_EXPERT,
    "qwen2moe": EXPERTS | SHARED_EXPERT,
    "qwen3": {},
    "qwen3moe": EXPERTS,
    "starcoder2": {"attention.layer_norm_epsilon": "norm_epsilon"},
}
"""Architectures whose conversion is compared with the original model by the tests, with statements of their own."""
UNREAD = (
    "attention.key_length",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "context_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "final_logit_softcapping",
    "rope.scaling.original_context_length",
)
"""Statements that transformers leaves out for some architectures."""
TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""Ids that a file may leave out, where transformers would take those of another model."""
NO_SCALING = ("default", "none")
"""No scaling of the rotary embedding, as transformers and as GGUF say it."""
LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
"""Models of 27B scale attention in a way of their own."""
SIGMOID = 2
"""How llama.cpp numbers the function that weighs experts; MiniMax M2 has no other."""
LLAMA3_FACTORS = "rope_freqs.weight"
"""Tensor with the factors by which Llama 3.1 and later divide rotary frequencies."""
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors of Phi's factors, up to its original context and above."""
ROPE_FACTORS = {"llama": (LLAMA3_FACTORS,), "phi3": LONG_FACTORS}
"""Tensors that become a part of the configuration, by architecture."""


def read_config(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """The configuration, which says the same as the file. Raises: CheckpointError, UnsupportedModel."""
    architecture = metadata["general.architecture"]
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    stated["block_count"] = num_layers = _num_layers(stated)
    if num_layers is None or num_layers > len(tensors):  # even empty layers would not fit into memory
        raise CheckpointError(f"{file} states block_count = {num_layers}, but has {len(tensors)} tensors")
    names = STATEMENTS | ARCHITECTURES[architecture]
    config = _read(file, {names[key]: stated[key] for key in UNREAD if stated.get(key) and key in names})
    check_architecture(config)
    for kind, key in TOKEN_IDS.items():
        setattr(config, kind, metadata.get(key))
    if config.model_type in LAYERS_OF_GEMMA_27B:
        config.query_pre_attn_scalar = _gemma_scale(config)
    _set_rope(config, names, stated)
    if factors := {name: _floats(tensors[name]) for name in ROPE_FACTORS.get(architecture, ()) if name in tensors}:
        _rope(config).update(_scaled_rope(file, config, stated, factors))
    for key, value in ({"attention.sliding_window": None} | stated).items():
        _check_statement(file, config, names, key, value)
    return config


def _num_layers(stated: dict[str, Any]) -> int | None:
    """Number of layers without those that predict several tokens at once, which transformers leaves out."""
    num_layers, num_left_out = stated.get("block_count"), stated.pop("nextn_predict_layers", 0)
    are_numbers = isinstance(num_layers, int) and isinstance(num_left_out, int)
    return num_layers - num_left_out if are_numbers else None


def _read(file: Path, given: Mapping[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True, **given)
    except Exception as error:  # configurations check their values themselves, and may raise anything
        raise UnsupportedModel(f"transformers cannot read the configuration of {file}: {cause(error)}") from error


def _set_rope(config: Any, names: Mapping[str, str], stated: Mapping[str, Any]) -> None:
    """Set what transformers leaves out of the rotary embedding."""
    if getattr(config, "rope_parameters", None) is None:
        return
    _rope(config)["rope_theta"] = stated.get("rope.freq_base", _rope(config)["rope_theta"])
    if stated.get("rope.scaling.type") == "linear":
        _rope(config).update(rope_type="linear", factor=stated.get("rope.scaling.factor"))
    if names["rope.dimension_count"] == "rotary_dim" and "rope.dimension_count" in stated:
        _rope(config)["partial_rotary_factor"] = stated["rope.dimension_count"] / _head_dim(config)


def _scaled_rope(
    file: Path, config: Any, stated: Mapping[str, Any], factors: Mapping[str, Tensor]
) -> Mapping[str, Any]:
    """The parameters that give these factors. Raises: CheckpointError, UnsupportedModel."""
    if LLAMA3_FACTORS in factors:
        return _llama3_rope(file, config, factors[LLAMA3_FACTORS])
    if missing := set(LONG_FACTORS) - factors.keys():
        raise CheckpointError(f"{file} lacks {missing.pop()}")
    return _long_rope(config, stated, *(factors[name].tolist() for name in LONG_FACTORS))


def _floats(tensor: Any) -> Tensor:
    return torch.from_numpy(tensor.data.copy()).float()


def _check_statement(file: Path, config: Any, names: Mapping[str, str], key: str, value: Any) -> None:
    """Check that the configuration has this value, too. Raises: UnsupportedModel."""
    if key not in names:
        raise UnsupportedModel(f"{file} states {key} = {value}, which is not read here")
    found = _stated_by(config, names[key], is_of_rope=key.startswith("rope."))
    if key == "attention.sliding_window":
        found, value = found or None, value or None  # none is said either way
    are_numbers = all(isinstance(each, int | float) for each in (found, value))
    if not (
        math.isclose(found, value, rel_tol=1e-6) if are_numbers else found == value or (found, value) == NO_SCALING
    ):
        raise UnsupportedModel(f"{file} states {key} = {value}, where transformers has {found}")


def _stated_by(config: Any, name: str, *, is_of_rope: bool) -> Any:
    """The configuration's value of this name."""
    if name == "head_dim":
        return _head_dim(config)
    if name == "rotary_dim":
        return round(_head_dim(config) * _rope(config).get("partial_rotary_factor", 1.0))
    if name == "intermediate_size" and config.model_type == "gpt2":
        return config.n_inner or 4 * config.n_embd
    if name == "kv_heads_by_layer":
        return [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    if name == "linear_value_size":
        return config.linear_value_head_dim * config.linear_num_value_heads
    if name == "full_attention_interval":
        return next((num for num, kind in enumerate(config.layer_types, 1) if kind == "full_attention"), None)
    if name == "mrope_section":
        return (_rope(config)[name] + [0] * 4)[:4]
    if name == "gating_func":
        return SIGMOID
    if name == "original_max_position_embeddings":
        return getattr(config, name)
    return _rope(config).get(name) if is_of_rope else getattr(config, name, None)


def _rope(config: Any) -> dict[str, Any]:
    """Parameters of the rotary embedding, in Gemma 3 of the layers without a window: a file has no others."""
    parameters: dict[str, Any] = config.rope_parameters
    found: dict[str, Any] = parameters.get("full_attention", parameters)
    return found


def _head_dim(config: Any) -> Any:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _gemma_scale(config: Any) -> Any:
    """The setting query_pre_attn_scalar, which no file has. Source: llama.cpp, src/models/gemma2.cpp and gemma3.cpp."""
    if config.num_hidden_layers == LAYERS_OF_GEMMA_27B[config.model_type]:
        return config.hidden_size // config.num_attention_heads
    return _head_dim(config)


def _llama3_rope(file: Path, config: Any, wanted: Tensor) -> dict[str, Any]:
    """The parameters that give these factors. Raises: UnsupportedModel if those of Llama 3 do not."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": round(wanted.max().item(), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = type(config).from_dict(config.to_dict() | {"rope_parameters": parameters})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    plain = parameters["rope_theta"] ** -(torch.arange(0, 2 * len(frequencies), 2) / (2 * len(frequencies)))
    if len(frequencies) != len(wanted) or not torch.allclose(plain / frequencies, wanted, rtol=1e-4):
        raise UnsupportedModel(f"{file} scales rotary frequencies ({LLAMA3_FACTORS}) otherwise than Llama 3")
    return parameters


def _long_rope(config: Any, stated: Mapping[str, Any], short: list[float], long: list[float]) -> dict[str, Any]:
    """The parameters of Phi with a long context."""
    original = stated.get("rope.scaling.original_context_length", config.original_max_position_embeddings)
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": config.max_position_embeddings / original,
        "attention_factor": stated.get("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original,
    }
