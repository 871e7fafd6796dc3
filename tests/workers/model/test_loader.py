"""A servable model is loaded without a word on the terminal; others are refused in one line that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from core.config import EngineConfig
from core.errors import CheckpointError, StartupError, UnsupportedModel
from tests import checkpoints
from workers.model.loader import LoadedModel, check_checkpoint, load
from workers.step.kv_cache import LayerShape


def load_quietly(path: Path, **settings: Any) -> LoadedModel:
    return load(EngineConfig(model=str(path), **settings), lambda _: None)


def refusal(path: Path, kind: type[StartupError], **settings: Any) -> str:
    """The message of the refusal, which must be one line."""
    with pytest.raises(kind) as caught:
        load_quietly(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.write("llama", tmp_path / "llama")


def config_only(path: Path, family: str, **settings: Any) -> Path:
    """A directory that has all files, though no weights in them: enough for what is refused by its config."""
    AutoConfig.for_model(family, **settings).save_pretrained(path)
    (path / "tokenizer.json").write_text(checkpoints.tokenizer_json())
    (path / "model.safetensors").touch()
    return path


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_loaded_describes_itself(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[7, 9])
    loaded = load_quietly(llama, kv_cache_tokens=100, block_tokens=16, dtype="bfloat16")
    info = loaded.info
    assert (info.name, info.architecture, info.dtype, info.device) == ("llama", "LlamaForCausalLM", "bfloat16", "cpu")
    assert info.vocab_size == checkpoints.VOCAB_SIZE < loaded.model.config.vocab_size
    assert (info.max_context_tokens, info.kv_cache_tokens) == (512, 100)
    assert (info.eos_token_ids, info.bos_token_id) == ((7, 9), checkpoints.EOS)
    assert info.num_parameters == sum(p.numel() for p in checkpoints.build("llama").parameters())
    assert loaded.layers == (LayerShape(2, 8, 8),) * 2
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training


def test_nothing_is_printed_and_progress_is_told(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    load(EngineConfig(model=str(llama)), told.append)
    assert capfd.readouterr() == ("", "")
    assert any("LlamaForCausalLM" in line for line in told)


def test_a_sharded_checkpoint_is_loaded(llama: Path) -> None:
    whole = load_quietly(llama).model.state_dict()
    split_into_shards(llama)
    shards = load_quietly(llama).model.state_dict()
    assert all(torch.equal(shards[name], tensor) for name, tensor in whole.items())


def test_a_context_beyond_the_models_own_is_refused(llama: Path) -> None:
    assert load_quietly(llama, max_context_tokens=100).info.max_context_tokens == 100
    assert "exactly up to 512" in refusal(llama, UnsupportedModel, max_context_tokens=513)


def test_rope_that_depends_on_the_batch_is_served_only_where_it_does_not(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128} | factors
    path = checkpoints.write("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=128)
    assert load_quietly(path).info.max_context_tokens == 128
    assert "exactly up to 128" in refusal(path, UnsupportedModel, max_context_tokens=256)


def split_into_shards(path: Path) -> list[Path]:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = [path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    names = sorted(tensors)
    parts = [names[::2], names[1::2]]
    for shard, part in zip(shards, parts, strict=True):
        save_file({name: tensors[name] for name in part}, shard, metadata={"format": "pt"})
    index = {name: shard.name for shard, part in zip(shards, parts, strict=True) for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return shards


def test_missing_files_are_named(llama: Path, tmp_path: Path) -> None:
    assert "is not a directory" in refusal(tmp_path / "nowhere", CheckpointError)
    assert "found no weights at all" in refusal(tmp_path, CheckpointError)
    (llama / "config.json").rename(llama / "other.json")
    assert "has no config.json" in refusal(llama, CheckpointError)
    (llama / "other.json").rename(llama / "config.json")
    (llama / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(llama, CheckpointError)


def test_weights_that_are_not_safetensors_are_refused_by_name(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert "found pytorch_model.bin" in refusal(llama, CheckpointError)
    (llama / "pytorch_model.bin").unlink()
    assert "found no weights at all" in refusal(llama, CheckpointError)


def test_truncated_weights_are_refused(llama: Path) -> None:
    weights = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "damaged" in refusal(llama, CheckpointError)


def test_incomplete_weights_are_refused_and_the_first_missing_one_named(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    assert "lack 1 tensor, model.layers.1.mlp.up_proj.weight" in refusal(llama, CheckpointError)


def test_weights_of_another_shape_are_refused(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit_json(llama / "config.json", intermediate_size=65)
    assert "is (32, 64), but config.json says (32, 65)" in refusal(llama, CheckpointError)
    assert capfd.readouterr() == ("", "")


def test_a_missing_shard_and_a_broken_index_are_named(llama: Path) -> None:
    shards = split_into_shards(llama)
    shards[1].unlink()
    assert f"lacks {shards[1].name}" in refusal(llama, CheckpointError)
    (llama / "model.safetensors.index.json").write_text("[]")
    assert "is not an index of shards" in refusal(llama, CheckpointError)


def test_a_config_that_is_not_json_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    assert "is not JSON" in refusal(llama, CheckpointError)


def test_code_from_a_checkpoint_is_never_run(llama: Path) -> None:
    (llama / "evil.py").write_text("raise SystemExit('ran code from a checkpoint')")
    edit_json(llama / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    assert "'evil', which transformers cannot build from its own code" in refusal(llama, UnsupportedModel)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("rwkv", {}, "recurrent layers outside of transformers' cache"),
        ("recurrent_gemma", {}, "recurrent layers outside of transformers' cache"),
        ("led", {}, "led is an encoder-decoder; of these bart"),
        ("stablelm", {}, "does not hand its attention to a backend"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "a BertForMaskedLM, not a BertLMHeadModel"),
        ("vit", {}, "not a causal language model"),
        ("paligemma", {}, "multimodal"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
        ("axk2", {}, "indexed_attention"),
    ],
)
def test_what_the_seam_cannot_carry_is_refused_with_the_reason(
    tmp_path: Path, family: str, settings: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(config_only(tmp_path, family, **settings), UnsupportedModel)


@pytest.mark.parametrize(
    ("family", "where"), [("phimoe", "in its mask, but not in its attention"), ("olmoe", "in its attention, but not")]
)
def test_a_window_that_mask_and_attention_disagree_about_is_refused(family: str, where: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    path = checkpoints.write(family, tmp_path / "narrow", sliding_window=24, **experts)
    assert where in refusal(path, UnsupportedModel)
    load_quietly(checkpoints.write(family, tmp_path / "wide", sliding_window=512, **experts))  # it is never reached


def test_recurrent_layers_are_loaded_with_what_they_store(tmp_path: Path) -> None:
    path = checkpoints.write("qwen3_next", tmp_path)
    loaded = load_quietly(path)
    assert loaded.layers == (LayerShape(), LayerShape(2, 16, 16), LayerShape())
    assert [mixer.layer for mixer in loaded.mixers] == [0, 2]


@pytest.mark.parametrize(
    ("family", "reason"),
    [("qwen3_5_text", "recurrent layers, which are served by one rank only"), ("bamba", "no tensor-parallel plan")],
)
def test_recurrent_layers_are_refused_for_several_ranks(family: str, reason: str, tmp_path: Path) -> None:
    path = checkpoints.write(family, tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{family} has {reason}"):
        check_checkpoint(EngineConfig(str(path), tensor_parallel=2))


def test_a_layer_that_keeps_its_state_elsewhere_is_refused(tmp_path: Path) -> None:
    types = ["full_attention", "linear_attention"]
    path = checkpoints.write("minimax", tmp_path, layer_types=types, num_local_experts=4, num_experts_per_tok=2)
    assert "layer 1 of minimax is of type linear_attention and keeps its state outside" in refusal(
        path, UnsupportedModel
    )
