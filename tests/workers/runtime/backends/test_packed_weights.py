"""A packed layer computes what the layer computed, with bits that do not depend on how many rows there are."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from core.errors import CheckpointError
from core.records import Findings
from tests import checkpoints
from tests.workers.runtime.test_runtime import in_all_ways, tokens
from workers.runtime import backends
from workers.runtime.backends import packed_weights
from workers.runtime.backends.packed_weights import TILE_UNIT_ROWS, PackedProduct, pack
from workers.runtime.self_test import SelfTest
from workers.runtime.tiling import CPU_DETERMINISTIC

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(
    not packed_weights.is_available(torch.float32, CPU), reason="this CPU has no packed float32 products"
)


@pytest.fixture(autouse=True)
def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor for which no program is made."""
    others = tuple(kind for kind in backends.BACKENDS if kind is not backends.ProgramBackend)
    monkeypatch.setattr(backends, "BACKENDS", others)


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    conv = Conv1D(24, 40)
    nn.init.normal_(conv.bias)
    return [nn.Linear(40, 24), nn.Linear(24, 7, bias=False), conv]


@needs_kernels
@pytest.mark.parametrize("which", range(3), ids=["bias", "no bias", "transposed"])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@torch.inference_mode()
def test_a_packed_layer_computes_the_same(which: int, num_rows: int) -> None:
    layer = layers()[which]
    rows = torch.randn(2, num_rows, 24 if which == 1 else 40)
    want = layer(rows)
    assert pack(layer, 0) == (1, 0)
    assert layer.weight.isnan().all()
    assert layer.weight.untyped_storage().nbytes() <= 4
    torch.testing.assert_close(layer(rows), want, rtol=0, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("shape", [(2304, 768), (576, 192), (33, 65)])
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_how_many_there_are(shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    layer = nn.Linear(shape[1], shape[0])
    pack(layer, 0)
    rows = torch.randn(512, shape[1])
    want = layer(rows)
    for num_rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 64, 100, 511):
        assert torch.equal(layer(rows[:num_rows]), want[:num_rows]), num_rows
        assert torch.equal(layer(rows[-num_rows:]), want[-num_rows:]), num_rows


@pytest.mark.skipif(not packed_weights.has_bfloat16(), reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize("shape", [(4096, 1024), (512, 14336), (33, 65)])
@torch.inference_mode()
def test_rows_of_bfloat16_in_parts_have_bits_that_do_not_depend_on_how_many_there_are(shape: tuple[int, int]) -> None:
    """In tiles of four rows, with which a start tries it: where inputs are many, a single row has bits of its own."""
    torch.manual_seed(2)
    layer = nn.Linear(shape[1], shape[0]).bfloat16()
    pack(layer, 0, max_rows=TILE_UNIT_ROWS)
    rows = torch.randn(256, shape[1]).bfloat16()
    want = layer(rows)
    for num_rows in (4, 8, 12, 32, 36, 40, 64, 100, 128, 200):
        assert torch.equal(layer(rows[:num_rows]), want[:num_rows]), num_rows
        assert torch.equal(layer(rows[-num_rows:]), want[-num_rows:]), num_rows


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 10, 40), (10, 40), (2, 5, 40), (1, 4, 40), (1, 0, 40)])
@torch.inference_mode()
def test_no_more_rows_are_multiplied_at_once_than_may_be(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, sizes, multiply = layers()[0], list[int](), PackedProduct._multiply
    rows = torch.randn(shape)
    want = layer(rows)
    pack(layer, 0, max_rows=4)

    def noted(self: PackedProduct, part: torch.Tensor) -> torch.Tensor:
        sizes.append(part.numel() // part.shape[-1])
        return multiply(self, part)

    monkeypatch.setattr(PackedProduct, "_multiply", noted)
    torch.testing.assert_close(layer(rows), want, rtol=0, atol=1e-6)
    assert sizes == {10: [4, 4, 2], 4: [4], 0: []}[rows.numel() // 40]


@needs_kernels
@pytest.mark.parametrize("has_unit", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_only_deterministic_bfloat16_on_a_tile_unit_is_multiplied_in_parts(
    has_unit: bool, dtype: str, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "has_bfloat16", lambda: True)
    monkeypatch.setattr(packed_weights, "has_tile_unit", lambda: has_unit)
    monkeypatch.setattr(packed_weights, "MIN_WEIGHTS", 0)
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path), dtype=dtype, deterministic=deterministic)
    products = packed_weights.packed(runtime.context.model)
    limit = TILE_UNIT_ROWS if has_unit and deterministic and dtype == "bfloat16" else None
    assert {product._max_rows for product in products} == {limit}


class Attention(nn.Module):
    """Three siblings that are one product, and a fourth layer that is none of them."""

    def __init__(self, *, k_bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q_proj, self.k_proj = nn.Linear(40, 24), nn.Linear(40, 8, bias=k_bias)
        self.v_proj, self.o_proj = nn.Linear(40, 8), nn.Linear(24, 40)


@needs_kernels
@torch.inference_mode()
def test_siblings_that_are_given_the_same_rows_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention()
    names = ("q_proj", "k_proj", "v_proj")
    rows, others = torch.randn(1, 5, 40), torch.randn(1, 5, 40)
    want = {(name, id(some)): model.get_submodule(name)(some) for name in names for some in (rows, others)}
    assert pack(model, 24 * 40 + 1) == (3, 1), "together they are large enough"
    (product,) = packed_weights.packed(model)
    num_calls = count_calls(monkeypatch)
    for name, some in [*((name, rows) for name in names), ("k_proj", others), ("q_proj", rows), ("v_proj", others)]:
        torch.testing.assert_close(model.get_submodule(name)(some), want[name, id(some)], rtol=0, atol=1e-6)
    assert product.shape == (40, 40)
    assert num_calls() == 4, "one for the three, and one each time that the rows are others"


@needs_kernels
@torch.inference_mode()
def test_rows_that_were_changed_are_computed_again_in_the_next_pass() -> None:
    """A tensor may come again with other values, once all siblings have had it."""
    model = Attention()
    pack(model, 0)
    rows = torch.randn(1, 1, 40)
    first = [model.get_submodule(name)(rows).clone() for name in ("q_proj", "k_proj", "v_proj")]
    rows.mul_(2)
    assert not torch.equal(model.q_proj(rows), first[0])


@needs_kernels
def test_siblings_of_unlike_kinds_stay_apart() -> None:
    model = Attention(k_bias=False)
    assert pack(model, 0) == (4, 0)
    assert len(packed_weights.packed(model)) == 4


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a packed product is computed from now on."""
    calls: list[Any] = []
    compute = PackedProduct.__call__

    def counted(self: PackedProduct, rows: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return compute(self, rows)

    monkeypatch.setattr(PackedProduct, "__call__", counted)
    return lambda: len(calls)


@needs_kernels
def test_small_layers_and_shared_weights_are_left() -> None:
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 50, bias=False), nn.Linear(50, 3), nn.ReLU())
    model[1].weight = model[0].weight
    assert pack(model, 50 * 40) == (1, 1)
    assert model[0].weight.shape == (50, 40)
    assert model[2].weight.shape == (3, 50)
    assert pack(model, 50 * 40) == (1, 1)  # there is nothing left to do


@needs_kernels
@torch.inference_mode()
def test_code_that_asks_for_the_weight_learns_its_shape_and_gets_no_wrong_number() -> None:
    layer = nn.Linear(40, 24)
    pack(layer, 0)
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device) == ((24, 40), torch.float32, CPU)
    assert nn.functional.linear(torch.randn(3, 40), layer.weight).isnan().all()


def test_a_model_that_gives_nan_is_not_served(tmp_path: Path) -> None:
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path))
    with torch.no_grad():
        runtime.context.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="gives NaN"):
        runtime.warm_up()


@needs_kernels
def test_a_slice_of_nothing_is_left() -> None:
    layer = nn.Linear(16, 1)
    layer.weight = nn.Parameter(torch.empty(0, 16))  # as the last of many ranks may have it
    assert pack(layer, 0) == (0, 1)


@needs_kernels
def test_every_product_is_warmed_up_with_its_bias_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 4))
    pack(model, 0)
    seen: list[tuple[tuple[int, int], bool, int]] = []
    monkeypatch.setattr(
        PackedProduct, "__call__", lambda self, rows: seen.append((self.shape, self.has_bias, rows.shape[1]))
    )
    packed_weights.warm_up(model, 2)
    assert sorted(seen) == [
        (shape, has_bias, rows)
        for shape, has_bias in [((4, 8), True), ((8, 8), False), ((8, 8), True)]
        for rows in (1, 2)
    ]


@needs_kernels
@torch.inference_mode()
def test_hooks_stay_and_subclasses_are_not_touched() -> None:
    class Special(nn.Linear):
        """May do something else with its weight."""

    plain, special = nn.Linear(4, 4), Special(4, 4)
    plain.register_forward_hook(lambda _module, _args, output: output + 100)
    assert pack(nn.Sequential(plain, special), 0) == (1, 0)
    assert float(plain(torch.zeros(1, 4)).min()) > 90


# bfloat16 on a CPU without instructions for it


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "has_bfloat16", lambda: False)


@needs_kernels
@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("keeps_rows", [True, False])
@pytest.mark.parametrize("which", range(3), ids=["bias", "no bias", "transposed"])
@pytest.mark.parametrize("num_rows", [1, 5])
@torch.inference_mode()
def test_a_widened_layer_is_exact_but_for_the_last_rounding(which: int, num_rows: int, keeps_rows: bool) -> None:
    layer: Any = layers()[which].bfloat16()
    rows = torch.randn(num_rows, 24 if which == 1 else 40).bfloat16()
    weight = layer.weight if which == 2 else layer.weight.T
    want = rows.double() @ weight.double() + (0 if layer.bias is None else layer.bias.double())
    pack(layer, 0, keeps_rows=keeps_rows)
    got = layer(rows)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)  # half of the last of eight bits, and a bit


@needs_kernels
@pytest.mark.usefixtures("no_bfloat16")
@torch.inference_mode()
def test_a_widened_row_has_its_own_bits_unless_single_rows_are_apart() -> None:
    torch.manual_seed(3)
    rows = torch.randn(64, 768).bfloat16()
    layer, apart = (nn.Linear(768, 2304).bfloat16() for _ in range(2))
    apart.load_state_dict(layer.state_dict())
    pack(layer, 0, keeps_rows=False)
    pack(apart, 0, keeps_rows=True)
    want = layer(rows)
    assert all(torch.equal(layer(rows[:num_rows]), want[:num_rows]) for num_rows in (1, 2, 5, 8, 33))
    assert torch.equal(apart(rows[:5]), want[:5])
    kept = nn.functional.linear(rows[:1], *vars(apart)["forward"]._rows)
    assert torch.equal(apart(rows[:1]), kept)


def bytes_held(model: nn.Module) -> int:
    """Bytes of parameters and of products, whose float32 blocks have the bytes of what was widened."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.parameters()}
    products = packed_weights.packed(model)
    storages |= {
        product._rows[0].untyped_storage().data_ptr(): product._rows[0].untyped_storage().nbytes()
        for product in products
        if isinstance(product, packed_weights.WidenedProduct) and product._rows is not None
    }
    return sum(storages.values()) + sum(4 * product.shape[0] * product.shape[1] for product in products)


@needs_kernels
@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("keeps_rows", [True, False])
def test_what_widening_will_take_is_known_before(keeps_rows: bool, is_tied: bool) -> None:
    """Where the head is the embedding, too; but for biases and stand-ins."""
    model: Any = checkpoints.build("llama", tie_word_embeddings=is_tied).bfloat16()
    before, said = bytes_held(model), packed_weights.bytes_needed(model, keeps_rows=keeps_rows)
    pack(model, 0, keeps_rows=keeps_rows)
    assert bytes_held(model) - before == pytest.approx(said, rel=1e-3)


@needs_kernels
@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("deterministic", [True, False])
def test_nothing_is_widened_where_memory_is_short(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may take half of what is free, of which ranks have their shares."""
    monkeypatch.setattr(packed_weights, "MIN_WEIGHTS", 0)
    path = checkpoints.write("llama", tmp_path)
    needed = packed_weights.bytes_needed(checkpoints.build("llama").bfloat16(), keeps_rows=not deterministic)
    for free, is_enough in ((2 * needed, True), (2 * needed - 2, False), (None, True)):
        caplog.clear()
        monkeypatch.setattr(
            "workers.runtime.backends.packed_cpu.free_bytes", lambda _device, num_ranks, free=free: free
        )
        with caplog.at_level(logging.WARNING):
            runtime = checkpoints.runtime(path, dtype="bfloat16", deterministic=deterministic)
        assert bool(packed_weights.packed(runtime.context.model)) == is_enough
        assert ("torch.bfloat16 weights are not widened" in caplog.text) == (not is_enough)


def test_where_there_are_no_kernels_nothing_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not packed_weights.is_available(torch.float32, torch.device("cuda"))
    assert not packed_weights.is_available(torch.float16, CPU)
    monkeypatch.setattr(packed_weights, "is_available", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path), deterministic=True)
    assert "no kernels for packed torch.float32 weights" in caplog.text
    assert not any(isinstance(vars(module).get("forward"), PackedProduct) for module in runtime.context.model.modules())
    runtime.warm_up()
    assert runtime.context.tiling == CPU_DETERMINISTIC


# Tiles

IN_FLOAT32 = {"llama", "qwen3_moe"}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if dtype == "bfloat16" or family in IN_FLOAT32 else pytest.mark.slow)
        for family in ("llama", "mistral", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_bits_are_equal_with_the_tiles_that_a_warm_up_chooses(family: str, dtype: str, tmp_path: Path) -> None:
    runtime = checkpoints.runtime(
        checkpoints.write(family, tmp_path), deterministic=True, dtype=dtype, kv_cache_tokens=16384
    )
    runtime.warm_up()
    rng = random.Random(3)
    seqs, nexts = [tokens(rng, count) for count in (1, 30, 500, 222)], [tokens(rng, 8) for _ in range(4)]
    first, *others = in_all_ways(runtime, seqs, nexts)
    for other in others:
        assert torch.equal(other, first)


@needs_kernels
@pytest.mark.parametrize(("num_unlike", "want"), [(0, 1), (3, 4), (7, 8)])
def test_tiles_are_as_large_as_bits_need(
    num_unlike: int, want: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that are another for up to `num_unlike` rows."""
    spoil(monkeypatch, num_unlike)
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path), deterministic=True)
    runtime.warm_up()
    assert (runtime.context.tiling.min_rows, runtime.context.tiling.row_multiple) == (want, want)
    assert runtime.context.tiling.query_rows == CPU_DETERMINISTIC.query_rows


@needs_kernels
def test_what_one_has_found_out_another_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 3)
    path = checkpoints.write("llama", tmp_path)
    known = checkpoints.runtime(path, deterministic=True).warm_up(machine="here")
    assert (known.machine, known.is_compiled, known.tile_rows) == ("here", False, 4)
    assert [num_rows for num_rows, _ in known.step_times_s][:4] == [1, 2, 4, 8]

    monkeypatch.setattr(SelfTest, "is_batch_invariant", lambda _: pytest.fail("it is known"))
    runtime = checkpoints.runtime(path, deterministic=True)
    assert runtime.warm_up(machine="here", known=known) is known
    assert (runtime.context.tiling.min_rows, runtime.context.tiling.row_multiple) == (4, 4)


@needs_kernels
@pytest.mark.parametrize("change", [{"machine": "elsewhere"}, {"is_compiled": True}, {"tile_rows": None}])
def test_what_was_found_out_elsewhere_or_in_vain_is_found_out_again(change: dict[str, Any], tmp_path: Path) -> None:
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path), deterministic=True)
    known = replace(Findings("here", False, 8, ((1, 60.0),)), **change)
    findings = runtime.warm_up(machine="here", known=known)
    assert (findings.machine, findings.is_compiled) == ("here", False)
    assert findings.tile_rows == runtime.context.tiling.min_rows != 8
    assert dict(findings.step_times_s)[1] < 60.0


@needs_kernels
def test_it_is_said_when_no_tiles_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(monkeypatch, 100)
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path), deterministic=True)
    with caplog.at_level(logging.WARNING):
        runtime.warm_up()
    assert "deterministic is NOT met" in caplog.text
    assert runtime.context.tiling == CPU_DETERMINISTIC


@pytest.mark.parametrize("of_several_readers", [True, False], ids=["company", "tiles"])
def test_attention_that_depends_on_what_shares_its_call_is_found_out(
    *, of_several_readers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tiles of one reader read the same keys, which are not copied for each; several readers have keys of their own."""
    right = nn.functional.scaled_dot_product_attention

    def attention(q: torch.Tensor, k: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        assert q.shape[2] == CPU_DETERMINISTIC.query_rows * 2, "each product has one shape; two heads share keys"
        is_spoilt = len(q) > 1 and (k.stride(0) > 0) == of_several_readers
        return right(q, k, *others, **options) * (1 + 1e-5 * is_spoilt)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    runtime = checkpoints.runtime(checkpoints.write("llama", tmp_path), deterministic=True)
    with caplog.at_level(logging.WARNING):
        runtime.warm_up()
    assert "deterministic is NOT met" in caplog.text


def test_single_rows_are_tried_often_and_take_no_room_from_other_sizes() -> None:
    """In bfloat16 another order of sums shows in one row of twenty or so."""
    sizes = {room: SelfTest(lambda _: torch.empty(0), None, room, 1)._sizes() for room in (64, 512)}
    assert sizes[512].count(1) > 20
    assert {*range(1, 11)} <= set(sizes[64])
    assert {*range(1, 23), 31, 64, 129} == set(sizes[512])


def spoil(monkeypatch: pytest.MonkeyPatch, num_unlike: int) -> None:
    right = PackedProduct.__call__

    def product(self: PackedProduct, rows: torch.Tensor) -> Any:
        return right(self, rows) * (1 + 1e-6 * (rows.shape[-2] <= num_unlike))

    monkeypatch.setattr(PackedProduct, "__call__", product)
