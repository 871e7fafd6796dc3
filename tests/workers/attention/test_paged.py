"""Attention by block tables equals attention that gathers KV, for whatever shares the step.

The kernel is the one of `tests.workers.attention.kernels`: no GPU is needed, and none has been seen.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.speculation.token_tree import ROOT
from tests.workers.attention.kernels import PlainKernel
from tests.workers.attention.test_attention import random_spans
from workers.attention.paged import PagedPlan, inputs_in_shape
from workers.attention.seam import attend
from workers.step.kv_cache import KVCache, LayerShape
from workers.step.paged_plan import StepShape
from workers.step.plan import NO_TILING, Tiling, plan_step
from workers.step.readers import Span, ancestor_bits
from workers.step.rows import Step

DIM = 4
LAYER: Any = SimpleNamespace(layer_idx=0, is_causal=True)


def make_cache(block_tokens: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache([LayerShape(kv_heads, DIM, DIM)], 512 // block_tokens, block_tokens, dtype, torch.device("cpu"))


def fill(cache: KVCache, lengths: list[int]) -> list[Any]:
    """Sequences that hold random KV, their blocks interleaved; what others have left is in the free ones."""
    kvs = [cache.new_sequence() for _ in lengths]
    for step in range(1, max(lengths) + 1):
        cache.reserve_all((kv, min(step, length)) for kv, length in zip(kvs, lengths, strict=True))
    for rows in (cache.keys[0], cache.values[0]):
        rows[cache.block_tokens :] = torch.randn(rows[cache.block_tokens :].shape)
    for kv, length in zip(kvs, lengths, strict=True):
        cache.extend(kv, length)
    return kvs


def paged_plan(
    cache: KVCache,
    spans: list[Span],
    num_rows: int,
    kernel: Any,
    step_shape: StepShape | None = None,
    tiling: Tiling = NO_TILING,
) -> tuple[PagedPlan, StepShape]:
    step = Step(list(range(num_rows)), positions_of(spans, num_rows), [0], spans)
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    step_shape = step_shape or StepShape.of(cache, step, tiling)
    filled = torch.from_numpy(step_shape.fill(cache, step, tiling))
    values = torch.cat([filled, torch.full((step_shape.num_values - len(filled),), 99, dtype=torch.int32)])
    *_, plan = inputs_in_shape(step_shape, values, cache, kernel, lambda: plan_step(cache, spans, num_rows, tiling))
    return plan, step_shape


def positions_of(spans: list[Span], num_rows: int) -> list[int]:
    positions = [0] * num_rows
    for span in spans:
        before = span.num_kv - span.num_rows
        depths = [bits.bit_count() for bits in ancestor_bits(span.parents)][span.num_cached_nodes :]
        rows = [*range(before, before + span.num_chain), *(span.root + depth for depth in depths)]
        positions[span.first_row : span.first_row + span.num_rows] = rows
    return positions


def both(
    cache: KVCache,
    spans: list[Span],
    heads: int,
    kernel: Any,
    num_padding: int = 0,
    tiling: Tiling = NO_TILING,
    **kind: Any,
) -> list[Any]:
    """Outputs of all rows of the spans, by block tables and by gathering.  # 2 x [T, H, D]"""
    num_rows = sum(span.num_rows for span in spans)
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    query = torch.randn(1, heads, num_rows + num_padding, DIM, dtype=cache.keys[0].dtype)
    key, value = torch.randn(2, 1, cache.keys[0].shape[1], num_rows + num_padding, DIM, dtype=cache.keys[0].dtype)
    plans: list[Any] = [paged_plan(cache, spans, num_rows + num_padding, kernel, tiling=tiling)[0]]
    plans.append(plan_step(cache, spans, num_rows + num_padding, NO_TILING))
    return [attend(LAYER, query, key, value, None, plan=plan, **kind)[0][0, :num_rows] for plan in plans]


@pytest.mark.parametrize("heads", [(2, 2), (2, 6), (1, 4)], ids=lambda heads: f"{heads[1]} over {heads[0]}")
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("seed", range(6))
def test_a_ragged_batch_gets_what_gathering_gives(seed: int, block_tokens: int, heads: tuple[int, int]) -> None:
    """Chunks, plain rows, chains and trees with and without held nodes; and rows of padding."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cache = make_cache(block_tokens, heads[0])
    spans = random_spans(rng, fill(cache, [rng.randint(0, 12) for _ in range(4)] + [60]))
    got, want = both(cache, spans, heads[1], PlainKernel(), num_padding=2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_as_close_as_it_can_be() -> None:
    torch.manual_seed(0)
    cache = make_cache(dtype=torch.bfloat16)
    spans = random_spans(random.Random(1), fill(cache, [9, 3, 12, 1, 30]))
    got, want = both(cache, spans, 6, PlainKernel())
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_a_node_sees_the_kv_up_to_its_root_and_its_lineage() -> None:
    """Reads of the tree 0(1(3), 2) below two tokens; then of its rest when three nodes are held."""
    cache = make_cache()
    (kv,) = fill(cache, [9])
    parents = (ROOT, 0, 0, 1)
    plan, shape = paged_plan(cache, [Span(kv, 0, 2, parents)], 6, PlainKernel())
    assert plan.reads.seen.tolist() == [10, 11, 11, 11, 11, 11]
    assert plan.reads.masks.tolist() == [[0], [0], [0b1], [0b11], [0b101], [0b1011]]
    assert plan.reads.tiles.tolist() == [[0, 6, 0, 15]]
    assert (shape.depth, shape.num_words) == (3, 1)
    plan, _ = paged_plan(cache, [Span(kv, 0, 0, parents, num_cached_nodes=3)], 1, PlainKernel())
    assert (plan.reads.seen.tolist(), plan.reads.masks.tolist()) == ([6], [[0b1011]])


def test_rows_that_adjoin_share_tiles_of_sixteen() -> None:
    cache = make_cache()
    kvs = fill(cache, [9, 5])
    plan, _ = paged_plan(cache, [Span(kvs[0], 0, 37), Span(kvs[1], 37, 1)], 38, PlainKernel())
    assert plan.reads.tiles.tolist() == [[0, 16, 0, 25], [16, 16, 0, 41], [32, 5, 0, 46], [37, 1, 1, 6]]
    plan, _ = paged_plan(cache, [Span(kvs[0], 0, 1), Span(kvs[1], 1, 1)], 2, PlainKernel())
    assert (plan.reads.tiles.tolist(), plan.reads.tile_rows) == ([[0, 1, 0, 10], [1, 1, 1, 6]], 1)


@pytest.mark.parametrize("seed", range(4))
def test_in_deterministic_mode_each_branch_is_read_as_a_chain(seed: int) -> None:
    """So that the order of KV, and with it a sum's bits, are those of plain decoding."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cache = make_cache()
    spans = random_spans(rng, fill(cache, [rng.randint(0, 12) for _ in range(4)] + [60]))
    got, want = both(cache, spans, 6, PlainKernel(), num_padding=2, tiling=Tiling(by_branch=True))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("depth", "calls"), [(0, 1), (2, 1), (7, 0)])
def test_windows_are_the_kernels_unless_a_tree_is_deeper(depth: int, calls: int) -> None:
    torch.manual_seed(0)
    cache, kernel = make_cache(), Counting()
    kvs = fill(cache, [9, 40, 2])
    parents = (ROOT, ROOT, *range(1, depth)) if depth else ()
    spans = [Span(kvs[0], 0, 3), Span(kvs[1], 3, 1, (ROOT, 0)), Span(kvs[2], 6, 1, parents)]
    got, want = both(cache, spans, 2, kernel, sliding_window=6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert kernel.num_calls == calls


@pytest.mark.parametrize("kind", [{"softcap": 1.5}, {"s_aux": torch.tensor([1.0, -1.0])}], ids=["softcap", "sinks"])
def test_softcaps_and_sinks_are_the_kernels(kind: dict[str, Any]) -> None:
    cache, kernel = make_cache(), Counting()
    (kv,) = fill(cache, [9])
    got, want = both(cache, [Span(kv, 0, 3)], 2, kernel, **kind)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert kernel.num_calls == 1


class Counting(PlainKernel):
    num_calls = 0

    def attend(self, *args: Any) -> Any:
        self.num_calls += 1
        return super().attend(*args)


def test_what_a_sequence_left_behind_spoils_no_other_and_no_branch_but_its_own() -> None:
    """A NaN in the KV of one node, and in all blocks that nobody has."""
    cache = make_cache()
    kvs = fill(cache, [9, 9])
    spans = [Span(kvs[0], 0, 1, (ROOT, ROOT, 1)), Span(kvs[1], 4, 0, (ROOT, ROOT, 0, 1), num_cached_nodes=2)]
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    mine = {cache.slot(kv, row) for kv, span in zip(kvs, spans, strict=True) for row in range(span.num_kv)}
    others = [slot for slot in range(2 * cache.block_tokens, len(cache.keys[0])) if slot not in mine]
    for rows in (cache.keys[0], cache.values[0]):
        rows[[*others, cache.slot(kvs[1], 7)]] = torch.nan  # the first of two held nodes
    plan, _ = paged_plan(cache, spans, 6, PlainKernel())
    query, key, value = torch.randn(3, 1, 2, 6, DIM)
    output, _ = attend(LAYER, query, key, value, None, plan=plan)
    assert output[0].isnan().any(-1).any(-1).tolist() == [False, False, False, False, True, False]


def test_a_shape_with_room_to_spare_gives_the_same_and_padding_writes_to_the_sink() -> None:
    torch.manual_seed(0)
    cache = make_cache()
    kvs = fill(cache, [9, 5])
    spans = [Span(kvs[0], 0, 1, (ROOT, ROOT, 1)), Span(kvs[1], 4, 2)]
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    tight, step_shape = paged_plan(cache, spans, 6, PlainKernel())
    assert step_shape == StepShape(6, 1, 2, 2, 4, 1, 2, 16, 4)
    roomy, _ = paged_plan(cache, spans, 6, PlainKernel(), StepShape(8, 8, 8, 8, 5, 8, 64, 16, 4))
    assert roomy.reads.num_tiles.tolist() == [2]
    assert roomy.write_slots[6:].tolist() == [cache.block_tokens] * 2, "the sink"
    query, key, value = torch.randn(3, 1, 2, 8, DIM)
    want, _ = attend(LAYER, query[:, :, :6], key[:, :, :6], value[:, :, :6], None, plan=tight)
    got, _ = attend(LAYER, query, key, value, None, plan=roomy)
    torch.testing.assert_close(got[0, :6], want[0], rtol=1e-6, atol=1e-6)
    assert (cache.keys[0][: cache.block_tokens] == 0).all(), "nobody writes to the blank block"


def test_tables_of_absent_sequences_are_not_uploaded() -> None:
    cache = make_cache()
    (kv,) = fill(cache, [9])
    shape = StepShape(8, 8, 8, 8, 5, 8, 64, 16, 4)
    step = Step([0], [9], [0], [Span(kv, 0, 1)])
    cache.reserve(kv, 10)
    assert len(shape.fill(cache, step)) == shape.num_values - 7 * 5
