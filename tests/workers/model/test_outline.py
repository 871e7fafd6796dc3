"""The outline of a model from config.json alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig
from core.errors import CheckpointError, UnsupportedModel
from tests import checkpoints
from tests.workers.model.test_contained import write
from workers.model import load, outline_of

CONFIGS = Path(__file__).parents[3] / "bench" / "checkpoints" / "configs"


def published(name: str, folder: Path, **changes: Any) -> EngineConfig:
    file = folder / "any-name.json"
    file.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text())["config"] | changes))
    return EngineConfig(str(file), dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "parameters", "active", "kv_bytes"),
    [
        ("llama-3.1-8b-instruct", 8_030_261_248, 8_030_261_248, 2 * 32 * 8 * 2 * 128),
        ("qwen3-30b-a3b-instruct-2507", 30_532_122_624, 3_353_000_000, 2 * 48 * 4 * 2 * 128),
        ("deepseek-v3.1", 671_026_000_000, 37_550_000_000, 2 * 61 * (576 + 512)),
        ("gemma-3-4b-it", 3_880_000_000, 3_880_000_000, 2 * 34 * 4 * 2 * 256),
    ],
)
def test_published_sizes_follow_from_the_configuration(
    name: str, parameters: int, active: int, kv_bytes: int, tmp_path: Path
) -> None:
    shape = outline_of(published(name, tmp_path)).shape
    assert shape.num_parameters == pytest.approx(parameters, rel=1e-3)
    assert shape.num_active == pytest.approx(active, rel=1e-2)
    assert shape.kv_bytes() == kv_bytes


def test_it_says_of_a_checkpoint_what_loading_it_says(tmp_path: Path) -> None:
    checkpoints.write("llama", tmp_path)
    config = EngineConfig(str(tmp_path))
    info, found = load(config, lambda _: None).info, outline_of(config)
    assert (found.architecture, found.shape.num_parameters) == (info.architecture, info.num_parameters)
    assert found.max_context_tokens == info.max_context_tokens


def test_of_a_multimodal_model_it_is_the_tower(tmp_path: Path) -> None:
    write("qwen3_vl", tmp_path)
    config = EngineConfig(str(tmp_path))
    assert outline_of(config).shape.num_parameters == load(config, lambda _: None).info.num_parameters


def test_quantized_weights_are_said_to_be(tmp_path: Path) -> None:
    assert outline_of(published("deepseek-v3.1", tmp_path)).is_quantized
    assert not outline_of(published("qwen3-8b", tmp_path)).is_quantized


def test_what_is_refused_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a config\.json nor a directory with one"):
        outline_of(EngineConfig(str(tmp_path / "missing.json")))
    with pytest.raises(UnsupportedModel, match="'nobody'"):
        outline_of(published("qwen3-8b", tmp_path, model_type="nobody"))
    with pytest.raises(UnsupportedModel, match="3 ranks"):
        outline_of(replace(published("qwen3-8b", tmp_path), tensor_parallel=3))


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2", "jamba", "mamba2", "llama"])
def test_states_of_recurrent_layers_are_as_large_as_a_loaded_models(family: str, tmp_path: Path) -> None:
    checkpoints.write(family, tmp_path)
    config = EngineConfig(str(tmp_path), dtype="bfloat16")
    mixers = load(config, lambda _: None).mixers
    want = sum(state.num_bytes for mixer in mixers for state in mixer.states)
    assert outline_of(config).shape.state_bytes == want
    assert (want > 0) is (family != "llama")


def test_a_published_state_is_known_from_the_configuration(tmp_path: Path) -> None:
    """States of 36 layers: 32 heads of 128 x 128 in float32, and a convolution's last four inputs each."""
    shape = outline_of(published("qwen3-next-80b-a3b-instruct", tmp_path)).shape
    assert shape.state_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
