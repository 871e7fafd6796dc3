"""Writes tiny models as GGUF files, as llama.cpp's converter writes real ones: `write(file, "phi3")`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import checkpoints
from workers.model.gguf import _names

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
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
HEADS = {"attention.key_length": 16, "attention.value_length": 16}
OWN: dict[str, dict[str, Any]] = {
    "llama": HEADS | {"rope.dimension_count": 16},
    "qwen3": HEADS,
    "gemma2": HEADS,
    "gemma3_text": HEADS,
    "phi3": {"rope.dimension_count": 16, "attention.sliding_window": 0, "rope.scaling.original_context_length": 512},
    "qwen2_moe": {"expert_shared_feed_forward_length": 40},
    "qwen3_moe": HEADS,
    "minimax_m2": HEADS | {"rope.dimension_count": 8, "expert_gating_func": 2},
}
"""What files of an architecture state beyond what most do."""
GEMMA = {
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 20.0,
    "layer_types": None,
    "sliding_window_pattern": 6,
}
LAYOUT: dict[str, dict[str, Any]] = {
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_positions": 512, "n_inner": 256},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its scales in float16."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp stores queries and keys of a Llama. Source: llama.cpp, convert_hf_to_gguf.py, `permute`."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


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
    """As llama.cpp writes them. Source: llama.cpp, convert_hf_to_gguf.py."""
    is_rms = family not in ("gpt2", "starcoder2")
    epsilon = next(
        value
        for name in ("rms_norm_eps", "norm_epsilon", "layer_norm_epsilon")
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
        found["attention.head_count_kv"] = config.num_key_value_heads
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
    weights = model.state_dict()
    tensors = {
        name: stored(family, name, weights[own].numpy().copy())
        for name, own in _names(model, arch).items()
        if own not in model.all_tied_weights_keys
    }
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
