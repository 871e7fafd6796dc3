"""Adapters are refused by name on layers that do not run over the rows of a step."""

from __future__ import annotations

import pytest

from core.errors import UnsupportedModel
from core.records import Adapter
from tests import checkpoints
from tests.adapters import edit_tensors, write_adapter
from tests.workers.model.test_contained import write as write_multimodal
from workers.model import ModelShard, load, read_adapter


@pytest.mark.parametrize(
    ("family", "target", "says"),
    [
        ("qwen3_next", "out_proj", "recurrent mixer"),
        ("bamba", "in_proj", "recurrent mixer"),
        ("deepseek_v3", "kv_b_proj", "kept as latents"),
    ],
)
def test_layers_that_run_elsewhere(tmp_path, family, target, says):
    path = checkpoints.write(family, tmp_path / "model")
    adapter = Adapter("a", str(write_adapter(tmp_path / "adapter", path, targets=(target,))), "")
    loaded = load(checkpoints.EngineConfig(str(path)), lambda _: None).model
    for model in (checkpoints.build(family), loaded):  # as transformers has it, and as it runs
        with pytest.raises(UnsupportedModel, match=says):
            read_adapter(adapter, model, None)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_vl"])
def test_names_of_a_multimodal_model_are_those_of_its_text_model(tmp_path, kind):
    """PEFT names modules as the whole model has them."""
    write_multimodal(kind, tmp_path / "model")
    path = write_adapter(tmp_path / "adapter", tmp_path / "model", targets=("q_proj",))
    edit_tensors(path, lambda tensors: {name: each for name, each in tensors.items() if "vision" not in name})
    loaded = load(checkpoints.EngineConfig(str(tmp_path / "model")), lambda _: None)
    weights = read_adapter(Adapter("a", str(path), ""), loaded.model, rename=loaded.rename)
    assert len(weights.pairs) == loaded.model.config.num_hidden_layers
    for name in weights.pairs:
        loaded.model.get_submodule(name)


def test_layers_that_images_pass_through_are_refused(tmp_path):
    write_multimodal("gemma3", tmp_path / "model")
    path = write_adapter(tmp_path / "adapter", tmp_path / "model", targets=("q_proj",))
    loaded = load(checkpoints.EngineConfig(str(tmp_path / "model")), lambda _: None)
    with pytest.raises(UnsupportedModel, match="is not in the text model"):
        read_adapter(Adapter("a", str(path), ""), loaded.model, rename=loaded.rename)


def test_a_rank_of_whole_experts_takes_adapters_of_attention(tmp_path):
    """Its expert tensors are already a part, which must not be split once more."""
    path = checkpoints.write("mixtral", tmp_path / "model", num_key_value_heads=4)
    adapter = Adapter("a", str(write_adapter(tmp_path / "adapter", path, targets=("q_proj",))), "")
    config = checkpoints.EngineConfig(str(path), tensor_parallel=4, expert_parallel=True)
    loaded = load(config, lambda _: None, ModelShard(0, 4, True))
    weights = read_adapter(adapter, loaded.model, loaded.shard)
    assert len(weights.pairs) == loaded.model.config.num_hidden_layers
