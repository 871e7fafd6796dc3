"""Weights in FP8 are loaded as the floats that they stand for, whole and by ranks, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.config import EngineConfig
from core.errors import CheckpointError, StartupError, UnsupportedModel
from tests import checkpoints
from tests.workers.model.test_loader import edit_json, split_into_shards
from workers.model import ModelShard, load, reference_model, survey

FP8 = torch.float8_e4m3fn
UP = "model.layers.1.mlp.up_proj.weight"
BLOCK = [12, 20]
"""Divides no side of a weight, and no rank's part of one."""


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "float", "num_bits": 8, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


SCHEMES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "DeepSeek": ("_scale_inv", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK}),
    "blocks": ("_scale", compressed(strategy="block", block_structure=BLOCK)),
    "rows": ("_scale", compressed(strategy="channel")),
    "weights": ("_scale", compressed(strategy="tensor")),
}


def quantized(name: str, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and the floats that they stand for; of an own scale for each block, row or weight."""
    rows, columns = weight.shape
    height, width = {"rows": (1, columns), "weights": (rows, columns)}.get(name, BLOCK)
    scale = torch.rand(-(-rows // height), -(-columns // width)) + 0.1
    whole = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    values = (weight / whole).to(FP8)
    return values, scale.reshape(1) if name == "weights" else scale, values.float() * whole


def write(name: str, path: Path, family: str = "llama", **sizes: Any) -> tuple[Path, Path]:
    """Two checkpoints of one model: in FP8, and in float32."""
    scaled, plain = (checkpoints.write(family, path / kind, **sizes) for kind in ("scaled", "plain"))
    suffix, declared = SCHEMES[name]
    stored = load_file(plain / "model.safetensors")
    floats = dict(stored)
    for key in [key for key in stored if key.endswith("proj.weight")]:
        stored[key], stored[key + suffix], floats[key] = quantized(name, stored[key])
    save_file(stored, scaled / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    edit_json(scaled / "config.json", quantization_config=declared)
    return scaled, plain


def loaded(path: Path, shard: ModelShard | None = None, **settings: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = load(EngineConfig(str(path), **settings), lambda _: None, shard).model.state_dict()
    return state


WAYS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "whole": loaded,
    "bfloat16": lambda path: loaded(path, dtype="bfloat16"),
    "the first rank": lambda path: loaded(path, ModelShard(0, 2), tensor_parallel=2),
    "the second rank": lambda path: loaded(path, ModelShard(1, 2), tensor_parallel=2),
    "some layers": lambda path: loaded(path, layers=(1,)),
    "reference": lambda path: reference_model(EngineConfig(str(path))).state_dict(),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_what_values_and_scales_stand_for(way: Callable[[Path], Any], name: str, tmp_path: Path) -> None:
    scaled, plain = write(name, tmp_path)
    split_into_shards(scaled)
    found, expected = way(scaled), way(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def test_experts_are_dequantized_before_they_are_joined(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    scaled, plain = write("DeepSeek", tmp_path, "qwen3_moe", **sizes)
    assert any(".experts." in key and key.endswith("_scale_inv") for key in load_file(scaled / "model.safetensors"))
    found, expected = loaded(scaled), loaded(plain)
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert survey(EngineConfig(str(scaled))).num_parameters == survey(EngineConfig(str(plain))).num_parameters


def test_the_start_says_what_memory_it_takes(tmp_path: Path) -> None:
    scaled, _ = write("rows", tmp_path)
    said: list[str] = []
    load(EngineConfig(str(scaled), dtype="bfloat16"), said.append)
    assert sum(line.startswith("FP8 weights are dequantized to bfloat16, which takes ") for line in said) == 1


SCALE = UP + "_scale_inv"
REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], type[StartupError], str]] = {
    "no scale": (lambda t: t.pop(SCALE), CheckpointError, f"has no scale, {SCALE}"),
    "another shape": (
        lambda t: t.update({SCALE: torch.ones(6, 3)}),
        CheckpointError,
        "is (6, 3), but a weight of (64, 32) needs (6, 2)",
    ),
    "a scale of integers": (lambda t: t.update({SCALE: t[SCALE].int()}), UnsupportedModel, "is stored as I32"),
    "a scale of floats": (lambda t: t.update({UP: t[UP].float()}), CheckpointError, f"have 1 tensor, {SCALE}, which"),
    "a scale of inputs": (
        lambda t: t.update({UP.replace("weight", "input_scale"): torch.ones(1)}),
        CheckpointError,
        "up_proj.input_scale, which",
    ),
    "another type": (lambda t: t.update({UP: t[UP].to(torch.float8_e5m2)}), UnsupportedModel, "is stored as F8_E5M2"),
}


@pytest.mark.parametrize(("change", "kind", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(change: Callable[..., Any], kind: type, problem: str, tmp_path: Path) -> None:
    scaled, _ = write("DeepSeek", tmp_path)
    tensors = load_file(scaled / "model.safetensors")
    change(tensors)
    save_file(tensors, scaled / "model.safetensors", metadata={"format": "pt"})
    for way in (loaded, WAYS["the second rank"], lambda path: survey(EngineConfig(str(path)))):
        with pytest.raises(kind) as caught:
            way(scaled)
        assert problem in str(caught.value)
        assert str(scaled) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "mxfp4"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
        compressed(strategy="channel", num_bits=4),
        compressed(strategy="channel", symmetric=False),
        compressed(strategy="group"),
        "fp8",
    ],
)
def test_other_schemes_are_refused(declared: Any, tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path)
    edit_json(path / "config.json", quantization_config=declared)
    with pytest.raises(UnsupportedModel, match=r"has a quantization_config.*of quantized weights only fp8"):
        survey(EngineConfig(str(path)))
