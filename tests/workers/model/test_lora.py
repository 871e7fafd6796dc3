"""Adapters that are more than plain LoRA, or do not fit the model, are refused by name."""

from __future__ import annotations

import json
import math

import pytest
import torch

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, StartupError, UnsupportedModel
from core.records import Adapter
from tests import checkpoints
from tests.adapters import ALPHA, RANK, edit_tensors, write_adapter
from workers.model import check_checkpoint, load, read_adapter

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(EngineConfig(str(checkpoint)), lambda _: None).model


def refusal(path, model):
    with pytest.raises(StartupError) as caught:
        read_adapter(Adapter("mine", str(path)), model)
    message = str(caught.value)
    assert message.startswith(f"adapter 'mine' in {path}: ")
    assert "\n" not in message
    return message.removeprefix(f"adapter 'mine' in {path}: ")


def test_matrices_are_read_with_the_scale(checkpoint, model, tmp_path):
    path = write_adapter(tmp_path / "a", checkpoint)
    plain = read_adapter(Adapter("a", str(path)), model)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    rooted = read_adapter(Adapter("a", str(path)), model)
    name = "model.layers.0.self_attn.q_proj"
    assert plain.pairs[name].down.shape == (RANK, 32)
    torch.testing.assert_close(rooted.pairs[name].up, plain.pairs[name].up * math.sqrt(RANK))
    assert plain.adapter.digest != rooted.adapter.digest
    assert ALPHA != RANK, "a scale of 1 shows nothing"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type must be LORA, got 'LOHA'"),
        ({"use_dora": True}, "use_dora is True; only plain LoRA is served"),
        ({"use_something_new": True}, "use_something_new is True; only plain LoRA is served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']; only plain LoRA is served"),
        ({"bias": "all"}, "bias is 'all'; only plain LoRA is served"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is [3]"),
        ({"r": 0}, "r must be in [1, 512], got 0"),
        ({"r": 10_000}, "r must be in [1, 512], got 10000"),
        ({"r": True}, "r must be in [1, 512], got True"),
        ({"lora_alpha": None}, "lora_alpha must be a number, got None"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a number, got nan"),
        ({"r": 8}, "lora_A of model.layers.0.self_attn.q_proj is [4, 32], where the model and r need [8, 32]"),
        ({"target_modules": ["q_proj", "out_proj"]}, "target_modules has 'out_proj', for which"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_settings_beyond_plain_lora_are_refused_by_name(checkpoint, model, tmp_path, config, named):
    assert named in refusal(write_adapter(tmp_path / "a", checkpoint, targets=("q_proj",), **config), model)


def with_(**tensors):
    """The adapter with these parts of its first module in place of its own."""
    return lambda found: found | {f"{FIRST}.{part.replace('__', '.')}": tensor for part, tensor in tensors.items()}


def renamed(old, new):
    return lambda found: {name.replace(old, new): each for name, each in found.items()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_(lora_B__weight=torch.full((32, 4), math.nan)), f"{FIRST}.lora_B.weight is not made of finite"),
        (with_(lora_A__weight=torch.full((4, 32), math.inf)), f"{FIRST}.lora_A.weight is not made of finite"),
        (with_(lora_A__weight=torch.ones(4, 32, dtype=torch.int64)), "is not made of finite numbers"),
        (with_(lora_magnitude_vector=torch.ones(32)), f"tensor {FIRST}.lora_magnitude_vector"),
        (with_(weight=torch.ones(32, 32)), f"tensor {FIRST}.weight is no matrix of plain LoRA"),
        (with_(lora_B__weight=torch.ones(16, 4)), "lora_B of model.layers.0.self_attn.q_proj is [16, 4]"),
        (renamed("layers.0.self_attn.q_proj.lora_B", "layers.0.self_attn.k_proj.lora_B"), "lacks its matrix lora_"),
        (renamed("layers.1", "layers.7"), "the model has no module model.layers.7.self_attn.q_proj"),
        (renamed("self_attn.q_proj", "input_layernorm"), "is a LlamaRMSNorm"),
        (lambda _: {"base_model.model.model.embed_tokens.lora_A.weight": torch.ones(4, 304)}, "is a Embedding"),
        (lambda _: {}, "it has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(checkpoint, model, tmp_path, change, named):
    path = write_adapter(tmp_path / "a", checkpoint, targets=("q_proj",), target_modules="all-linear")
    edit_tensors(path, change)
    assert named in refusal(path, model)


def test_an_adapter_of_another_base_is_refused_with_its_name(model, tmp_path):
    other = checkpoints.write("llama", tmp_path / "other-base", hidden_size=64)
    problem = refusal(write_adapter(tmp_path / "a", other, targets=("q_proj",)), model)
    assert "is [4, 64], where the model and r need [4, 32]; the adapter was made for 'other-base'" in problem


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_or_damaged_file_is_named(checkpoint, model, tmp_path, name):
    path = write_adapter(tmp_path / "a", checkpoint)
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) // 2])
    assert name in refusal(path, model)
    (path / name).unlink()
    assert name in refusal(path, model)


def test_files_that_changed_are_not_taken_for_those_that_a_lease_means(checkpoint, model, tmp_path):
    path = write_adapter(tmp_path / "a", checkpoint)
    adapter = read_adapter(Adapter("mine", str(path)), model).adapter
    assert read_adapter(adapter, model).adapter == adapter
    edit_tensors(path, lambda found: {name: each + 1 for name, each in found.items()})
    with pytest.raises(CheckpointError, match="not those that it was loaded from"):
        read_adapter(adapter, model)


def test_adapters_of_the_settings_are_checked_before_the_start(checkpoint, tmp_path):
    path = write_adapter(tmp_path / "a", checkpoint)
    check_checkpoint(EngineConfig(str(checkpoint), adapters={"a": str(path)}))
    write_adapter(tmp_path / "b", checkpoint, use_dora=True)
    with pytest.raises(UnsupportedModel, match="adapter 'b'"):
        check_checkpoint(EngineConfig(str(checkpoint), adapters={"a": str(path), "b": str(tmp_path / "b")}))


@pytest.mark.parametrize("settings", [{"adapters": {"": "dir"}}, {"adapters": {"a": "x", "b": "y"}, "max_adapters": 1}])
def test_settings_of_adapters_have_bounds(settings):
    with pytest.raises(ConfigError, match="adapters must be"):
        EngineConfig("dir", **settings)
