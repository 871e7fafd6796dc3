"""Writes tiny models as GGUF files, as llama.cpp's converter writes real ones: `write(file, "phi3")`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import checkpoints
from workers.model.conversion.gguf_tensors import names_of

gguf = pytest.importorskip("gguf", reason="needs the optional package gguf")
F32, Q = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType
SIZES = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16, "tie_word_embeddings": False}
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "minimax_m2": "minimax-m2",
    "phi3": "phi3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "starcoder2": "starcoder2",
    "lfm2": "lfm2",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
HEADS = {"attention.key_length": 16, "attention.value_length": 16}
DELTA_NET = HEADS | {
    "attention.head_count_kv": 2,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": HEADS | {"rope.dimension_count": 16},
    "qwen3": HEADS,
    "gemma2": HEADS,
    "gemma3_text": HEADS,
    "phi3": {"rope.dimension_count": 16, "attention.sliding_window": 0, "rope.scaling.original_context_length": 512},
    "qwen2_moe": {"expert_shared_feed_forward_length": 40},
    "qwen3_moe": HEADS,
    "lfm2": {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | {"expert_shared_feed_forward_length": 40},
    "minimax_m2": HEADS | {"rope.dimension_count": 8, "expert_gating_func": 2},
}
"""Metadata of an architecture's files beyond the usual."""
GEMMA = {
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 20.0,
    "layer_types": None,
    "sliding_window_pattern": 6,
}
DELTA_NETS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
LAYOUT: dict[str, dict[str, Any]] = {
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "full_attn_idxs": [1],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
    },
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe_text": DELTA_NETS | EXPERTS | {"shared_expert_intermediate_size": 40},
    "gpt2": {"n_positions": 512, "n_inner": 256},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its scales in float16."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Queries or keys of a Llama in the order in which llama.cpp stores them. Source: llama.cpp, convert_hf_to_gguf.py,
    `permute`."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


RENAMED = {
    "model.embed_tokens.": "token_embd.",
    "model.embedding_norm.": "token_embd_norm.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".post_attention_norm.",
    ".operator_norm.": ".attn_norm.",
    ".self_attn.q_proj.": ".attn_q.",
    ".self_attn.k_proj.": ".attn_k.",
    ".self_attn.v_proj.": ".attn_v.",
    ".self_attn.o_proj.": ".attn_output.",
    ".self_attn.out_proj.": ".attn_output.",
    ".self_attn.q_norm.": ".attn_q_norm.",
    ".self_attn.k_norm.": ".attn_k_norm.",
    ".self_attn.q_layernorm.": ".attn_q_norm.",
    ".self_attn.k_layernorm.": ".attn_k_norm.",
    ".linear_attn.in_proj_qkv.": ".attn_qkv.",
    ".linear_attn.in_proj_z.": ".attn_gate.",
    ".linear_attn.in_proj_a.": ".ssm_alpha.",
    ".linear_attn.in_proj_b.": ".ssm_beta.",
    ".linear_attn.conv1d.": ".ssm_conv1d.",
    ".linear_attn.norm.": ".ssm_norm.",
    ".linear_attn.out_proj.": ".ssm_out.",
    ".linear_attn.A_log": ".ssm_a",
    ".linear_attn.dt_bias": ".ssm_dt.bias",
    ".conv.conv.": ".shortconv.conv.",
    ".conv.in_proj.": ".shortconv.in_proj.",
    ".conv.out_proj.": ".shortconv.out_proj.",
    ".mlp.gate.": ".ffn_gate_inp.",
    ".mlp.shared_expert_gate.": ".ffn_gate_inp_shexp.",
    ".mlp.shared_expert.gate_proj.": ".ffn_gate_shexp.",
    ".mlp.shared_expert.up_proj.": ".ffn_up_shexp.",
    ".mlp.shared_expert.down_proj.": ".ffn_down_shexp.",
    ".mlp.experts.down_proj": ".ffn_down_exps.weight",
    ".mlp.gate_proj.": ".ffn_gate.",
    ".mlp.up_proj.": ".ffn_up.",
    ".mlp.down_proj.": ".ffn_down.",
    ".feed_forward.w1.": ".ffn_gate.",
    ".feed_forward.w3.": ".ffn_up.",
    ".feed_forward.w2.": ".ffn_down.",
}
"""Names of the model's tensors in the files of newer architectures. Source: llama.cpp, gguf-py/gguf/constants.py."""
NEW = ("lfm2", "qwen3_5_text", "qwen3_5_moe_text")


def tensors_of(family: str, model: Any) -> dict[str, np.ndarray]:
    """The tensors that llama.cpp's converter writes."""
    weights = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    if family in NEW:
        return renamed(family, weights, set(model.all_tied_weights_keys))
    return {
        name: stored(family, name, weights[own].copy())
        for name, own in names_of(model, FAMILIES[family]).items()
        if own not in model.all_tied_weights_keys
    }


def renamed(family: str, weights: dict[str, np.ndarray], tied: set[str]) -> dict[str, np.ndarray]:
    found = {}
    for own, value in weights.items():
        name = own
        for before, after in RENAMED.items():
            name = name.replace(before, after)
        if own.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("mlp.experts.gate_up_proj")
            found[f"{prefix}ffn_gate_exps.weight"], found[f"{prefix}ffn_up_exps.weight"] = np.split(value, 2, axis=1)
        elif own not in tied:
            found[name] = value.squeeze(1) if "conv.weight" in name or "conv1d" in name else value
    return found if family == "lfm2" else {name: of_delta_net(name, value) for name, value in found.items()}


def of_delta_net(name: str, value: np.ndarray) -> np.ndarray:
    """Norms are stored plus one, and value heads in the order of their numbers within a key head."""
    if "ssm_a" in name and "alpha" not in name:
        value = -np.exp(value)
    if "norm" in name and "ssm_norm" not in name:
        return value + 1
    if "ssm_out" in name:
        return tiled(value.T, 16).T
    if "attn_qkv" in name or "conv1d" in name:
        return np.concatenate([value[:32], tiled(value[32:], 16)])
    if "attn_gate" in name:
        return tiled(value, 16)
    return tiled(value, 1) if "ssm_" in name and "norm" not in name else value


def tiled(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of two key heads with two value heads each. Source: llama.cpp, convert_hf_to_gguf.py."""
    return rows.reshape(2, 2, head_dim, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def stored(family: str, name: str, weights: np.ndarray) -> np.ndarray:
    if family == "llama" and ".attn_q." in name:
        return permuted(weights, 4)
    if family == "llama" and ".attn_k." in name:
        return permuted(weights, 2)
    if family == "gpt2" and "norm" not in name and weights.ndim == 2 and name.startswith("blk."):
        return weights.T
    if "_gate_exps" in name or "_up_exps" in name:
        return np.split(weights, 2, axis=1)["_up_exps" in name]
    if "ffn_gate_inp_shexp" in name:
        return weights[0]
    return weights + 1 if "gemma" in family and "norm.weight" in name else weights


def packed(weights: np.ndarray, kind: Any) -> np.ndarray:
    """Blocks of a type; random ones with scales of 0.01 for types that gguf only reads."""
    if kind.name not in SCALES:
        return weights.astype(np.int8) if kind == Q.I8 else gguf.quantize(weights, kind)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (len(weights), block_bytes), np.uint8)
    for begin in SCALES[kind.name]:
        blocks[:, begin : begin + 2] = np.array([0.01], np.float16).view(np.uint8)
    return blocks


def statements(family: str, config: Any) -> dict[str, Any]:
    """The statements that llama.cpp writes. Source: llama.cpp, convert_hf_to_gguf.py."""
    is_rms = family not in ("gpt2", "starcoder2")
    epsilon = next(
        value
        for name in ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
        if (value := getattr(config, name, None)) is not None
    )
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 256,
        "attention.head_count": config.num_attention_heads,
        f"attention.layer_norm_{'rms_' if is_rms else ''}epsilon": epsilon,
        "vocab_size": config.vocab_size,
        **OWN.get(family, {}),
    }
    if family != "gpt2":
        found.setdefault("attention.head_count_kv", config.num_key_value_heads)
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        found["rope.freq_base"] = rope["rope_theta"]
        if rope["rope_type"] == "linear":
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if "gemma" in family:
        found["attention.sliding_window"] = config.sliding_window
    if getattr(config, "num_experts_per_tok", None):
        found |= {"expert_count": 4, "expert_used_count": 2}
        found["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    return found


def write(
    file: Path,
    family: str = "llama",
    kind: Any = F32,
    change: Callable[[dict[str, np.ndarray]], Any] = lambda _: None,
    settings: dict[str, Any] | None = None,
    pre: str = "gpt-2",
    **sizes: Any,
) -> Any:
    """Write a tiny model as a GGUF file; returns the model."""
    model = checkpoints.build(family, **SIZES | LAYOUT.get(family, {}) | sizes)
    config, arch = model.config, FAMILIES.get(family, family)
    writer = gguf.GGUFWriter(file, arch)
    stated = {f"{arch}.{key}": value for key, value in statements(family, config).items()} | (settings or {})
    for key, value in stated.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_tokenizer(writer, pre)
    tensors = tensors_of(family, model)
    change(tensors)
    for name, value in tensors.items():
        is_packed = kind != F32 and name.endswith("ffn_down.weight")
        data = packed(value, kind) if is_packed else value.astype(np.float32)
        writer.add_tensor(name, data, raw_dtype=kind if is_packed else F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_tokenizer(writer: Any, pre: str) -> None:
    described = json.loads(checkpoints.tokenizer_json())
    tokens = [*described["model"]["vocab"], "<|end|>"]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), checkpoints.VOCAB_SIZE + 4)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|end|>" else 5 if token.startswith("[PAD") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_bos_token_id(checkpoints.EOS)
    writer.add_eos_token_id(checkpoints.EOS)
    writer.add_eot_token_id(7)
    writer.add_chat_template(TEMPLATE)
