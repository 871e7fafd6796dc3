"""Some encoder-decoders are loaded with some settings, and the loader finds out about them what an engine needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from core.config import EngineConfig
from core.errors import UnsupportedModel
from tests import checkpoints
from workers.model import decoder_of, load, outline_of, survey
from workers.model.encoder_decoder import MAX_SOURCE_TOKENS
from workers.model.servable import check_architecture


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(str(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel", 2),
        ("layers", (0,)),
        ("quantize", "int8"),
        ("adapters", {"a": "/a"}),
        ("head", "/head"),
        ("feature_layers", (-1,)),
    ],
)
def test_settings_without_a_place_are_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    config = replace(config_of(checkpoints.write("t5", tmp_path)), **{name: value})
    with pytest.raises(UnsupportedModel, match=f"^{name} must be .*: t5 is an encoder-decoder"):
        survey(config)


@pytest.mark.parametrize("family", ["led", "m2m_100", "prophetnet", "umt5"])
def test_other_encoder_decoders_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{family} is an encoder-decoder; of these bart, .* are served"):
        check_architecture(AutoConfig.for_model(family))


def test_limits_of_source_and_text_are_the_models(tmp_path: Path) -> None:
    info = survey(config_of(checkpoints.write("bart", tmp_path / "bart")))
    assert (info.max_source_tokens, info.max_context_tokens, info.decoder_start) == (256, 256, (0,))
    assert info.text_limit(100) == 356
    without_limit = config_of(checkpoints.write("t5", tmp_path / "t5"))
    assert survey(without_limit).max_source_tokens == MAX_SOURCE_TOKENS
    assert survey(replace(without_limit, max_context_tokens=5000)).max_source_tokens == 5000


def test_a_token_that_the_model_forces_follows_the_start(tmp_path: Path) -> None:
    file = checkpoints.write("bart", tmp_path) / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"forced_bos_token_id": 7}))
    assert survey(config_of(tmp_path)).decoder_start == (0, 7)


@pytest.mark.parametrize("name", ["min_length", "min_new_tokens", "no_repeat_ngram_size"])
def test_a_generation_setting_that_is_not_applied_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file = checkpoints.write("bart", tmp_path) / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: 3}))
    with pytest.raises(UnsupportedModel, match=f"{name} is 3"):
        survey(config_of(tmp_path))


def test_without_a_start_token_it_is_refused(tmp_path: Path) -> None:
    checkpoints.write("t5", tmp_path)
    for name in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / name).read_text())
        found.pop("decoder_start_token_id", None)
        (tmp_path / name).write_text(json.dumps(found))
    with pytest.raises(UnsupportedModel, match="decoder_start_token_id must be a token id"):
        survey(config_of(tmp_path))


def test_an_outline_counts_the_decoders_layers(tmp_path: Path) -> None:
    outline = outline_of(config_of(checkpoints.write("mt5", tmp_path)))
    assert [(layer.num_kv_heads, layer.key_dim) for layer in outline.shape.layers] == [(4, 12)] * 2


@torch.inference_mode()
def test_the_bias_of_a_distance_is_the_models_own(tmp_path: Path) -> None:
    """Up to distances beyond the largest that is told apart."""
    loaded = load(config_of(checkpoints.write("t5", tmp_path)), lambda _: None)
    assert decoder_of(loaded.model) is not None
    own = checkpoints.build("t5").get_decoder().block[0].layer[0].SelfAttention
    table = loaded.model.get_decoder().block[1].layer[0].SelfAttention.outrider_distances
    dense = own.compute_bias(1, 41, past_seen_tokens=40)[0, :, 0].flip(1)
    distances = torch.arange(41).clamp(max=table.shape[1] - 1)
    torch.testing.assert_close(table[:, distances], dense)
