"""A model of some layers is what transformers computes with these, is read without the others, and is checked."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.config import DraftConfig, EngineConfig, TargetConfig
from core.errors import ConfigError, UnsupportedModel
from tests.checkpoints import write
from workers.model import check_checkpoint, load, survey
from workers.model.contained.layers import LayerSubset, layer_list
from workers.runtime import ModelRuntime
from workers.step import StepRows

NUM_LAYERS = 5
CHOSEN = (0, 2, 3)
IDS = [5, 17, 99, 4, 200, 31, 7, 8, 9, 1, 2, 3]


def deep(family, path, **changes):
    extra = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
    sizes = {"num_hidden_layers": NUM_LAYERS} | (extra if family == "gemma3_text" else {})
    return write(family, path, **sizes, **changes)


def by_hand(path, chosen):
    """The logits of transformers, from whose own model the other layers are taken out."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    name, layers = layer_list(model)
    parent = model.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], torch.nn.ModuleList(layers[index] for index in chosen))
    model.config.num_hidden_layers = len(chosen)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[index] for index in chosen]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt_neox", "gpt2", "opt"])
def test_it_is_what_transformers_computes_with_these_layers(tmp_path, family):
    path = deep(family, tmp_path)
    config = EngineConfig(str(path), layers=CHOSEN, block_tokens=4, kv_cache_tokens=256)
    runtime = ModelRuntime(load(config, lambda _: None), config)
    kv = runtime.cache.new_sequence()
    runtime.forward([StepRows(kv, IDS[:5], wants_logits=False)])
    logits = runtime.forward([StepRows(kv, IDS[5:])])[0]
    expected = by_hand(path, CHOSEN)
    torch.testing.assert_close(logits, expected[: len(logits)], rtol=1e-4, atol=1e-4)
    assert len(runtime.cache.keys) == len(CHOSEN)
    assert not torch.allclose(expected, by_hand(path, (0, 1, 2)), atol=1e-2), "which layers they are matters"


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("num_dense", [1, 3])
def test_first_layers_without_experts_stay_the_first(tmp_path, family, num_dense):
    path = deep(family, tmp_path, first_k_dense_replace=num_dense)
    config = EngineConfig(str(path), layers=CHOSEN, block_tokens=4, kv_cache_tokens=256)
    runtime = ModelRuntime(load(config, lambda _: None), config)
    logits = runtime.forward([StepRows(runtime.cache.new_sequence(), IDS)])[0]
    torch.testing.assert_close(logits, by_hand(path, CHOSEN)[: len(logits)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("refuse", [check_checkpoint, survey])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2_moe", {"decoder_sparse_step": 2}), ("gpt2", {"scale_attn_by_inverse_layer_idx": True})],
)
def test_a_layer_that_would_be_another_by_its_new_number_is_refused_by_name(tmp_path, family, changes, refuse):
    path = deep(family, tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=r"^layers: .* layer \d would be another as the draft's layer 1; choose"):
        refuse(EngineConfig(str(path), layers=(0, 2, 3)))
    assert survey(EngineConfig(str(path), layers=(0, 1))).layers == (0, 1), "where no number changes"


def test_all_layers_are_the_whole_model(tmp_path):
    path = deep("llama", tmp_path)
    whole, parts = (load(EngineConfig(str(path), layers=each), lambda _: None) for each in (None, tuple(range(5))))
    assert whole.info.num_parameters == parts.info.num_parameters
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[name])


def test_it_is_described_without_reading_a_weight(tmp_path):
    config = EngineConfig(str(deep("llama", tmp_path)), layers=CHOSEN)
    found, loaded = survey(config), load(config, lambda _: None).info
    assert found == loaded
    assert found.name.endswith("[0,2,3]")
    assert (found.layers, survey(EngineConfig(config.model)).layers) == (CHOSEN, ())
    assert found.eos_token_ids


def test_a_layer_that_is_left_out_is_never_read(tmp_path):
    path = deep("llama", tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if ".layers.1." not in name and ".layers.4." not in name},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert load(EngineConfig(str(path), layers=CHOSEN), lambda _: None).info.num_parameters


@pytest.mark.parametrize("refuse", [check_checkpoint, survey, lambda config: load(config, lambda _: None)])
def test_a_layer_that_there_is_none_of_is_named(tmp_path, refuse):
    path = deep("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"layers\[2\] is 5, but .* has layers 0 to 4"):
        refuse(EngineConfig(str(path), layers=(0, 3, 5)))


@pytest.mark.parametrize("layers", [(), (1, 0), (1, 1), (-1, 2)])
def test_settings_that_are_no_choice_of_layers_are_refused(layers):
    with pytest.raises(ConfigError, match=r"layers.*ascending"):
        EngineConfig("m", layers=layers)


def test_ranks_do_not_share_some_layers_and_a_target_is_whole():
    with pytest.raises(ConfigError, match=r"tensor_parallel"):
        EngineConfig("m", layers=(0,), tensor_parallel=2)
    part = EngineConfig("m", layers=(0,))
    with pytest.raises(ConfigError, match=r"engine\.layers.*whole"):
        TargetConfig(part)
    assert DraftConfig(part).engine.layers == (0,)


def test_stored_names_are_renumbered_and_those_of_other_layers_have_none():
    subset = LayerSubset((1, 4))
    assert subset.renamed("model.layers.4.mlp.up_proj.weight", "layers") == "model.layers.1.mlp.up_proj.weight"
    assert subset.renamed("layers.1.x", "layers") == "layers.0.x"
    assert subset.renamed("model.layers.2.x", "layers") is None
    assert subset.renamed("model.norm.weight", "layers") == "model.norm.weight"
    assert subset.renamed("h.4.attn.layers.9.x", "h") == "h.1.attn.layers.9.x"


def test_a_whole_model_is_itself_again_after_a_part_of_it_was_tried(tmp_path):
    path = deep("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=False).logits
        with LayerSubset(CHOSEN).of(model):
            part = model(input_ids=ids, use_cache=False).logits[0, -1]
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, whole)
    torch.testing.assert_close(part, by_hand(path, CHOSEN))
    assert model.config.num_hidden_layers == json.loads((path / "config.json").read_text())["num_hidden_layers"]


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "llama"])
def test_lists_that_have_two_entries_anyway_stay_whole_in_a_model_of_two_layers(tmp_path, family):
    """Limits of time steps, multipliers, tokens that end an output."""
    config = AutoConfig.from_pretrained(write(family, tmp_path, num_hidden_layers=2, eos_token_id=[1, 2]))
    subset = LayerSubset((1,)).config_of(config)
    assert subset.num_hidden_layers == 1
    assert subset.eos_token_id == [1, 2]
    for name in ("time_step_limit", "mlp_multipliers", "ssm_multipliers"):
        assert getattr(subset, name, None) == getattr(config, name, None)
