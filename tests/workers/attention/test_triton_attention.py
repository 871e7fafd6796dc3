"""The Triton kernel against plain loops: compiled on a GPU, elsewhere in Triton's interpreter; and compiled to PTX.

Each runs in a process of its own, since Triton reads its settings once. `__main__` here is what runs there.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.workers.triton_process import run

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

# query heads, KV heads, key width, value width, tokens of a block, kind of layer, dtype
CASES = {
    "grouped": (8, 2, 32, 32, 16, {}, "float32"),
    "odd group": (6, 2, 24, 24, 16, {}, "float32"),
    "one head each": (2, 2, 16, 16, 64, {}, "float32"),
    "many heads": (12, 1, 16, 16, 16, {}, "float32"),  # more than a tile has rows for, and the last tile has fewer
    "blocks of one row": (4, 2, 16, 16, 1, {}, "float32"),
    "large blocks": (4, 2, 32, 32, 256, {}, "float32"),
    "narrow values": (4, 1, 48, 32, 16, {}, "float32"),
    "latents": (2, 1, 24, 16, 16, {"wide": 32}, "float32"),  # in the tiles that wide ones have
    "window": (4, 2, 32, 32, 16, {"window": 20}, "float32"),
    "softcap": (4, 2, 32, 32, 16, {"softcap": 5.0}, "float32"),
    "sinks": (4, 2, 32, 32, 16, {"sinks": True}, "float32"),
    "all": (6, 2, 40, 24, 64, {"window": 70, "softcap": 3.0, "sinks": True}, "float32"),
    "fp8": (8, 2, 32, 32, 64, {"fp8": True}, "float32"),
    "fp8 latents": (2, 1, 24, 16, 16, {"wide": 32, "fp8": True}, "float32"),
    "half precision": (8, 2, 64, 64, 64, {"sinks": True}, "float16"),  # the interpreter takes bfloat16 for integers
}
QUICK = ("many heads", "blocks of one row", "large blocks", "latents", "all", "fp8 latents", "half precision")
"""Each has something that no other case has. The other cases have one thing alone of what these have."""
NODE = 20
"""Row of a node with children in `ragged`."""
ERROR = {"float32": 2e-5, "float16": 2e-3}


@functools.cache
def errors(*, is_quick: bool) -> dict[str, float]:
    """The largest error of each quick case, or of each other one, by one process."""
    cases = [case for case in CASES if (case in QUICK) == is_quick]
    is_gpu = torch.cuda.is_available()
    return json.loads(run(__name__, f"t.write_errors({cases})", **({} if is_gpu else {"TRITON_INTERPRET": "1"})))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_the_kernel_gives_what_plain_loops_give(case: str) -> None:
    assert errors(is_quick=case in QUICK)[case] <= ERROR[CASES[case][-1]]


def test_so_it_does_without_splits() -> None:
    assert errors(is_quick=True)["all, deterministic"] <= ERROR["float32"]


def test_numbers_are_stored_in_eight_bits_as_torch_rounds_them_and_infinite_ones_as_nan() -> None:
    """Into pools of float32, because the interpreter reads NaN in fp8 as a number."""
    settings = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert json.loads(run(__name__, "t.write_stored_otherwise()", **settings)) == []


@pytest.fixture(
    scope="module", params=[pytest.param(80, marks=pytest.mark.ci), 90, pytest.param(100, marks=pytest.mark.ci)]
)
def ptx(request: pytest.FixtureRequest) -> tuple[int, dict[str, str]]:
    """A capability of a GPU, and what is compiled for it. The compiler and ptxas need no GPU."""
    return request.param, json.loads(run(__name__, f"t.write_ptx({request.param})"))


def test_it_compiles_for_the_gpus_of_today(ptx: tuple[int, dict[str, str]]) -> None:
    capability, found = ptx
    has_fp8 = capability >= 89
    assert found["all"].count(f".target sm_{capability}") == (4 if has_fp8 else 3)
    assert ("cvt.rn.f16x2.e4m3x2" in found["all"]) == has_fp8


def test_deterministic_blocks_are_summed_up_alike_masked_or_not(ptx: tuple[int, dict[str, str]]) -> None:
    """Only one of them would have its multiplications fused with additions, which rounds differently."""
    _, found = ptx
    assert "fma.rn.f32" in found["as it comes"]
    assert "fma.rn.f32" not in found["deterministic"]


def write_errors(cases: list[str]) -> None:
    found = {case: largest_error(case) for case in cases}
    if "all" in cases:
        found["all, deterministic"] = largest_error("all", is_deterministic=True)
    json.dump(found, sys.stdout)


def write_stored_otherwise() -> None:
    """Numbers that the kernel stores as other ones than torch, with both: all of fp8, what lies halfway between them,
    what is beyond, and what is none."""
    from workers.attention.triton_attention import _store
    from workers.step.kv_dtype import FP8, FP8_MAX, as_stored

    held = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    positive = torch.cat([held, (held[1:] + held[:-1]) / 2, torch.tensor([464.0, 500.0, 1e30, torch.inf, torch.nan])])
    numbers = torch.cat([positive, -positive]).to("cuda" if torch.cuda.is_available() else "cpu")
    pool, row, size = torch.zeros_like(numbers)[None, None], numbers[None, None, None], len(numbers)
    strides = (pool.stride(0), pool.stride(0), *row.stride()[1:], *row.stride()[1:])
    slots = torch.zeros(1, dtype=torch.int32, device=numbers.device)
    _store[(1, 1)](
        pool, pool.clone(), row, row, slots, *strides, KEY_DIM=size, VALUE_DIM=size, SIZE=1024, LARGEST=FP8_MAX
    )
    found, wanted = pool.flatten(), as_stored(numbers, FP8).float()
    is_other = (found != wanted) & ~(found.isnan() & wanted.isnan())
    json.dump([str(each) for each in torch.stack([numbers, found, wanted], 1)[is_other].tolist()], sys.stdout)


def largest_error(case: str, *, is_deterministic: bool = False) -> float:
    """Over chunks, plain rows, chains and trees, of short and long sequences; relative to the largest output."""
    from tests.workers.attention.kernels import PlainKernel
    from workers.attention import triton_attention
    from workers.attention.paged import LayerKind
    from workers.attention.triton_attention import TritonKernel
    from workers.step.kv_dtype import FP8, as_bits, as_stored

    heads, kv_heads, key_dim, value_dim, block_tokens, kind, dtype_name = CASES[case]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(1)
    sinks = torch.randn(heads, device=device) if kind.get("sinks") else None
    layer = LayerKind(key_dim**-0.5, kind.get("window"), kind.get("softcap"), sinks)
    worst = 0.0
    for spans_of in (ragged, plain):
        reads, slots, num_slots, num_rows = reads_of(spans_of, block_tokens, device)
        keys = torch.randn(num_slots, kv_heads, key_dim, dtype=dtype, device=device)
        values = torch.randn(num_slots, kv_heads, value_dim, dtype=dtype, device=device)
        if kind.get("wide"):
            values = keys[..., :value_dim]
        if kind.get("fp8"):
            keys, values = as_stored(keys, FP8), as_stored(values, FP8)
        query = torch.randn(heads, num_rows, key_dim, dtype=dtype, device=device).transpose(0, 1)
        key = torch.randn(1, kv_heads, num_rows, key_dim, dtype=dtype, device=device)
        value = torch.randn(1, num_rows, kv_heads, value_dim, dtype=dtype, device=device).transpose(1, 2)
        key[0, 0, 0, 0], value[0, 0, 0, 0] = -500.0, 500.0  # beyond what fp8 can hold
        if kind.get("wide"):
            value = key[..., :value_dim]
        stored = (keys.clone(), values.clone())
        TritonKernel.store(*stored, key, value, slots)
        PlainKernel().store(keys, values, key, value, slots)
        for found, wanted in zip(stored, (keys, values), strict=True):  # padding rows share the sink block
            assert torch.equal(found[2 * block_tokens :].float(), wanted[2 * block_tokens :].float())
        if spans_of is ragged and not (kind.get("fp8") and device.type == "cpu"):
            # Only rows that see this node may get its NaN. The interpreter reads NaN in fp8 as a number.
            as_bits(values)[slots[NODE].long()] = 0x7F if kind.get("fp8") else torch.nan
        with patch.object(triton_attention, "WIDE", kind.get("wide", triton_attention.WIDE)):
            kernel = TritonKernel(is_deterministic=is_deterministic)
            got = kernel.attend(query, keys, values, reads, layer).cpu().float()
        on_host = [each.cpu() for each in (query, keys, values)]
        of_reads = {name: getattr(reads, name) for name in reads.__slots__}
        reads = type(reads)(**{n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in of_reads.items()})
        layer_on_host = LayerKind(layer.scale, layer.window, layer.softcap, None if sinks is None else sinks.cpu())
        want = PlainKernel().attend(*on_host, reads, layer_on_host).float()
        got, want = got[: num_rows - 3], want[: num_rows - 3]  # padding rows are not written
        assert torch.equal(got.isnan(), want.isnan())
        is_sound = ~want.isnan()
        worst = max(worst, float((got - want)[is_sound].abs().max() / want[is_sound].abs().max()))
    return worst


def reads_of(spans_of, block_tokens, device):
    """The reads of a step with padding, of sequences whose blocks are interleaved; and what is written."""
    from workers.attention.paged import inputs_in_shape
    from workers.step.kv_cache import KVCache, LayerShape
    from workers.step.paged_plan import StepShape
    from workers.step.rows import Step

    cache = KVCache([LayerShape(1, 1, 1)], 2048 // block_tokens, block_tokens, torch.float32, torch.device("cpu"))
    kvs = [cache.new_sequence() for _ in range(4)]
    for size in (1, 2, 30, 150, 300):
        cache.reserve_all((kv, min(size, most)) for kv, most in zip(kvs, (300, 40, 150, 2), strict=True))
    for kv, size in zip(kvs, (300, 40, 150, 2), strict=True):
        cache.extend(kv, size)
    spans = spans_of(kvs)
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    num_rows = sum(span.num_rows for span in spans) + 3
    positions = [0] * num_rows
    for span in spans:
        depths = [bits.bit_count() for bits in ancestors(span)][span.num_cached_nodes :]
        before = span.num_kv - span.num_rows
        rows = [*range(before, before + span.num_chain), *(span.root + depth for depth in depths)]
        positions[span.first_row : span.first_row + span.num_rows] = rows
    step = Step([0] * num_rows, positions, [0], spans)
    shape = StepShape.of(cache, step)
    values = torch.from_numpy(shape.fill(cache, step)).to(device)
    *_, plan = inputs_in_shape(shape, values, cache, None, lambda: None)
    return plan.reads, plan.write_slots, len(cache.keys[0]), num_rows


def ancestors(span):
    from workers.step.readers import ancestor_bits

    return ancestor_bits(span.parents)


def plain(kvs):
    from workers.step.readers import Span

    return [Span(kv, row, 1) for row, kv in enumerate(kvs)]


def ragged(kvs):
    from core.speculation import ROOT
    from workers.step.readers import Span

    rng = random.Random(1)
    wide = tuple(rng.randint(ROOT, node - 1) if node else ROOT for node in range(40))
    spans = [(37, ()), (1, (ROOT, 0, 1)), (2, (ROOT, ROOT, 0, 1, 1)), (0, (ROOT, ROOT, 1))]
    sizes = [37, 4, 7, 2]
    if len(kvs) == 4:
        spans[0], sizes[0] = (1, wide), 41
    firsts = [sum(sizes[:index]) for index in range(4)]
    return [
        Span(kv, first, chain, parents, num_cached_nodes=1 if chain == 0 else 0)
        for kv, first, (chain, parents) in zip(kvs, firsts, spans, strict=True)
    ]


SETTINGS = {
    "HEADS": 32, "KV_HEADS": 8, "GROUP": 4, "TILE_HEADS": 4, "CHUNKS": 1, "PROGRAM_HEADS": 8, "PROGRAMS": 264,
    "TILE_ROWS": 16, "BLOCK_M": 64, "BLOCK_N": 64, "KEY_DIM": 128, "VALUE_DIM": 128, "KEY_SIZE": 128,
    "VALUE_SIZE": 128, "BLOCK_TOKENS": 64, "NUM_WORDS": 8, "WORD_BITS": 32, "SPLITS": 32,
    "HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_SINKS": False, "PRECISION": "tf32",
}  # fmt: skip
"""Constants of a target of 8B."""


def write_ptx(capability: int) -> None:
    loops = {"as it comes": False, "deterministic": True}
    found = {name: block_loops(capability, is_deterministic=value) for name, value in loops.items()}
    json.dump(found | {"all": everything_compiled(capability)}, sys.stdout)


def everything_compiled(capability: int) -> str:
    """The PTX of both kernels, as a target of 8B has them, and of a layer with everything; with KV in 8 bits, too."""
    from workers.attention import triton_attention as kernels

    everything = dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"), True)
    everything |= {"SPLITS": 1, "KEY_DIM": 192, "KEY_SIZE": 256, "BLOCK_TOKENS": 16}
    kinds = ((kernels._attend, {}), (kernels._attend, everything), (kernels._join, {}))
    found = [compiled(kernel, capability, changed, {}) for kernel, changed in kinds]
    if capability >= 89:
        found.append(compiled(kernels._attend, capability, {}, {}, pool="*fp8e4nv"))
    return "".join(found)


def block_loops(capability: int, *, is_deterministic: bool) -> str:
    """The PTX of the kernel with the options that it is launched with."""
    from types import SimpleNamespace
    from unittest.mock import MagicMock

    from workers.attention import triton_attention as kernels
    from workers.attention.paged import LayerKind

    rows = torch.zeros(4, 1, dtype=torch.int32)
    reads: Any = SimpleNamespace(num_tiles=rows, tiles=rows, seen=rows, positions=rows, masks=rows, table=rows)
    reads.block_tokens, reads.tile_rows = 64, 16
    launch = MagicMock()
    with patch.object(kernels, "_attend", launch):
        query, pool = torch.zeros(4, 32, 128), torch.zeros(64, 8, 128)
        kernels.TritonKernel(is_deterministic=is_deterministic).attend(query, pool, pool, reads, LayerKind(1.0))
    given = launch.__getitem__.return_value.call_args.kwargs
    options = {name: given[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    return compiled(kernels._attend, capability, {"SPLITS": 1, "NUM_WORDS": 0}, options)


def compiled(
    kernel: Any, capability: int, changed: dict[str, Any], options: dict[str, Any], pool: str = "*bf16"
) -> str:
    """The kernel's PTX. `pool`: type of keys and values."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(("query", "keys", "values", "output", "sinks"), "*bf16")
    pointers |= dict.fromkeys(("keys", "values"), pool) | dict.fromkeys(("parts", "logarithms"), "*fp32")
    pointers |= dict.fromkeys(("tiles", "seen", "positions", "masks", "table", "num_tiles"), "*i32")
    constants = {name: value for name, value in (SETTINGS | changed).items() if name in kernel.arg_names}
    types = dict.fromkeys(constants, "constexpr")
    for name in kernel.arg_names:
        types.setdefault(name, pointers.get(name, "fp32" if name in ("scale", "softcap") else "i32"))
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(kernel, types, constants), target=target, options=options).asm["ptx"]
