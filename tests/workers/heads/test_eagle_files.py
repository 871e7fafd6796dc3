"""EAGLE heads are recognised in each published format, or refused in one line that says what is wrong with them."""

from __future__ import annotations

import pickle

import pytest
import torch

from core.errors import CheckpointError
from tests import checkpoints, eagle
from workers.heads import load_eagle, read_head

SHAPE = {key: value for key, value in eagle.CONFIG.items() if not key.startswith("eagle_aux")}


@pytest.fixture(scope="module")
def model():
    return checkpoints.build("llama")


def tensors_of(prefix="midlayer.", **config):
    tensors = eagle.tensors_of({**SHAPE, **config})
    return {name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()}


def load(path, model):
    config = read_head(path)
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    return load_eagle(config, path, *layers, checkpoints.VOCAB_SIZE, torch.float32)


LAYER_KEYS = {
    "ModelOpt": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]}}, (2, 18, 34)),
    "speculators": ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, (2, 18, 33)),
    "DeepSpec": ({"target_layer_ids": [1, 9, 17]}, (2, 10, 18)),
    "override": ({"feature_layers": [3, 4, 5], "target_layer_ids": [1, 9, 17]}, (3, 4, 5)),
}


@pytest.mark.parametrize(("keys", "layers"), LAYER_KEYS.values(), ids=LAYER_KEYS)
def test_layers_by_the_key_of_each_publisher(tmp_path, keys, layers):
    assert read_head(eagle.write(tmp_path, {**SHAPE, **keys}, tensors_of())).feature_layers == layers


@pytest.mark.parametrize("nested", [False, True])
def test_the_authors_layers_follow_from_the_target(tmp_path, nested):
    path = eagle.write(tmp_path / "head", SHAPE, tensors_of())
    sizes = '{"num_hidden_layers": 36}'
    (tmp_path / "config.json").write_text(f'{{"text_config": {sizes}}}' if nested else sizes)
    assert read_head(path, str(tmp_path)).feature_layers == (2, 18, 33)
    with pytest.raises(CheckpointError, match="names no layers"):
        read_head(path)


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_names_and_files(tmp_path, model, prefix, file):
    path = eagle.write(tmp_path, eagle.CONFIG, tensors_of(prefix), file)
    assert load(path, model).config.feature_width == 3 * eagle.HIDDEN


def test_eagle_1_has_its_targets_width(tmp_path):
    config = {**eagle.FIRST_CONFIG, "target_hidden_size": 16}
    tensors = {**eagle.first_tensors_of(eagle.FIRST_CONFIG), "fc.weight": torch.zeros(eagle.HIDDEN, eagle.HIDDEN + 16)}
    with pytest.raises(CheckpointError, match=r"config\.json: target_hidden_size is 16, but a head of EAGLE-1"):
        read_head(eagle.write(tmp_path, config, tensors))


@pytest.mark.parametrize("borrows", [False, True])
def test_a_map_of_the_whole_vocabulary(tmp_path, model, borrows):
    """SpecForge and `outrider train-head` write one for every head."""
    config = {**eagle.CONFIG, "draft_vocab_size": eagle.VOCAB}
    tensors = {**eagle.tensors_of(config), "d2t": torch.zeros(eagle.VOCAB, dtype=torch.int64)}
    without = load(eagle.write(tmp_path / "without", config, eagle.tensors_of(config)), model)
    if borrows:
        del tensors["lm_head.weight"]
        without.output = model.get_output_embeddings()
    head, outputs = load(eagle.write(tmp_path / "with", config, tensors), model), torch.randn(3, eagle.HIDDEN)
    with torch.inference_mode():
        assert torch.equal(*(each.logits_of(each.scores(outputs)) for each in (head, without)))


def test_the_format_of_speculators(tmp_path, model):
    outer = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": eagle.NUM_DRAFT,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": {**SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    }
    config = load(eagle.write(tmp_path, outer, tensors_of("layers.0.")), model).config
    assert config.norm_before_residual, "speculators' default"
    assert config.rope.rope_parameters["rope_theta"] == 5e5
    assert config.draft_vocab_size == eagle.NUM_DRAFT


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_a_mask_for_parallel_drafting(tmp_path, model, key):
    tensors = {**tensors_of("layers.0."), "mask_hidden": torch.zeros(1, 96)}
    head = load(eagle.write(tmp_path, {**eagle.CONFIG, "speculators_model_type": "peagle", key: 7}, tensors), model)
    assert (head.config.mask_token, head.config.norm_before_residual) == (7, True)


def test_rope_is_the_heads_own(tmp_path):
    path = eagle.write(tmp_path / "plain", eagle.CONFIG, tensors_of())
    assert read_head(path).rope.rope_parameters["rope_theta"] == 10000.0
    scaling = {"rope_type": "linear", "factor": 2.0}
    path = eagle.write(tmp_path / "old", {**eagle.CONFIG, "rope_theta": 1e6, "rope_scaling": scaling}, tensors_of())
    rope = read_head(path).rope.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (1e6, "linear", 2.0)


def without(name):
    return {key: tensor for key, tensor in tensors_of().items() if key != name}


DAMAGED = {
    "missing": (without("midlayer.mlp.up_proj.weight"), "lacks 1 tensors .* layers.0.mlp.up_proj.weight"),
    "no map": (without("d2t"), "lacks 1 tensors .* d2t"),
    "left over": ({**tensors_of(), "extra.weight": torch.zeros(1, 96)}, "1 tensors too many .* extra.weight"),
    "mask": ({**tensors_of(), "mask_hidden": torch.zeros(1, 96)}, "mask_token_id must be a token id below 304"),
    "shape": ({**tensors_of(), "norm.weight": torch.zeros(3)}, r"norm.weight .* is \(3,\), but should be \(32,\)"),
    "NaN": ({**tensors_of(), "norm.weight": torch.full((32,), torch.nan)}, "norm.weight .* has NaN"),
    "map": ({**tensors_of(), "d2t": torch.full((eagle.NUM_DRAFT,), 900)}, "d2t .* is no map"),
    "map to one token": ({**tensors_of(), "d2t": -torch.arange(eagle.NUM_DRAFT)}, "d2t .* is no map"),
    "another kind": ({"w": torch.zeros(1)}, "has no fc.weight and layers.0.self_attn.q_proj.weight"),
    "layers": ({**tensors_of(), "fc.weight": torch.zeros(32, 128)}, r"reads 4 layers, but its layers are \[0, 1, 2\]"),
}


@pytest.mark.parametrize(("tensors", "says"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_tensors_are_refused_by_name(tmp_path, model, tensors, says):
    with pytest.raises(CheckpointError, match=says):
        load(eagle.write(tmp_path, eagle.CONFIG, tensors), model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": "32"}, "hidden_size must be a number"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a number"),
        ({"parallel_drafting": True}, "parallel_drafting is set, but the head has no mask_hidden"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not served"),
        ({"dflash_config": {"mask_token_id": 3}}, "dflash_config {'mask_token_id': 3} is not served"),
        ({"markov_rank": 256}, "markov_rank 256 is not served"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not served"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False is not served"),
    ],
)
def test_bad_configurations_are_refused(tmp_path, changes, says):
    with pytest.raises(CheckpointError, match=says):
        read_head(eagle.write(tmp_path, {**eagle.CONFIG, **changes}, tensors_of()))


EAGLE_1_DAMAGED = {
    "norm of a later kind": (
        "layers.0.input_layernorm.weight",
        "1 tensors too many .* layers.0.input_layernorm.weight",
    ),
    "norm of features": ("fc_norm.0.weight", "1 tensors too many .* fc_norm.0.weight"),
    "final norm": ("norm.weight", "1 tensors too many .* norm.weight"),
}


@pytest.mark.parametrize(("name", "says"), EAGLE_1_DAMAGED.values(), ids=EAGLE_1_DAMAGED)
def test_eagle_1_is_recognised_by_its_first_layer(tmp_path, model, name, says):
    tensors = eagle.first_tensors_of(eagle.FIRST_CONFIG)
    head = load(eagle.write(tmp_path, eagle.FIRST_CONFIG, tensors, "pytorch_model.bin"), model)
    assert (head.config.is_eagle3, head.config.feature_layers) == (False, (-1,))
    with pytest.raises(CheckpointError, match=says):
        load(eagle.write(tmp_path, eagle.FIRST_CONFIG, tensors | {name: torch.zeros(3)}, "pytorch_model.bin"), model)


def test_a_head_of_another_width_needs_its_own_layers(tmp_path, model):
    tensors = tensors_of(target_hidden_size=16)
    del tensors["embed_tokens.weight"]
    path = eagle.write(tmp_path, {**eagle.CONFIG, "target_hidden_size": 16}, tensors)
    with pytest.raises(CheckpointError, match=r"lacks embed_tokens.weight, which a head of another width"):
        load(path, model)
    with pytest.raises(CheckpointError, match="its target_hidden_size is 16, not 32"):
        read_head(path).check_target(32, eagle.VOCAB)
    with pytest.raises(CheckpointError, match="its vocab_size is 304, not 500"):
        read_head(path).check_target(16, 500)


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


def test_nothing_in_a_pickle_is_executed(tmp_path, capsys):
    eagle.write(tmp_path, eagle.CONFIG, {}, "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Harmful()}))
    with pytest.raises(CheckpointError, match="damaged, or no file of tensors alone"):
        read_head(str(tmp_path))
    assert "executed" not in capsys.readouterr().out
