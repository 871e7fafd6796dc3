"""Writes cases.safetensors: small weights that the published libraries have quantized, and what they make of them.

For each case: tensors of a module `layer`, the library's dequantized weight (`expected`), and, as metadata, what
config.json declares.
Not a test; run it where the libraries are, to add a case: pip install compressed-tensors==0.20.0 gptqmodel==7.7.0
autoawq==0.2.9, or give the folders of GPTQModel's and AutoAWQ's sources, of which it needs a few functions only.

    python make_cases.py GPTQMODEL AUTOAWQ
"""

from __future__ import annotations

import ast
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT, IN = 16, 64
torch.manual_seed(0)
tensors: dict[str, Tensor] = {}
declared: dict[str, str] = {}


def add(case: str, declaration: dict[str, Any], parts: dict[str, Tensor], expected: Tensor) -> None:
    declared[case] = json.dumps(declaration)
    for name, value in parts.items():
        tensors[f"{case}/{name}"] = value.clone().contiguous()
    tensors[f"{case}/expected"] = expected.float().contiguous()


def compressed(case: str, format_: str, scale: Tensor, zero: Tensor | None = None, whole: Any = None, **weights: Any):
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(format_)
    state = {"weight": torch.randn(OUT, IN), "weight_scale": scale}
    state |= {"weight_zero_point": zero} if zero is not None else {}
    state |= {"weight_global_scale": whole} if whole is not None else {}
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": {"symmetric": zero is None, **weights}}
    declaration = {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group}}
    add(case, declaration, {f"layer.{name}": value for name, value in packed.items()}, expected)


def scale(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.2 + 0.05


def functions(file: Path, *names: str, **known: Any) -> SimpleNamespace:
    """Some functions of a source file, without what the file imports."""
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    module = ast.Module([node for node in found if node.name in names], [])
    space = {"torch": torch, "t": torch, "np": np, "math": math, "nn": torch.nn, **known}
    exec(compile(module, str(file), "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def powers(*shape: int) -> Tensor:
    return 2.0 ** torch.randint(-4, 0, shape)


integers = {"type": "int"}
zeros = torch.randint(-8, 8, (OUT, 4), dtype=torch.int8)
compressed("W4A16 groups", "pack-quantized", scale(OUT, 4), num_bits=4, strategy="group", group_size=16, **integers)
compressed("W4A16 rows", "pack-quantized", scale(OUT, 1), num_bits=4, strategy="channel", **integers)
compressed(
    "W4A16 zero points", "pack-quantized", scale(OUT, 4), zeros, num_bits=4, strategy="group", group_size=16,
    symmetric=False, **integers,
)  # fmt: skip
compressed("W8A16", "pack-quantized", scale(OUT, 4), num_bits=8, strategy="group", group_size=16, **integers)
compressed("W8A8", "int-quantized", scale(OUT, 1), num_bits=8, strategy="channel", **integers)
compressed(
    "W8A8 zero points", "int-quantized", scale(OUT, 1), torch.randint(-90, 90, (OUT, 1), dtype=torch.int8), num_bits=8,
    strategy="channel", symmetric=False, **integers,
)  # fmt: skip
compressed("FP8 rows", "float-quantized", scale(OUT, 1), num_bits=8, type="float", strategy="channel")
compressed("FP8 weight", "float-quantized", scale(1), num_bits=8, type="float", strategy="tensor")
block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 16]}
compressed("FP8 blocks", "float-quantized", scale(2, 4), **block)
compressed(
    "NVFP4", "nvfp4-pack-quantized", scale(OUT, 4) * 100, whole=torch.tensor([80.0]), num_bits=4, type="float",
    strategy="tensor_group", group_size=16,
)  # fmt: skip
compressed("MXFP4", "mxfp4-pack-quantized", powers(OUT, 2), num_bits=4, type="float", strategy="group", group_size=32)
compressed("MXFP8", "mxfp8-quantized", powers(OUT, 2), num_bits=8, type="float", strategy="group", group_size=32)

values, inverse = (torch.randn(OUT, IN) * 50).to(torch.float8_e4m3fn), scale(2, 4)
whole = Fp8Dequantize(None)._dequantize_one(values, inverse, torch.float32)
parts = {"layer.weight": values, "layer.weight_scale_inv": inverse}
add("DeepSeek", {"quant_method": "fp8", "weight_block_size": [8, 16]}, parts, whole)
exponents = torch.randint(122, 128, (2, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
whole = Fp8Dequantize(None)._dequantize_one(values, exponents, torch.float32)
parts = {"layer.weight": values, "layer.weight_scale_inv": exponents}
add("DeepSeek ue8m0", {"quant_method": "fp8", "weight_block_size": [8, 16], "scale_fmt": "ue8m0"}, parts, whole)

blocks = torch.randint(0, 256, (2, OUT, IN // 32, 16), dtype=torch.uint8)
exponents = torch.randint(120, 130, (2, OUT, IN // 32), dtype=torch.uint8)
parts = {"layer.up_blocks": blocks, "layer.up_scales": exponents}
add("gpt-oss", {"quant_method": "mxfp4"}, parts, convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32))

awq = functions(Path(sys.argv[2]) / "awq/utils/packing_utils.py", "unpack_awq", "reverse_awq_order", "dequantize_gemm",
                AWQ_REVERSE_ORDER=[0, 4, 1, 5, 2, 6, 3, 7])  # fmt: skip
words = torch.iinfo(torch.int32)
parts = {
    "layer.qweight": torch.randint(words.min, words.max, (IN, OUT // 8), dtype=torch.int32),
    "layer.qzeros": torch.randint(words.min, words.max, (IN // 16, OUT // 8), dtype=torch.int32),
    "layer.scales": scale(IN // 16, OUT).half(),
}
whole = awq.dequantize_gemm(
    *(parts[f"layer.{name}"] for name in ("qweight", "qzeros")), parts["layer.scales"].float(), 4, 16
)
add("AWQ", {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, parts, whole.T)

linears = Path(sys.argv[1]) / "gptqmodel/nn_modules/qlinear/__init__.py"
gptq = functions(linears, "dequantize_weight", "_dequantize_from_codes", _torch_right_shift=torch.bitwise_right_shift)


def quantized_by_gptq(case: str, bits: int, is_ordered: bool, version: int) -> None:
    """The first version stores each zero point less one (GPTQModel, `convert_gptq_v2_to_v1_format_module`)."""
    wf = torch.arange(0, 32, bits, dtype=torch.int32)
    zeros = torch.randint(1, 2**bits, (IN // 16, OUT))
    packed = (zeros.view(len(zeros), -1, 32 // bits) << wf.long()).sum(-1)
    g_idx = torch.arange(IN) // 16
    module = SimpleNamespace(
        planar=False, bits=bits, in_features=IN, pack_factor=32 // bits, maxq=2**bits - 1, dequant_dtype=torch.int32,
        qweight=torch.randint(words.min, words.max, (IN * bits // 32, OUT), dtype=torch.int32),
        qzeros=torch.from_numpy(packed.numpy().astype(np.uint32).view(np.int32)), scales=scale(IN // 16, OUT),
        g_idx=(g_idx[torch.randperm(IN)] if is_ordered else g_idx).int(), wf_unsqueeze_zero=wf[None, None],
        wf_unsqueeze_neg_one=wf[None, :, None], _init_wf_unsqueeze_buffers=lambda: None,
    )  # fmt: skip
    module._dequantize_from_codes = lambda *given, **more: gptq._dequantize_from_codes(module, *given, **more)
    whole = gptq.dequantize_weight(module)
    ones = sum(1 << shift for shift in range(0, 32, bits))
    qzeros = module.qzeros - ones if version == 1 else module.qzeros
    parts = {"qweight": module.qweight, "qzeros": qzeros, "scales": module.scales, "g_idx": module.g_idx}
    declaration = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": is_ordered}
    declaration |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    add(case, declaration, {f"layer.{name}": value for name, value in parts.items()}, whole.T)


quantized_by_gptq("GPTQ", 4, False, 1)
quantized_by_gptq("GPTQ in another order", 4, True, 1)
quantized_by_gptq("GPTQ of 8 bits", 8, True, 1)
quantized_by_gptq("GPTQ v2", 4, False, 2)

save_file(tensors, Path(__file__).with_name("cases.safetensors"), metadata=declared)
