"""The MTP layer of a checkpoint is recognised by its tensors, and read alone; or refused in one line that says why."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import EngineConfig
from core.errors import CheckpointError, StartupError, UnsupportedModel
from tests import checkpoints, mtp, quantized
from workers.heads import MtpConfig, check_head, load_engine_head, load_mtp_head, read_head
from workers.model import load
from workers.runtime import load_head_runtime


def settings(path, head=None):
    return EngineConfig(str(path), head=str(head or path), kv_cache_tokens=64)


def change(path, by):
    tensors = load_file(path / "model.safetensors")
    by(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def quiet(_):
    pass


def head_at(path):
    config = read_head(str(path))
    assert isinstance(config, MtpConfig)
    return load_mtp_head(config, settings(path), quiet)[0]


@pytest.mark.parametrize("family", mtp.NUM_LAYERS)
def test_a_checkpoint_is_recognised_and_nothing_else_is_read(tmp_path, family):
    mtp.write(family, tmp_path)

    def damage(tensors):
        for name in tensors:
            if name.startswith("model.layers.0.") and tensors[name].is_floating_point():
                tensors[name].fill_(torch.nan)

    change(tmp_path, damage)
    config = read_head(str(tmp_path))
    assert isinstance(config, MtpConfig)
    assert (config.feature_layers, config.feature_width) == ((-1,), 32)
    check_head(settings(tmp_path))
    head = head_at(tmp_path)
    whole = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert head.num_parameters < 0.7 * whole


@pytest.mark.parametrize("own_shared", [False, True])
def test_the_targets_embedding_and_output_layer_are_borrowed(tmp_path, own_shared):
    """Some checkpoints have copies of them in the layer."""
    mtp.write("glm4_moe", tmp_path, own_shared)
    target = load(EngineConfig(str(tmp_path)), quiet)
    model = load_engine_head(settings(tmp_path), target, quiet).head.model
    assert model.get_input_embeddings() is target.model.get_input_embeddings()
    assert model.get_output_embeddings() is target.model.get_output_embeddings()


def test_beside_a_target_of_several_ranks_it_is_whole(tmp_path):
    mtp.write("glm4_moe", tmp_path)
    target = load(EngineConfig(str(tmp_path)), quiet)
    model = load_engine_head(replace(settings(tmp_path), tensor_parallel=2), target, quiet).head.model
    assert model.get_output_embeddings() is not target.model.get_output_embeddings()
    assert torch.equal(model.get_output_embeddings().weight, target.model.get_output_embeddings().weight)


def test_a_layer_with_an_output_layer_of_its_own_uses_it(tmp_path):
    mtp.write("glm4_moe", tmp_path, own_shared=True)
    change(tmp_path, lambda tensors: tensors["model.layers.2.shared_head.head.weight"].zero_())
    target = load(EngineConfig(str(tmp_path)), quiet)
    model = load_engine_head(settings(tmp_path), target, quiet).head.model
    assert not model.get_output_embeddings().weight.any()
    assert model.get_input_embeddings() is target.model.get_input_embeddings()


DAMAGED = {
    "no norm": (lambda t: t.pop("model.layers.2.hnorm.weight"), "lacks hnorm.weight, or pre_fc_norm_hidden.weight"),
    "missing": (
        lambda t: t.pop("model.layers.2.self_attn.o_proj.weight"),
        "read as model.layers.0: .* lack 1 tensor, model.layers.0.self_attn.o_proj.weight",
    ),
    "left over": (
        lambda t: t.update({"model.layers.2.gate2.weight": torch.zeros(1)}),
        "have 1 tensor, model.layers.2.gate2.weight, which Glm4MoeForCausalLM has no place for",
    ),
    "shape": (lambda t: t.update({"model.layers.2.shared_head.norm.weight": torch.zeros(3)}), r"is \(3,\), but"),
    "several": (
        lambda t: t.update({"model.layers.3.hnorm.weight": torch.zeros(32), "model.layers.3.x": torch.zeros(1)}),
        "has 2 MTP layers",
    ),
}


@pytest.mark.parametrize(("by", "says"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_layers_are_refused_by_name_before_weights_are_read(tmp_path, by, says):
    mtp.write("glm4_moe", tmp_path)
    change(tmp_path, by)
    with pytest.raises(StartupError, match=says):
        check_head(settings(tmp_path))
    load(EngineConfig(str(tmp_path)), quiet)  # the target itself has all that it needs


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_layers_beyond_the_configurations_that_are_not_mtp_are_refused(tmp_path, family):
    """Else a model of more layers would be served without its last ones."""
    mtp.write(family, tmp_path)
    file = tmp_path / "config.json"
    config, num_layers = json.loads(file.read_text()), mtp.NUM_LAYERS[family] - 1
    kinds = {"layer_types": config["layer_types"][:num_layers]} if "layer_types" in config else {}
    file.write_text(json.dumps({**config, "num_hidden_layers": num_layers, **kinds}))
    with pytest.raises(CheckpointError, match=rf"model\.layers\.{num_layers}\..*, which .* has no place for"):
        load(EngineConfig(str(tmp_path)), quiet)


@pytest.mark.parametrize("name", ["eh_proj.weight", "self_attn.q_proj.weight"])
def test_values_are_checked(tmp_path, name):
    mtp.write("glm4_moe", tmp_path)
    change(tmp_path, lambda tensors: tensors[f"model.layers.2.{name}"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"eh_proj .*has NaN|q_proj.weight .*has NaN"):
        load_head_runtime(settings(tmp_path), quiet)


def test_the_shape_of_the_projection_is_checked(tmp_path):
    mtp.write("glm4_moe", tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.zeros(32, 32)}))
    with pytest.raises(CheckpointError, match=r"eh_proj .* is \(32, 32\), but should be \(32, 64\)"):
        load_head_runtime(settings(tmp_path), quiet)


def test_checkpoints_without_such_a_layer_and_other_families(tmp_path):
    checkpoints.write("llama", tmp_path)
    with pytest.raises(CheckpointError, match="has no MTP layer: none of its tensors are of layer 2 or of mtp"):
        check_head(settings(tmp_path))
    change(tmp_path, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(32, 64)}))
    with pytest.raises(UnsupportedModel, match="is of model type llama; those of deepseek_v3, "):
        check_head(settings(tmp_path))


def test_the_layer_of_another_target_is_refused_by_field(tmp_path):
    mtp.write("glm4_moe", tmp_path / "head", hidden_size=48)
    mtp.write("glm4_moe", tmp_path / "target")
    with pytest.raises(CheckpointError, match="head is of another target: its hidden_size is 48, not 32"):
        check_head(settings(tmp_path / "target", tmp_path / "head"))
    file = tmp_path / "head/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": "many"}))
    with pytest.raises(CheckpointError, match="vocab_size must be a number, got 'many'"):
        read_head(str(tmp_path / "head"))


def test_a_layer_of_quantized_weights_is_read_as_floats(tmp_path):
    mtp.write("deepseek_v3", tmp_path / "original")
    heads = [head_at(path) for path in quantized.quantize("DeepSeek", tmp_path / "original", tmp_path)]
    assert_same_head(*heads)


def test_the_layer_of_a_multimodal_checkpoint_is_that_of_its_language_model(tmp_path):
    mtp.write("qwen3_5_text", tmp_path)
    plain = head_at(tmp_path)

    def name_inside(name):
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    change(tmp_path, lambda tensors: [tensors.update({name_inside(name): tensors.pop(name)}) for name in list(tensors)])
    file = tmp_path / "config.json"
    text, kind = json.loads(file.read_text()), {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    file.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False, **kind}))
    assert_same_head(head_at(tmp_path), plain)
    load(EngineConfig(str(tmp_path)), quiet)


def test_the_index_of_the_layer_is_left_out_as_that_of_the_others(tmp_path):
    mtp.write("deepseek_v3", tmp_path)
    plain = head_at(tmp_path)
    change(tmp_path, lambda t: t.update({"model.layers.2.self_attn.indexer.wk.weight": torch.zeros(1)}))
    file = tmp_path / "config.json"
    kind = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 48}
    file.write_text(json.dumps({**json.loads(file.read_text()), **kind}))
    assert_same_head(head_at(tmp_path), plain)
    load(EngineConfig(str(tmp_path)), quiet)


def assert_same_head(head, plain):
    got, expected = head.state_dict(), plain.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert torch.equal(head._projection, plain._projection)
