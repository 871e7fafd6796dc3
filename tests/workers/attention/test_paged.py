"""Attention by block tables equals attention that gathers KV, for whatever shares the step; and what torch takes.

The kernel is the one of `tests.workers.attention.kernels`: no GPU is needed, and none has been seen.
"""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from core.speculation.token_tree import ROOT
from tests.workers.attention.kernels import PlainKernel
from tests.workers.attention.test_attention import random_spans
from workers.attention import paged
from workers.attention.paged import Kernel, KVReads, PagedPlan, inputs_in_shape
from workers.attention.seam import attend
from workers.step.kv_cache import BLANK_BLOCK, KVCache, LayerShape
from workers.step.paged_plan import NO_SLOT, StepShape, segments_of
from workers.step.plan import Tiling, plan_step
from workers.step.readers import Span
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
    cache: KVCache, spans: list[Span], num_rows: int, kernel: Any, step_shape: StepShape | None = None
) -> tuple[PagedPlan, StepShape]:
    step = Step(list(range(num_rows)), list(range(num_rows)), [0], spans)
    segments = segments_of(spans)
    step_shape = step_shape or StepShape.of(cache, step, segments)
    values = torch.from_numpy(step_shape.fill(cache, step, segments))
    *_, plan = inputs_in_shape(step_shape, values, cache, kernel, lambda: plan_step(cache, spans, num_rows, Tiling()))
    return plan, step_shape


def both(cache: KVCache, spans: list[Span], heads: int, kernel: Any, num_padding: int = 0, **kind: Any) -> list[Any]:
    """What every row of the spans gets, by block tables and by gathering.  # 2 x [T, H, D]"""
    num_rows = sum(span.num_rows for span in spans)
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    query = torch.randn(1, heads, num_rows + num_padding, DIM, dtype=cache.keys[0].dtype)
    key, value = torch.randn(2, 1, cache.keys[0].shape[1], num_rows + num_padding, DIM, dtype=cache.keys[0].dtype)
    plans: list[Any] = [paged_plan(cache, spans, num_rows + num_padding, kernel)[0]]
    plans.append(plan_step(cache, spans, num_rows + num_padding, Tiling()))
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


def test_one_pass_without_trees_and_two_with_them() -> None:
    cache = make_cache()
    first, second = fill(cache, [9, 5])
    for spans, calls in (
        ([Span(first, 0, 1), Span(second, 1, 30)], ["causal"]),
        ([Span(first, 0, 1, (ROOT, 0, 1)), Span(second, 4, 0, (ROOT, 0), 1)], ["causal"]),  # trees that are chains
        ([Span(first, 0, 1, (ROOT, ROOT)), Span(second, 3, 2)], ["causal", "unmasked"]),
    ):
        kernel = PlainKernel()
        both(cache, spans, 2, kernel)
        assert kernel.calls == calls


def test_a_tree_is_a_chain_and_nodes_that_know_their_lineage() -> None:
    """Of the tree 0(1(3), 2) below two tokens; then of what is left of it when three nodes are held."""
    cache = make_cache()
    (kv,) = fill(cache, [9])
    parents = (ROOT, 0, 0, 1)
    chain, nodes = segments_of([Span(kv, 0, 2, parents)])
    assert (chain.num_rows, chain.num_seen, chain.is_tree) == (2, 11, False)
    assert (nodes.num_rows, nodes.num_seen) == (4, 11)
    assert nodes.lineages == ((11,), (11, 12), (11, 13), (11, 12, 14))
    (rest,) = segments_of([Span(kv, 0, 0, parents, num_cached_nodes=3)])
    assert (rest.num_rows, rest.num_seen, rest.lineages) == (1, 6, ((6, 7, 9),))


@pytest.mark.parametrize("has_tree", [False, True])
def test_windows_are_the_kernels_for_chains_and_gathered_for_trees(has_tree: bool) -> None:
    torch.manual_seed(0)
    cache, kernel = make_cache(), PlainKernel()
    kvs = fill(cache, [9, 40, 2])
    spans = [Span(kvs[0], 0, 3), Span(kvs[1], 3, 1, (ROOT, 0)), Span(kvs[2], 6, 1, (ROOT, ROOT) if has_tree else ())]
    got, want = both(cache, spans, 2, kernel, sliding_window=6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert bool(kernel.calls) is not has_tree


@pytest.mark.parametrize("kind", [{"softcap": 1.5}, {"s_aux": torch.tensor([1.0, -1.0])}], ids=["softcap", "sinks"])
def test_what_no_kernel_does_is_gathered(kind: dict[str, Any]) -> None:
    cache, kernel = make_cache(), PlainKernel()
    (kv,) = fill(cache, [9])
    got, want = both(cache, [Span(kv, 0, 3)], 2, kernel, **kind)
    assert torch.equal(got, want)
    assert not kernel.calls


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


def test_a_form_with_room_to_spare_gives_the_same_and_padding_reads_the_blank_block() -> None:
    torch.manual_seed(0)
    cache = make_cache()
    kvs = fill(cache, [9, 5])
    spans = [Span(kvs[0], 0, 1, (ROOT, ROOT, 1)), Span(kvs[1], 4, 2)]
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    tight, step_shape = paged_plan(cache, spans, 6, PlainKernel())
    assert step_shape == StepShape(6, 1, 3, 3, 3, 2)
    roomy, _ = paged_plan(cache, spans, 6, PlainKernel(), StepShape(8, 8, 8, 5, 8, 4))
    assert roomy.chains.starts.tolist() == [0, 1, 4, 6, 7, 8, 8, 8, 8]
    assert roomy.chains.lengths.tolist() == [10, 3, 7, 1, 1, 1, 1, 1]
    assert roomy.chains.table[3:].unique().tolist() == [BLANK_BLOCK]
    assert roomy.write_slots[6:].tolist() == [cache.block_tokens] * 2, "the sink"
    assert roomy.lineage is not None
    assert (roomy.lineage[4:] == NO_SLOT).all()
    query, key, value = torch.randn(3, 1, 2, 8, DIM)
    want, _ = attend(LAYER, query[:, :, :6], key[:, :, :6], value[:, :, :6], None, plan=tight)
    got, _ = attend(LAYER, query, key, value, None, plan=roomy)
    torch.testing.assert_close(got[0, :6], want[0], rtol=1e-6, atol=1e-6)
    assert (cache.keys[0][: cache.block_tokens] == 0).all(), "nobody writes to the blank block"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch is asked for: each call is checked against its signature, and run on tensors without data."""
    calls: list[dict[str, Any]] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(varlen.varlen_attn).bind(*args, **kwargs).arguments
        calls.append(bound)
        return varlen.varlen_attn(*args, **kwargs)

    monkeypatch.setattr(paged, "varlen_attn", note)
    return calls


def test_torch_is_asked_as_its_signature_and_its_kernel_want_it(asked: list[dict[str, Any]]) -> None:
    query, pool = torch.empty(5, 6, 64, device="meta"), torch.empty(7, 256, 2, 64, device="meta")
    starts, lengths = (torch.empty(count, dtype=torch.int32, device="meta") for count in (4, 3))
    table = torch.empty(3, 9, dtype=torch.int32, device="meta")
    many, one = KVReads(starts, lengths, table, 3), KVReads(starts, lengths, table, 1)
    assert Kernel().causal(query, pool, pool, many, 0.1, None).shape == query.shape
    assert Kernel().causal(query, pool, pool, one, 0.1, None).shape == query.shape
    assert Kernel().causal(query, pool, pool, one, 0.1, 100).shape == query.shape
    output, logarithms = Kernel().unmasked(query, pool, pool, one, 0.1)
    assert (output.shape, logarithms.shape) == (query.shape, (5, 6))
    assert [call["window_size"] for call in asked] == [(-1, 0), (-1, -1), (99, 0), (-1, -1)]
    assert [call["max_q"] for call in asked] == [3, 1, 1, 2]
    assert {call["max_k"] for call in asked} == {9 * 256}
    assert {call["num_splits"] for call in asked} == {1}
    assert all(call["seqused_k"] is lengths and call["block_table"] is table for call in asked)
