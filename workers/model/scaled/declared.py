"""Finds how weights are quantized by what config.json declares, or refuses by name what is not read here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core.errors import CheckpointError, UnsupportedModel
from workers.model.scaled.blocks import FP8, Blocks, Fp4, Mxfp4Experts
from workers.model.scaled.integers import Awq, Gptq, Packed
from workers.model.scaled.layout import EXPONENT_SCALES, Layout, Shape
from workers.model.scaled.weights import EVERY_LINEAR, Group, ScaledWeights

DECLARED = "quantization_config"
OLD = "compression_config"
"""Keys of config.json that declare quantized weights; the old one is of sparse weights, too."""
MODELOPT = "hf_quant_config.json"
"""File in which older checkpoints by NVIDIA's modelopt declare the same."""
Declared = Mapping[str, Any]
NO_GROUPS = -1
"""A group size that says that a row has one scale."""


class _Unknown(Exception):
    """Names the value that is not read here."""


def read_scheme(path: Path, config: Mapping[str, Any]) -> ScaledWeights | None:
    """The scheme that a config.json declares; None without any. Raises: UnsupportedModel for all others."""
    for holder in (config, config.get("text_config") or {}):
        for key in (DECLARED, OLD):
            if declared := holder.get(key):
                return _scheme(path / "config.json", key, declared)
    return _of_modelopt(path / MODELOPT) if (path / MODELOPT).is_file() else None


def _of_modelopt(file: Path) -> ScaledWeights:
    """Raises: CheckpointError for a file that is damaged; UnsupportedModel."""
    try:
        declared = {"quant_method": "modelopt", **json.loads(file.read_text())["quantization"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not say how weights are quantized: {error!r}") from error
    return _scheme(file, "quantization", declared)


def _scheme(file: Path, key: str, declared: Any) -> ScaledWeights:
    """Raises: UnsupportedModel."""
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    try:
        groups = _groups(key, method, declared)
    except _Unknown as problem:
        raise UnsupportedModel(
            f"{file} has a {key} that is not served: {problem}. Use the checkpoint in bfloat16, or another one"
        ) from None
    kv_scheme = declared.get("kv_cache_scheme") or declared.get("kv_cache_quant_algo")
    return ScaledWeights(groups, has_kv_scales=kv_scheme is not None)


def _groups(key: str, method: Any, declared: Declared) -> tuple[Group, ...]:
    """Raises: _Unknown."""
    if key == OLD or not isinstance(method, str) or method not in METHODS:
        raise _Unknown(f"quant_method {method!r}; {', '.join(METHODS)} are")
    return METHODS[method](declared)


def _check(declared: Declared, **allowed: tuple[Any, ...]) -> None:
    """Check that settings have these values; the first is the default. Raises: _Unknown."""
    for name, values in allowed.items():
        if (found := declared.get(name, values[0])) not in values:
            raise _Unknown(f"{name} {found!r}")


def _size(declared: Declared, name: str = "group_size") -> int | None:
    """A group size; None for one group in a row. Raises: _Unknown."""
    size = declared.get(name)
    if size in (None, NO_GROUPS):
        return None
    if not _is_size(size):
        raise _Unknown(f"{name} {size!r}")
    return int(size)


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _block(declared: Declared, name: str) -> Shape:
    block: Any = declared.get(name)
    if not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise _Unknown(f"{name} {block!r}")
    return tuple(block)


def _of_all(layout: Layout) -> tuple[Group, ...]:
    return (Group(layout),)


def _fp8(declared: Declared) -> tuple[Group, ...]:
    """DeepSeek, Qwen, and Mistral, which has one scale for a weight."""
    _check(declared, fmt=("e4m3", "float8_e4m3fn"))
    block = _block(declared, "weight_block_size") if declared.get("weight_block_size") is not None else None
    return _of_all(Blocks(FP8, ".weight_scale_inv", block=block))


def _fbgemm(_: Declared) -> tuple[Group, ...]:
    return _of_all(Blocks(FP8, ".weight_scale"))


def _gptq(declared: Declared) -> tuple[Group, ...]:
    versions = {"gptq": 1, "gptq_v2": 0}
    _check({"bits": None, **declared}, bits=(4, 8), checkpoint_format=tuple(versions))
    if any(not pattern.startswith("-:") for pattern in declared.get("dynamic") or {}):
        raise _Unknown("dynamic, which gives modules settings of their own")
    offset = versions[declared.get("checkpoint_format", "gptq")]
    return _of_all(Gptq(declared["bits"], _size(declared), offset, bool(declared.get("desc_act"))))


def _awq(declared: Declared) -> tuple[Group, ...]:
    _check({"bits": declared.get("w_bit"), **declared}, bits=(4,))
    _check({"zero_point": True, "version": "gemm", **declared}, zero_point=(True,), version=("gemm", "GEMM"))
    return _of_all(Awq(_size(declared if "group_size" in declared else {"group_size": declared.get("q_group_size")})))


def _mxfp4(_: Declared) -> tuple[Group, ...]:
    return _of_all(Mxfp4Experts())


def _modelopt(declared: Declared) -> tuple[Group, ...]:
    if declared.get("quant_algo") == "FP8":
        return _of_all(Blocks(FP8, ".weight_scale"))
    if declared.get("quant_algo") == "NVFP4":
        size = _size(declared) or 16
        return _of_all(Fp4(".weight", size, frozenset({FP8}), ".weight_scale_2"))
    raise _Unknown(f"quant_algo {declared.get('quant_algo')!r}")


def _compressed_tensors(declared: Declared) -> tuple[Group, ...]:
    groups = declared.get("config_groups")
    if not groups or not isinstance(groups, Mapping) or not all(map(_has_weights, groups.values())):
        raise _Unknown("config_groups without weights")
    _check(declared, sparsity_config=(None, {}), transform_config=(None, {}))
    return tuple(
        Group(_compressed(group.get("format") or declared.get("format"), group["weights"]), _targets(group))
        for group in groups.values()
    )


def _has_weights(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping) and bool(group["weights"])


def _targets(group: Mapping[str, Any]) -> tuple[str, ...]:
    targets = group.get("targets") or [EVERY_LINEAR]
    try:
        for target in targets:
            re.compile(target.removeprefix("re:"))
    except (re.error, AttributeError, TypeError):
        raise _Unknown(f"targets {targets!r}") from None
    return tuple(targets)


def _compressed(kind: Any, weights: Declared) -> Layout:
    """The layout of one group. Raises: _Unknown."""
    if kind not in FORMATS:
        raise _Unknown(f"format {kind!r}")
    size = weights.get("group_size")
    strategy = "tensor" if size is None else "channel" if size == NO_GROUPS else "group"
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}
    return FORMATS[kind](defaults | {name: value for name, value in weights.items() if value is not None})


def _float_quantized(weights: Declared) -> Layout:
    _check(weights, type=("float",), num_bits=(8,), symmetric=(True,), strategy=("channel", "tensor", "block", "group"))
    return Blocks(FP8, ".weight_scale", block=_strategy_block(weights))


def _int_quantized(weights: Declared) -> Layout:
    _check(weights, type=("int",), num_bits=(8,), strategy=("channel", "tensor", "block", "group"))
    zero = None if weights["symmetric"] else ".weight_zero_point"
    return Blocks("I8", ".weight_scale", block=_strategy_block(weights), zero_point=zero)


def _strategy_block(weights: Declared) -> Shape | None:
    if weights["strategy"] == "block":
        return _block(weights, "block_structure")
    return (1, _size(weights) or 1) if weights["strategy"] == "group" else None


def _naive_quantized(weights: Declared) -> Layout:
    return _float_quantized(weights) if weights["type"] == "float" else _int_quantized(weights)


def _pack_quantized(weights: Declared) -> Layout:
    _check(weights, type=("int",), num_bits=(4, 8), strategy=("group", "channel"))
    size = _size(weights) if weights["strategy"] == "group" else None
    has_order = weights.get("actorder") in ("group", "dynamic")
    return Packed(weights["num_bits"], size, bool(weights["symmetric"]), has_order)


def _fp4(weights: Declared, size: int, types: frozenset[str], whole: str | None) -> Layout:
    _check(weights, type=("float",), num_bits=(4,), symmetric=(True,), group_size=(size,))
    return Fp4(".weight_packed", size, types, whole, is_divided=True)


def _mxfp8(weights: Declared) -> Layout:
    _check(weights, type=("float",), num_bits=(8,), symmetric=(True,), group_size=(32,))
    return Blocks(FP8, ".weight_scale", EXPONENT_SCALES, block=(1, 32))


FORMATS: Mapping[str, Callable[[Declared], Layout]] = {
    "float-quantized": _float_quantized,
    "int-quantized": _int_quantized,
    "naive-quantized": _naive_quantized,
    "pack-quantized": _pack_quantized,
    "nvfp4-pack-quantized": lambda weights: _fp4(weights, 16, frozenset({FP8}), ".weight_global_scale"),
    "mxfp4-pack-quantized": lambda weights: _fp4(weights, 32, EXPONENT_SCALES, None),
    "mxfp8-quantized": _mxfp8,
}
"""Formats of compressed-tensors."""
METHODS: Mapping[str, Callable[[Declared], tuple[Group, ...]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}
