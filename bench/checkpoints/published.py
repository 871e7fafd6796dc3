"""Configurations of published checkpoints, and the same made small: few layers, narrow, of few experts.

A file of `configs/` has a checkpoint's name, its config.json, and under `small` what the rules below would get
wrong for it. Ratios and what decides how a model computes are kept: heads to a KV head, dimensions of a head, rotary
embeddings, groups of experts, kinds of layers, and how weights are stored. Must not know weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "configs"
VOCAB_SIZE = 96
"""Tokens of the tokenizer. The models have some more rows, as real ones have."""
ROWS = 128
END = ROWS - 1
"""The end of sequence, which no tokenizer's token is: outputs have the length that was asked for."""
SPECIAL: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END}
IMAGE = 2
"""The id of every other special token, of which texts have none."""
FIRST_TOKEN = 3
NUM_LAYERS = 4
HEADS = 4
AT_MOST: Mapping[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "sliding_window": 12,  # shorter than the texts
    "attention_chunk_size": 64,
    "index_topk": 64,
    "index_n_heads": 4,
    "hidden_size_per_layer_input": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "ssm_state_size": 32,
    "mm_tokens_per_image": 4,
}
"""Largest sizes of a small language model."""
VISION: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_heads": 4,
    "head_dim": 16,
    "image_size": 56,
    "out_hidden_size": AT_MOST["hidden_size"],
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}
"""Sizes of a small vision tower, which no test uses."""


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint as it is published."""

    name: str
    config: Mapping[str, Any]
    small: Mapping[str, Any]
    """Values of a small configuration that replace those made by rule."""

    @property
    def stored_as(self) -> str:
        """How its weights are stored."""
        quantized = self.config.get("quantization_config")
        if quantized is None:
            return "bfloat16"
        return {"pack-quantized": "int4 (compressed-tensors)"}.get(
            quantized.get("format"), str(quantized["quant_method"])
        )

    @property
    def small_config(self) -> dict[str, Any]:
        """The config.json of a small checkpoint of the same kind."""
        return _merged(_small(self.config), self.small)


def read(names: Sequence[str] | None = None) -> list[Published]:
    """Checkpoints whose names contain one of `names`; all without names."""
    files = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]
    chosen = [each for each in files if not names or any(name in each["checkpoint"] for name in names)]
    return sorted((Published(each["checkpoint"], each["config"], each.get("small", {})) for each in chosen), key=_name)


def _name(published: Published) -> str:
    return published.name.partition("/")[2].lower()


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _small_value(name, value) for name, value in config.items()}
    num_layers = config.get("num_hidden_layers")
    if num_layers is not None:
        per_layer = {k: v[:NUM_LAYERS] for k, v in found.items() if isinstance(v, list) and len(v) == num_layers}
        found |= {**per_layer, "num_hidden_layers": NUM_LAYERS, **_heads(config)}
    return found


def _small_value(name: str, value: Any) -> Any:
    if name == "vision_config":
        return {name: VISION.get(name, value) for name, value in value.items()}
    if name == "text_config":
        return _small(value)
    if name.startswith("vocab_size"):
        return ROWS
    if name.endswith(("_token_id", "_token_index")):
        return None if value is None else SPECIAL.get(name, IMAGE)
    return min(value, AT_MOST[name]) if name in AT_MOST and value is not None else value


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Few heads, in the ratio of the published ones."""
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    few = HEADS if num_heads == num_kv_heads else min(num_kv_heads, 2)
    found = {"num_key_value_heads": few, "num_attention_heads": few * num_heads // num_kv_heads}
    if "head_dim" not in config and "qk_nope_head_dim" not in config:
        found["hidden_size"] = found["num_attention_heads"] * config["hidden_size"] // num_heads
    if config.get("num_global_key_value_heads"):
        share = found["num_attention_heads"] / num_heads
        found["num_global_key_value_heads"] = max(1, int(config["num_global_key_value_heads"] * share))
    return found


def _merged(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: _merged(config[name], value) for name, value in changes.items() if isinstance(value, dict)}
    return {**config, **changes, **nested}
