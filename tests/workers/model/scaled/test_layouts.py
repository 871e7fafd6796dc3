"""Each layout is read as the library that writes it reads it, in whole and in parts (`make_cases.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import CheckpointError, UnsupportedModel
from workers.model.scaled import read_scheme, views
from workers.model.scaled import weights as scaled_weights

CASES = Path(__file__).with_name("cases.safetensors")
TENSORS = load_file(CASES)
with safe_open(CASES, framework="pt") as opened:
    DECLARED: dict[str, dict[str, Any]] = {case: json.loads(said) for case, said in sorted(opened.metadata().items())}
ROUNDED = {"NVFP4": 2**-8}
"""Errors of the kinds that the library rounds to bfloat16."""
cases = pytest.mark.parametrize("case", DECLARED)


def parts(case: str) -> dict[str, Tensor]:
    return {
        name.partition("/")[2]: value
        for name, value in TENSORS.items()
        if name.startswith(f"{case}/") and not name.endswith("/expected")
    }


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


def view_of(case: str, path: Path, stack: ExitStack, **changed: Tensor) -> Any:
    named = parts(case) | {f"layer.{name}": value for name, value in changed.items()}
    save_file(named, path / "m.safetensors")
    found = views([path / "m.safetensors"], stack, read_scheme(path, {"quantization_config": DECLARED[case]}))
    assert list(found) == ["layer.up" if case == "gpt-oss" else "layer.weight"]
    return next(iter(found.values()))


@cases
def test_a_weight_is_what_its_library_makes_of_it(case: str, tmp_path: Path, stack: ExitStack) -> None:
    view, expected = view_of(case, tmp_path, stack), TENSORS[f"{case}/expected"]
    assert view.get_shape() == expected.shape
    for whole in (view[...], view[:]):
        assert whole.dtype == (torch.bfloat16 if case == "gpt-oss" else torch.float32)
        torch.testing.assert_close(whole.float(), expected, rtol=ROUNDED.get(case, 1e-6), atol=0)
    assert expected.std() > 0.1


@cases
def test_chunks_make_the_same_weight(case: str, tmp_path: Path, stack: ExitStack, monkeypatch) -> None:
    view = view_of(case, tmp_path, stack)
    whole = view[...]
    monkeypatch.setattr(scaled_weights, "CHUNK_ELEMENTS", 64 * 5)
    assert torch.equal(view[...], whole)
    assert torch.equal(view[:, 3:50], whole[:, 3:50])


SPANS = st.tuples(st.integers(0, 64), st.integers(0, 64)).map(lambda ends: slice(*sorted(ends)))


@cases
def test_a_part_is_that_part_of_the_whole(case: str, tmp_path: Path, stack: ExitStack) -> None:
    """Whatever blocks, groups and words a rank's part cuts through."""
    view = view_of(case, tmp_path, stack)
    whole = view[...]

    @settings(max_examples=settings.default.max_examples * 3 // 5, database=None, deadline=None)
    @given(SPANS, SPANS, SPANS)
    def check(first: slice, second: slice, third: slice) -> None:
        index = (first, second, third)[: whole.ndim]
        assert torch.equal(view[index], whole[index])
        assert torch.equal(view[first], whole[first])
        assert torch.equal(view[:, second], whole[:, second])

    check()


def test_groups_of_columns_in_another_order(tmp_path: Path, stack: ExitStack) -> None:
    """`actorder` "group": a column has the scale of its group. By hand, as compressed-tensors 0.12.2 has it, too."""
    g_idx = torch.arange(64).flip(0) % 4
    scale = TENSORS["W4A16 groups/layer.weight_scale"]
    whole = TENSORS["W4A16 groups/expected"] / scale.repeat_interleave(16, 1) * scale[:, g_idx]
    declared = json.loads(json.dumps(DECLARED["W4A16 groups"]))
    declared["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    scheme = read_scheme(tmp_path, {"quantization_config": declared})
    for order, expected in ((g_idx.int(), whole), (torch.full((64,), -1).int(), TENSORS["W4A16 groups/expected"])):
        save_file(parts("W4A16 groups") | {"layer.weight_g_idx": order}, tmp_path / "m.safetensors")
        view = views([tmp_path / "m.safetensors"], stack, scheme)["layer.weight"]
        torch.testing.assert_close(view[...], expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(view[3:7, 5:21], expected[3:7, 5:21], rtol=1e-6, atol=1e-7)


def test_zero_points_that_are_not_packed(tmp_path: Path, stack: ExitStack) -> None:
    """compressed-tensors stored them at first so: signed. The bits of a word are those of eight rows."""
    words = TENSORS["W4A16 zero points/layer.weight_zero_point"]
    rows = [(words[row // 8] >> 4 * (row % 8)) & 15 for row in range(16)]
    signed = (torch.stack(rows) - 8).to(torch.int8)
    view = view_of("W4A16 zero points", tmp_path, stack, weight_zero_point=signed)
    expected = TENSORS["W4A16 zero points/expected"]
    torch.testing.assert_close(view[...], expected, rtol=1e-6, atol=0)
    assert torch.equal(view[3:11, 5:40], view[...][3:11, 5:40])


def test_a_zero_point_of_gptq_that_is_0_is_stored_as_the_largest_number(tmp_path: Path, stack: ExitStack) -> None:
    """Less one, in four bits: the kernels of other servers wrap it around, too."""
    whole = view_of("GPTQ", tmp_path, stack, qzeros=torch.full((4, 2), -1).int())[...]
    scale = TENSORS["GPTQ/layer.scales"].T.repeat_interleave(16, 1)
    assert set((whole / scale).round().unique().tolist()) == set(range(16))


def test_modelopt_multiplies_by_the_scale_of_scales(tmp_path: Path, stack: ExitStack) -> None:
    """NVIDIA's files have the reciprocal of compressed-tensors' scale, under other names, and declare it elsewhere."""
    found = {name.removeprefix("layer."): value for name, value in parts("NVFP4").items()}
    named = {"weight": found["weight_packed"], "weight_scale": found["weight_scale"]}
    named |= {"weight_scale_2": 1 / found["weight_global_scale"][0], "input_scale": torch.ones(())}
    named |= {"k_scale": torch.ones(())}
    save_file({f"layer.{name}": value for name, value in named.items()}, tmp_path / "m.safetensors")
    said = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    found = views([tmp_path / "m.safetensors"], stack, read_scheme(tmp_path, {}))
    assert list(found) == ["layer.weight"]
    torch.testing.assert_close(found["layer.weight"][...], TENSORS["NVFP4/expected"], rtol=ROUNDED["NVFP4"], atol=0)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"quantization": 1}'])
def test_a_damaged_declaration_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json does not say how weights are quantized"):
        read_scheme(tmp_path, {})


def test_a_text_tower_declares_its_own_weights(tmp_path: Path) -> None:
    scheme = read_scheme(tmp_path, {"text_config": {"quantization_config": DECLARED["W4A16 rows"]}})
    assert scheme is not None
    assert scheme.kinds == "W4A16"


def test_each_module_has_the_layout_of_its_group(tmp_path: Path, stack: ExitStack) -> None:
    """A pattern of names counts before a class of modules, as in Kimi's checkpoints."""
    groups = {
        "linears": DECLARED["FP8 rows"]["config_groups"]["group_0"] | {"format": "float-quantized"},
        "experts": DECLARED["FP8 blocks"]["config_groups"]["group_0"]
        | {"format": "float-quantized", "targets": ["re:.*experts.*"]},
    }
    declared = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    scheme = read_scheme(tmp_path, {"quantization_config": declared})
    assert scheme is not None
    assert scheme.kinds == "FP8"
    named = {f"a.q_proj.{name.partition('.')[2]}": value for name, value in parts("FP8 rows").items()}
    named |= {f"a.experts.1.up_proj.{name.partition('.')[2]}": value for name, value in parts("FP8 blocks").items()}
    save_file(named, tmp_path / "m.safetensors")
    found = views([tmp_path / "m.safetensors"], stack, scheme)
    assert found.keys() == {"a.q_proj.weight", "a.experts.1.up_proj.weight"}
    for name, case in (("a.q_proj.weight", "FP8 rows"), ("a.experts.1.up_proj.weight", "FP8 blocks")):
        torch.testing.assert_close(found[name][...], TENSORS[f"{case}/expected"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("case", "changed", "problem"),
    [
        ("FP8 rows", {"weight_scale": torch.full((16, 1), float("nan"))}, "a value or a scale that is NaN"),
        ("FP8 blocks", {"weight": torch.full((16, 64), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)}, "is NaN"),
        ("AWQ", {"scales": torch.full((4, 16), float("inf")).half()}, "NaN or infinite"),
        ("GPTQ", {"g_idx": torch.full((64,), 4).int()}, "g_idx names groups 4 to 4, but there are 4"),
        ("GPTQ", {"g_idx": torch.arange(-2, 62).int() // 16}, "g_idx names groups -1 to 3"),
        ("W4A16 groups", {"weight_shape": torch.tensor([16, 60])}, "weight_shape says [16, 60], but [16, 64] are"),
        ("MXFP8", {"weight_scale": torch.full((16, 2), 255, dtype=torch.uint8)}, "NaN"),
        ("gpt-oss", {"up_scales": torch.full((2, 16, 2), 255, dtype=torch.uint8)}, "NaN"),
    ],
)
def test_contents_that_make_no_weight_are_refused(
    case: str, changed: dict[str, Tensor], problem: str, tmp_path: Path, stack: ExitStack
) -> None:
    view = view_of(case, tmp_path, stack, **changed)
    with pytest.raises(CheckpointError) as caught:
        view[...]
    assert problem in str(caught.value)
    assert f" in {tmp_path} " in str(caught.value)


GROUP = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn"])
def test_the_same_type_has_two_names(fmt: str, tmp_path: Path) -> None:
    declared = {"quant_method": "fp8", "fmt": fmt, "weight_block_size": [128, 128]}
    assert read_scheme(tmp_path, {"quantization_config": declared}) is not None


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ("fp8", "quant_method None"),
        ({"quant_method": ["fp8"]}, "quant_method ['fp8']"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "awq", "bits": 3}, "bits 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False"),
        ({"quant_method": "gptq"}, "bits None"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (compressed("marlin-24", **GROUP), "format 'marlin-24'"),
        (compressed("pack-quantized", **GROUP | {"num_bits": 3}), "num_bits 3"),
        (compressed("pack-quantized", **GROUP | {"group_size": "x"}), "group_size 'x'"),
        (compressed("float-quantized", type="float", num_bits=4), "num_bits 4"),
        (compressed("float-quantized", type="float", num_bits=8, symmetric=False), "symmetric False"),
        (compressed("float-quantized", type="float", num_bits=8, strategy="token"), "strategy 'token'"),
        (compressed("pack-quantized"), "config_groups without weights"),
        (compressed("pack-quantized", group_size=-1) | {"config_groups": [GROUP]}, "config_groups without weights"),
        (compressed("pack-quantized") | {"config_groups": {"a": {"weights": GROUP, "targets": ["re:("]}}}, "targets"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups without weights"),
        (
            compressed("int-quantized", type="int") | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config",
        ),
    ],
)
def test_what_is_not_read_is_named(declared: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_scheme(tmp_path, {"quantization_config": declared})
    assert f"{tmp_path / 'config.json'} has a quantization_config that is not served: {named}" in str(caught.value)
