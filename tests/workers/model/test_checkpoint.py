"""Facts about a checkpoint without reading its weights are those that loading would find, in the memory of the code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from core.config import EngineConfig
from core.errors import CheckpointError, StartupError, UnsupportedModel
from tests import checkpoints
from tests.workers.model.test_loader import edit_json, split_into_shards
from workers.model.checkpoint import meta_model
from workers.model.loader import load, survey

pytestmark = pytest.mark.thorough

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
CHECK = """
import resource
from deploy.cli.main import main
from workers.model import loader
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
status = main(["check", "--no-weights", "--target", {target!r}])
print(status, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
GIB = 2**30


def survey_of(path: Path) -> Any:
    return survey(EngineConfig(str(path)))


def refusal(path: Path, kind: type[StartupError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        survey_of(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.write("llama", tmp_path / "llama")


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Other tensors, by their names with _ for a dot; None takes one away."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        old = next(each for each in tensors if each.replace(".", "_") == name)
        tensors.pop(old)
        if tensor is not None:
            tensors[old] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "phi3"])
def test_it_tells_what_loading_tells(tmp_path: Path, family: str) -> None:
    path = checkpoints.write(family, tmp_path)
    edit_json(path / "generation_config.json", eos_token_id=[7, 9])
    assert survey_of(path) == load(EngineConfig(str(path)), lambda _: None).info


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert survey_of(path) == load(EngineConfig(str(path)), lambda _: None).info


def test_experts_that_are_stored_one_by_one_are_counted_together(tmp_path: Path) -> None:
    path = checkpoints.write("mixtral", tmp_path, **MIXTURE)
    assert survey_of(path).num_parameters == checkpoints.build("mixtral", **MIXTURE).num_parameters()
    change_tensors(path, model_layers_1_block_sparse_moe_experts_2_w1_weight=None)
    assert "block_sparse_moe.experts.0.w1.weight" in refusal(path)


def test_a_sharded_checkpoint_is_complete_or_its_first_lack_is_named(llama: Path) -> None:
    whole = survey_of(llama)
    shards = split_into_shards(llama)
    assert survey_of(llama) == whole
    tensors = load_file(shards[1])
    name = sorted(tensors)[0]
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, shards[1], {"format": "pt"})
    assert f"says that {shards[1].name} has {name}, but the file lacks it" in refusal(llama)
    shards[1].unlink()
    assert f"lacks {shards[1].name}" in refusal(llama)


@pytest.mark.parametrize("change", [-1, -1000, 1], ids=["a byte less", "cut off", "a byte more"])
def test_a_file_of_another_length_than_its_header_says_is_refused(llama: Path, change: int) -> None:
    weights = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(weights[:change] if change < 0 else weights + b"\0" * change)
    assert "model.safetensors is damaged or incomplete" in refusal(llama)


def test_a_pointer_in_place_of_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "model.safetensors is damaged or incomplete" in refusal(llama)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(llama: Path) -> None:
    change_tensors(llama, model_embed_tokens_weight=torch.zeros(200, 32))
    assert "model.embed_tokens.weight" in (message := refusal(llama))
    assert "is (200, 32), but config.json says (304, 32)" in message
    change_tensors(llama, model_embed_tokens_weight=None)
    assert "lack 1 tensor, model.embed_tokens.weight" in refusal(llama)


def test_quantized_weights_are_refused(llama: Path) -> None:
    change_tensors(llama, model_layers_0_mlp_up_proj_weight=torch.zeros(64, 32, dtype=torch.int8))
    assert "is stored as I8, and config.json does not say how" in refusal(llama, UnsupportedModel)


def test_what_loading_refuses_by_its_configuration_is_refused(llama: Path) -> None:
    edit_json(llama / "config.json", model_type="rwkv", architectures=["RwkvForCausalLM"])
    assert "recurrent layers" in refusal(llama, UnsupportedModel)
    (llama / "tokenizer.json").write_text("{}")
    edit_json(llama / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    assert "cannot be read" in refusal(llama)


def test_a_model_of_60_gb_is_looked_at_in_little_memory(tmp_path: Path) -> None:
    """Its file is a header and a hole: read as weights it would fill the memory of the job that downloads models."""
    declare(tmp_path, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, vocab_size=151_936)
    assert (tmp_path / "model.safetensors").stat().st_size > 56 * GIB
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(target=str(tmp_path))],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    *said, last = done.stdout.splitlines()
    status, taken_bytes = map(int, last.split())
    assert status == 0, said
    assert "30,245," in said[0]
    assert "as far as can be told without the weights" in said[1]
    assert taken_bytes < GIB / 4


def declare(path: Path, **sizes: int) -> None:
    """A checkpoint whose weights are a hole in a file, as long as its header says."""
    config = AutoConfig.for_model("llama", **checkpoints.SIZES | {"num_attention_heads": 40} | sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    (path / "tokenizer.json").write_text(checkpoints.tokenizer_json())
    header, end = {}, 0
    for name, tensor in meta_model(config, "bfloat16").state_dict().items():
        begin, end = end, end + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
