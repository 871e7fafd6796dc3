"""Every way of loading refuses weights that are quantized, or that are not all the model's, and names what it found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from core.errors import CheckpointError, StartupError, UnsupportedModel
from tests import checkpoints
from tests.workers.model.test_loader import edit_json, split_into_shards
from workers.model import ModelShard, check_checkpoint, load, reference_model, survey

Change = Callable[[dict[str, torch.Tensor]], Any]
UP = "model.layers.1.mlp.up_proj.weight"


def by_load(path: Path, shard: ModelShard | None = None, **settings: Any) -> None:
    load(EngineConfig(str(path), **settings), lambda _: None, shard)


WAYS: dict[str, Callable[[Path], Any]] = {
    "whole": by_load,
    "by tensor": lambda path: by_load(path, device="meta"),
    "a rank": lambda path: by_load(path, ModelShard(0, 2), tensor_parallel=2),
    "some layers": lambda path: by_load(path, layers=(1,)),
    "reference": lambda path: reference_model(EngineConfig(str(path))),
    "survey": lambda path: survey(EngineConfig(str(path))),
    "before start": lambda path: check_checkpoint(EngineConfig(str(path))),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.write("llama", tmp_path / "llama")


def change(path: Path, by: Change) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    by(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refusal(way: Callable[[Path], Any], path: Path, kind: type[StartupError]) -> str:
    with pytest.raises(kind) as caught:
        way(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def blocks_of_fp8(tensors: dict[str, torch.Tensor]) -> None:
    """Tensors stored like those of DeepSeek's checkpoints: values in float8, and a scale for each block."""
    whole = tensors[UP]
    scale = whole.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    tensors[UP] = (whole / scale).to(torch.float8_e4m3fn)
    tensors[f"{UP}_scale_inv"] = scale.reshape(1, 1)


@every_way
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
def test_weights_of_another_type_than_floats_are_refused(way: Callable[[Path], Any], dtype: torch.dtype, llama) -> None:
    change(llama, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    assert f"{UP} in {llama} is stored as" in refusal(way, llama, UnsupportedModel)


@every_way
def test_blocks_of_fp8_that_no_config_declares_are_refused_with_their_scales_or_without(
    way: Callable[[Path], Any], llama: Path
) -> None:
    change(llama, blocks_of_fp8)
    assert f"{UP} in {llama} is stored as F8_E4M3" in refusal(way, llama, UnsupportedModel)
    change(llama, lambda tensors: tensors.update({UP: tensors[UP].float()}))
    message = refusal(way, llama, CheckpointError)
    assert f"have 1 tensor, {UP}_scale_inv, which LlamaForCausalLM has no place for" in message


@every_way
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_config_that_declares_quantized_weights_is_refused(way: Callable[[Path], Any], key: str, llama) -> None:
    edit_json(llama / "config.json", **{key: {"quant_method": "bitsandbytes", "bits": 4}})
    named = f"config.json has a {key} that is not served: quant_method 'bitsandbytes'"
    assert named in refusal(way, llama, UnsupportedModel)
    edit_json(llama / "config.json", **{key: None})
    way(llama)


@every_way
def test_packed_weights_are_refused_by_their_names(way: Callable[[Path], Any], llama: Path) -> None:
    """GPTQ and AWQ: integers under other names."""

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[UP]
        tensors[UP.replace("weight", "qweight")] = torch.zeros(4, 64, dtype=torch.int32)

    change(llama, pack)
    message = refusal(way, llama, CheckpointError)
    assert "lack 1 tensor, model.layers." in message
    assert f"and have 1 tensor, {UP.replace('weight', 'qweight')}, which" in message


@every_way
def test_what_is_left_over_is_refused_in_shards_too(way: Callable[[Path], Any], llama: Path) -> None:
    """An adapter that was saved beside the weights, and not merged into them."""
    more = {f"{UP[:-7]}.lora_{part}.weight": torch.zeros(2, 2) for part in "AB"}
    change(llama, lambda tensors: tensors.update(more))
    split_into_shards(llama)
    assert f"have 2 tensors, the first is {UP[:-7]}.lora_A.weight" in refusal(way, llama, CheckpointError)


def old_llama(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def old_gpt2(tensors: dict[str, torch.Tensor]) -> None:
    """The tensors of the first published GPT-2: without the prefix, and with its masks."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)


def with_a_layer_of_mtp(tensors: dict[str, torch.Tensor]) -> None:
    """The layer of GLM 4.7 Flash that predicts one more token; its type does not matter either."""
    tensors["model.layers.47.eh_proj.weight"] = torch.zeros(32, 64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("family", "settings", "by"),
    [
        ("llama", {"tie_word_embeddings": True}, old_llama),
        ("gpt2", {"tie_word_embeddings": True}, old_gpt2),
        ("glm4_moe_lite", {}, with_a_layer_of_mtp),
    ],
)
def test_what_transformers_ignores_is_ignored(family: str, settings: dict[str, Any], by: Change, tmp_path) -> None:
    path = checkpoints.write(family, tmp_path, **settings)
    change(path, by)
    assert load(EngineConfig(str(path)), lambda _: None).info == survey(EngineConfig(str(path)))


def test_an_index_says_where_tensors_are_and_need_say_no_more(llama: Path) -> None:
    whole = load(EngineConfig(str(llama)), lambda _: None).model.state_dict()
    split_into_shards(llama)
    edit_json(llama / "model.safetensors.index.json", metadata=None)
    found = load(EngineConfig(str(llama)), lambda _: None).model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in whole.items())
