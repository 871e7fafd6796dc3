"""Language models inside of checkpoints: text towers, and attention that is full up to some length.

Each tower is compared with the whole multimodal model of transformers, of tiny random weights, without images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from core.config import EngineConfig
from core.errors import CheckpointError, UnsupportedModel
from tests import checkpoints
from tests.workers.model.test_loader import edit_json, refusal
from workers.model import ModelShard, load
from workers.model.contained import TOWERS, tower_name
from workers.runtime.runtime import ModelRuntime
from workers.step import StepRows

RECURRENT = {"lfm2_vl", "qwen3_5", "qwen3_5_moe"}
"""Towers that may be refused for their recurrent layers."""
TEXT: dict[str, Any] = {
    **checkpoints.SIZES,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 12,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 304,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 3.0,
    "use_bidirectional_attention": "vision",
}


def _rope(*section: int, part: float = 1.0) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    return {"rope_parameters": {**parameters, "partial_rotary_factor": part}}


OWN: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4,
    "glm4v": _rope(1, 1, 2, part=0.5),
    "glm46v": _rope(1, 1, 2, part=0.5),
    "glm4v_moe": _rope(2, 3, 3),
    "kimi_k25": {"num_key_value_heads": 4},
    "lfm2_vl": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"intermediate_size_mlp": 64, "attention_chunk_size": 64, "floor_scale": 48},
    "qwen2_vl": {**_rope(1, 1, 2), "head_dim": 8},
    "qwen2_5_vl": {**_rope(1, 1, 2), "head_dim": 8},
    "qwen3_vl": _rope(4, 2, 2),
    "qwen3_vl_moe": _rope(4, 2, 2),
}
"""Sizes that a text tower needs beside `TEXT`."""
VISION = {
    "num_hidden_layers": 1, "depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 4,
    "num_attention_heads": 4, "out_hidden_size": 32, "image_size": 28, "patch_size": 14, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}  # fmt: skip
TOKENS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
PROMPT = [*range(20, 50), 7]


def write(kind: str, path: Path, **changes: Any) -> Any:
    """A multimodal checkpoint with random weights. Returns the model, with eager attention."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForImageTextToText.from_config(_config(kind, **changes), attn_implementation="eager").eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    if kind == "kimi_k25":  # it is written with the names of its vision tower's blocks
        rename(path, lambda name: name.replace("language_model.model.blocks", "language_model.model.layers"))
    (path / "tokenizer.json").write_text(checkpoints.tokenizer_json())
    return model


def _config(kind: str, **changes: Any) -> Any:
    default = CONFIG_MAPPING[kind]()
    text = default.get_text_config().model_type
    tokens = {name: place for place, name in enumerate(TOKENS, 1) if hasattr(default, name)}
    given: dict[str, Any] = {
        **default.to_dict(),
        **tokens,
        "text_config": {**TEXT, **OWN.get(kind, {}), **changes, "model_type": text},
        "vision_config": _vision(default.vision_config),
        "audio_config": None,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    return CONFIG_MAPPING[kind].from_dict(given)


def _vision(default: Any) -> dict[str, Any] | None:
    known = {name: value for name, value in VISION.items() if hasattr(default, name)}
    return None if default is None else {"model_type": default.model_type, **known}


def rename(path: Path, by: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({by(name): value for name, value in tensors.items()}, path / "model.safetensors", {"format": "pt"})


def served(path: Path, **settings: Any) -> ModelRuntime:
    config = EngineConfig(**{"model": str(path), "kv_cache_tokens": 2048} | settings)
    return ModelRuntime(load(config, lambda _: None), config)


def greedy(runtime: ModelRuntime, num_tokens: int) -> list[int]:
    kv, tokens, new = runtime.cache.new_sequence(), [], PROMPT
    for _ in range(num_tokens):
        logits = runtime.forward([StepRows(kv, new)])
        new = [int(logits[-1, : checkpoints.VOCAB_SIZE].argmax())]
        tokens += new
    return tokens


def greedy_by_transformers(model: Any, num_tokens: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1, : checkpoints.VOCAB_SIZE]
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("kind", sorted(TOWERS))
def test_a_tower_writes_the_tokens_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    model = write(kind, tmp_path)
    if kind in RECURRENT:
        with suppress(UnsupportedModel):
            assert greedy(served(tmp_path), 12) == greedy_by_transformers(model, 12)
    else:
        assert greedy(served(tmp_path), 12) == greedy_by_transformers(model, 12)


def test_an_output_layer_of_its_own_is_read_whatever_the_config_says_of_ties(tmp_path: Path) -> None:
    model = write("mistral3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["language_model.lm_head.weight"] = torch.randn(checkpoints.SIZES["vocab_size"], 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model.lm_head.weight = torch.nn.Parameter(head)
    assert model.config.tie_word_embeddings
    assert greedy(served(tmp_path), 12) == greedy_by_transformers(model, 12)
    by_tensor = load(EngineConfig(str(tmp_path), tensor_parallel=2), lambda _: None, ModelShard(0, 2)).model
    assert torch.equal(by_tensor.lm_head.weight, head[: len(by_tensor.lm_head.weight)])


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_an_index_is_left_out_up_to_the_tokens_that_it_keeps(kind: str, tmp_path: Path) -> None:
    index = {"index_topk": 48, "index_n_heads": 2, "index_head_dim": 32, "num_nextn_predict_layers": 1}
    sizes = {**TEXT, **index, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1}
    sizes.pop("head_dim")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(checkpoints.tokenizer_json())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(32, 64)  # it predicts the token after the next
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    runtime = served(tmp_path)
    assert greedy(runtime, 12) == greedy_by_transformers(model, 12)
    assert runtime.info.max_context_tokens == 48
    assert "max_context_tokens is 49" in refusal(tmp_path, UnsupportedModel, max_context_tokens=49)


def test_chunked_attention_is_served_within_a_chunk_and_before_queries_are_scaled(tmp_path: Path) -> None:
    write("llama4", tmp_path)
    said: list[str] = []
    assert load(EngineConfig(str(tmp_path)), said.append).info.max_context_tokens == 47
    assert any(line.startswith("the context is limited to 47 tokens: its attention is in chunks") for line in said)


@pytest.mark.parametrize(
    ("stored", "used"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("model.vision_tower.encoder.layers.0.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("model.embed_vision.embedding_projection.weight", None),
        ("adapter.weight", "adapter.weight"),
    ],
)
def test_all_layouts_of_names_are_known(stored: str, used: str | None) -> None:
    assert tower_name(stored) == used


def test_a_tensor_of_no_known_part_is_refused(tmp_path: Path) -> None:
    write("qwen3_vl", tmp_path)
    rename(tmp_path, lambda name: name.replace("model.visual.merger", "model.adapter"))
    assert "model.adapter" in refusal(tmp_path, CheckpointError)


def test_a_class_with_another_head_is_refused(tmp_path: Path) -> None:
    write("gemma3", tmp_path)
    edit_json(tmp_path / "config.json", architectures=["Gemma3ForSequenceClassification"])
    assert "a Gemma3ForSequenceClassification, not a Gemma3ForConditionalGeneration" in refusal(
        tmp_path, UnsupportedModel
    )


def test_a_tower_is_read_by_tensor_and_by_rank(tmp_path: Path) -> None:
    write("qwen2_5_vl", tmp_path)
    whole = served(tmp_path).info.num_parameters
    by_tensor = load(EngineConfig(str(tmp_path), device="meta"), lambda _: None)
    rank = load(EngineConfig(str(tmp_path), tensor_parallel=2), lambda _: None, ModelShard(1, 2))
    assert by_tensor.info.num_parameters == rank.info.num_parameters == whole
    assert by_tensor.model.state_dict().keys() == rank.model.state_dict().keys()


def test_some_layers_of_a_tower_make_a_draft(tmp_path: Path) -> None:
    write("mistral3", tmp_path)
    assert served(tmp_path, layers=(1,)).info.layers == (1,)


def test_kimi_k2_is_read_as_the_type_whose_code_it_is(tmp_path: Path) -> None:
    sizes = {**TEXT, "num_key_value_heads": 4}
    model = checkpoints.build("deepseek_v3", **sizes)
    checkpoints.write("deepseek_v3", tmp_path, **sizes)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_json(tmp_path / "config.json", **config | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "own.Config"}})
    assert greedy(served(tmp_path), 8) == greedy_by_transformers(model, 8)
