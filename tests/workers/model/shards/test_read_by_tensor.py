"""A model that is read tensor by tensor is the one that transformers reads, and never whole in the host's memory."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from core.config import EngineConfig
from core.errors import CheckpointError, UnsupportedModel
from tests import checkpoints
from workers.model import loader
from workers.model.checked import check
from workers.model.experts import stacked
from workers.model.shards.sharded_loader import read_by_tensor

FAMILIES = sorted({"llama", "qwen2", "gpt2", "olmoe", *checkpoints.FAMILIES, *checkpoints.EXPERTS})
"""Checkpoints of most mixtures have tensors for each expert, of which transformers makes one."""


def tensors(model):
    return dict(chain(model.named_parameters(), model.named_buffers()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_has_the_tensors_that_transformers_reads(family, dtype, tmp_path):
    path = checkpoints.write(family, tmp_path / family)
    config = EngineConfig(str(path), dtype=dtype)
    read = tensors(read_by_tensor([path / "model.safetensors"], AutoConfig.from_pretrained(path), config))
    by_transformers = tensors(AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)))
    assert list(read) == list(by_transformers)
    for name, want in by_transformers.items():
        assert torch.equal(read[name], want), name
        assert read[name].dtype == want.dtype, name


def test_an_output_layer_that_is_tied_shares_its_memory(tmp_path):
    path = checkpoints.write("llama", tmp_path / "llama", tie_word_embeddings=True)
    model = read_by_tensor([path / "model.safetensors"], AutoConfig.from_pretrained(path), EngineConfig(str(path)))
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_on_another_device_nothing_is_read_by_transformers(tmp_path, monkeypatch):
    path = checkpoints.write("llama", tmp_path / "llama")
    config = EngineConfig(str(path), device="meta")  # a device that a CPU has, too
    monkeypatch.setattr(loader, "_read_weights", lambda *_, **__: pytest.fail("the host has it whole"))
    model = loader._read_whole(check(config), config)
    assert {each.device.type for each in tensors(model).values()} == {"meta"}
    assert not model.training
    assert model.generation_config.eos_token_id == checkpoints.EOS


@pytest.mark.parametrize("matrix", ["w1", "w2"])
def test_an_expert_of_another_shape_is_named(matrix, tmp_path):
    path = checkpoints.write("mixtral", tmp_path)
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith(f"experts.2.{matrix}.weight"))
    weights[name] = weights[name].T.contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"an expert of model\.layers\.0\.mlp\.experts|damaged"):
        read_by_tensor([path / "model.safetensors"], AutoConfig.from_pretrained(path), EngineConfig(str(path)))


def test_an_expert_that_lacks_a_matrix_is_missed(tmp_path):
    path = checkpoints.write("mixtral", tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights[next(name for name in weights if name.endswith("experts.3.w1.weight"))]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gate_up_proj is made of 3, 4 matrices"):
        read_by_tensor([path / "model.safetensors"], AutoConfig.from_pretrained(path), EngineConfig(str(path)))


@pytest.mark.parametrize("family", ["mixtral"])
def test_tensors_that_have_to_be_converted_otherwise_pass_through_the_host(family, tmp_path, monkeypatch):
    path = checkpoints.write(family, tmp_path / family)
    monkeypatch.setattr(stacked, "STACKS", ())
    config, model_config = EngineConfig(str(path), device="meta"), AutoConfig.from_pretrained(path)
    with pytest.raises(UnsupportedModel):
        read_by_tensor([path / "model.safetensors"], model_config, config)
    assert {each.device.type for each in tensors(loader._read_whole(check(config), config)).values()} == {"meta"}


def test_a_tensor_that_transformers_makes_by_itself_passes_through_the_host(tmp_path, monkeypatch):
    path = checkpoints.write("llama", tmp_path / "llama")
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", [r"model\.norm\.weight"])
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is not stored"):
        read_by_tensor([path / "model.safetensors"], AutoConfig.from_pretrained(path), EngineConfig(str(path)))
    assert loader.load(EngineConfig(str(path)), lambda _: None).info.num_parameters
