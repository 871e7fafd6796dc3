"""Quantized weights are loaded as the floats that they stand for, whole and by ranks, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.config import EngineConfig
from core.errors import CheckpointError, StartupError, UnsupportedModel
from tests import checkpoints
from tests.quantized import KINDS, write
from tests.workers.model.test_loader import edit_json, split_into_shards
from workers.model import ModelShard, load, reference_model, survey

UP = "model.layers.1.mlp.up_proj"


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


DENSE = [kind for kind in KINDS if kind != "gpt-oss"]


@ways
@pytest.mark.parametrize("kind", DENSE)
def test_weights_are_what_values_and_scales_stand_for(way: Callable[[Path], Any], kind: str, tmp_path: Path) -> None:
    scaled, plain = write(kind, tmp_path)
    split_into_shards(scaled)
    found, expected = way(scaled), way(plain)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=2**-7 if value.dtype == torch.bfloat16 else 1e-6, atol=0)


@pytest.mark.parametrize("kind", DENSE)
def test_experts_are_dequantized_before_they_are_joined(kind: str, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    scaled, plain = write(kind, tmp_path, "qwen3_moe", **sizes)
    assert sum(".experts." in name for name in load_file(scaled / "model.safetensors")) >= 2 * 2 * 4 * 3
    found, expected = loaded(scaled), loaded(plain)
    assert all(torch.allclose(value, expected[name], rtol=1e-6, atol=0) for name, value in found.items())
    assert survey(EngineConfig(str(scaled))).num_parameters == survey(EngineConfig(str(plain))).num_parameters


@pytest.mark.parametrize("way", ["whole", "bfloat16"])
def test_the_experts_of_gpt_oss(way: str, tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size": 64}
    scaled, plain = write("gpt-oss", tmp_path, "gpt_oss", **sizes)
    stored = load_file(scaled / "model.safetensors")
    assert {f"model.layers.1.mlp.experts.{name}_blocks" for name in ("down_proj", "gate_up_proj")} <= stored.keys()
    found, expected = WAYS[way](scaled), WAYS[way](plain)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


INT8 = {"W8A8", "GPTQ int8"}
BITS_4 = {"W4A16", "W4A16 zero points", "GPTQ", "AWQ", "NVFP4"}


@pytest.mark.parametrize("kind", DENSE)
def test_logits_are_close_to_those_of_the_model_before(kind: str, tmp_path: Path) -> None:
    """Within 1% by int8, 5% by FP8 and 15% by 4 bits, of the logits' norm; random weights have no outliers."""
    scaled, _ = write(kind, tmp_path, initializer_range=0.05)
    models = (reference_model(EngineConfig(str(scaled))), checkpoints.build("llama", initializer_range=0.05))
    with torch.inference_mode():
        found, expected = (model(torch.arange(40)[None]).logits for model in models)
    bound = 0.01 if kind in INT8 else 0.15 if kind in BITS_4 else 0.05
    assert bound / 10 < (found - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize(("kind", "named"), [("FP8 rows", "FP8"), ("W4A16", "W4A16"), ("GPTQ int8", "GPTQ int8")])
def test_the_start_says_what_memory_it_takes(kind: str, named: str, tmp_path: Path) -> None:
    scaled, _ = write(kind, tmp_path)
    said: list[str] = []
    info = load(EngineConfig(str(scaled), dtype="bfloat16"), said.append).info
    size = (scaled / "model.safetensors").stat().st_size
    assert said[1] == (
        f"{named} weights ({size / 1e6:.0f} MB in files) are dequantized to bfloat16, which takes "
        f"{2 * info.num_parameters / 1e6:.0f} MB over all ranks; activations are not quantized"
    )


Change = Callable[[dict[str, Tensor]], Any]


def put(name: str, value: Callable[[Tensor], Tensor] | Tensor) -> Change:
    """Put a tensor of the module in the place of another, or make it of that."""
    full = f"{UP}.{name}"
    return lambda tensors: tensors.update({full: value if isinstance(value, Tensor) else value(tensors[full])})


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(f"{UP}.{name}")


NONE = "in {path} has no " + UP
REFUSED: list[tuple[str, Change, type[StartupError], str]] = [
    ("DeepSeek", without("weight_scale_inv"), CheckpointError, f"{NONE}.weight_scale_inv, which FP8 needs"),
    (
        "DeepSeek",
        put("weight_scale_inv", torch.ones(6, 3)),
        CheckpointError,
        "weight_scale_inv in {path} is (6, 3), but a weight of (64, 32) needs (6, 2)",
    ),
    ("DeepSeek", put("weight_scale_inv", lambda t: t.int()), UnsupportedModel, "is stored as I32, but FP8 needs BF16"),
    ("DeepSeek", put("weight", lambda t: t.float()), CheckpointError, f"have 1 tensor, {UP}.weight_scale_inv, which"),
    ("DeepSeek", put("weight", lambda t: t.to(torch.float8_e5m2)), UnsupportedModel, "is stored as F8_E5M2"),
    ("DeepSeek", put("weight", lambda t: t[None]), UnsupportedModel, "is (1, 64, 32), which FP8 is not"),
    ("FP8 rows", put("lora_A", torch.ones(1)), CheckpointError, f"have 1 tensor, {UP}.lora_A, which"),
    ("FP8 rows", put("k_scale", torch.ones(1)), CheckpointError, f"have 1 tensor, {UP}.k_scale, which"),
    ("FP8 rows", put("weight_scale", torch.ones(32, 1)), CheckpointError, "(32, 1), but a weight of (64, 32)"),
    ("W8A8", put("weight_zero_point", torch.ones(64, 1).char()), CheckpointError, f"{UP}.weight_zero_point, which"),
    ("W4A16", without("weight_shape"), CheckpointError, f"{NONE}.weight_shape, which W4A16 needs"),
    ("W4A16", put("weight_scale", torch.ones(64, 4)), CheckpointError, "(64, 4), but a weight of (64, 32)"),
    ("W4A16", put("weight_packed", lambda t: t[:, :2]), CheckpointError, "is (64, 2), but a weight of (64, 16) needs"),
    ("W4A16 zero points", without("weight_zero_point"), CheckpointError, f"{NONE}.weight_zero_point"),
    ("GPTQ", without("g_idx"), CheckpointError, f"{NONE}.g_idx, which GPTQ int4 needs"),
    ("GPTQ", put("bias", torch.ones(64)), CheckpointError, f"have 1 tensor, {UP}.bias, which"),
    (
        "GPTQ",
        put("qzeros", torch.ones(2, 9).int()),
        CheckpointError,
        "is (2, 9), but a weight of (64, 32) needs (2, 8)",
    ),
    (
        "AWQ",
        without("qweight"),
        CheckpointError,
        f"lack 1 tensor, {UP}.weight, and have 2 tensors, the first is {UP}.q",
    ),
    ("AWQ", put("scales", lambda t: t.T), CheckpointError, "(64, 2), but a weight of (64, 32) needs (2, 64)"),
    ("NVFP4", put("weight_scale", lambda t: t.float()), UnsupportedModel, "is stored as F32, but NVFP4 needs F8_E4M3"),
]


@pytest.mark.parametrize(("kind", "change", "error", "problem"), REFUSED)
def test_what_does_not_fit_is_refused(kind: str, change: Change, error: type, problem: str, tmp_path: Path) -> None:
    scaled, _ = write(kind, tmp_path)
    changed(scaled, change)
    for way in (loaded, WAYS["the second rank"], lambda path: survey(EngineConfig(str(path)))):
        with pytest.raises(error) as caught:
            way(scaled)
        assert problem.replace("{path}", str(scaled)) in str(caught.value)
        assert str(scaled) in str(caught.value)
        assert "\n" not in str(caught.value)


def changed(path: Path, change: Change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("way", [loaded, WAYS["the second rank"], WAYS["reference"]])
@pytest.mark.parametrize("kind", ["DeepSeek", "GPTQ"])
def test_scales_that_are_nan_are_refused_by_name(way: Callable[[Path], Any], kind: str, tmp_path: Path) -> None:
    scaled, _ = write(kind, tmp_path)
    changed(scaled, put("weight_scale_inv" if kind == "DeepSeek" else "scales", lambda t: t * float("nan")))
    with pytest.raises(CheckpointError) as caught:
        way(scaled)
    assert str(caught.value) == f"{UP}.weight in {scaled} has a value or a scale that is NaN or infinite"


@ways
def test_scales_of_activations_and_biases_of_zeros_change_nothing(way: Callable[[Path], Any], tmp_path: Path) -> None:
    """Static FP8 has scales of inputs; GPTQ's tools write a bias of zeros for modules that have none."""
    for kind, more in (("Mistral", {"activation_scale": torch.ones(())}), ("GPTQ", {"bias": torch.zeros(64).half()})):
        scaled, plain = write(kind, tmp_path / kind)
        changed(scaled, lambda t, more=more: t.update({f"{UP}.{name}": value for name, value in more.items()}))
        found, expected = way(scaled), way(plain)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(value, expected[name], rtol=2**-7) for name, value in found.items())


@pytest.mark.parametrize("declared", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "quip"}])
def test_other_schemes_are_refused(declared: Any, tmp_path: Path) -> None:
    path = checkpoints.write("llama", tmp_path)
    edit_json(path / "config.json", quantization_config=declared)
    with pytest.raises(UnsupportedModel, match=rf"not served: quant_method '{declared['quant_method']}'; fp8, .* are"):
        survey(EngineConfig(str(path)))
