"""The seam equals attention written out in plain loops, whatever shares the step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import UnsupportedModel
from core.speculation.token_tree import ROOT
from workers.attention.seam import LayerProbe, attend
from workers.step.kv_cache import KVCache, LayerShape
from workers.step.plan import Tiling, plan_step
from workers.step.readers import Span, branches_of

KV_HEADS, PACKED, DIM = 2, 3, 4
HEADS = KV_HEADS * PACKED
LAYER: Any = SimpleNamespace(layer_idx=0, is_causal=True)


def make_cache() -> KVCache:
    return KVCache([LayerShape(KV_HEADS, DIM, DIM)], 256, 4, torch.float32, torch.device("cpu"))


def fill(cache: KVCache, lengths: list[int]) -> list[Any]:
    """Sequences that hold random KV, their blocks interleaved as those of sequences that grow together are."""
    kvs = [cache.new_sequence() for _ in lengths]
    for step in range(1, max(lengths) + 1):
        cache.reserve_all((kv, min(step, length)) for kv, length in zip(kvs, lengths, strict=True))
    for kv, length in zip(kvs, lengths, strict=True):
        for row in range(length):
            cache.keys[0][cache.slot(kv, row)] = torch.randn(KV_HEADS, DIM)
            cache.values[0][cache.slot(kv, row)] = torch.randn(KV_HEADS, DIM)
        cache.extend(kv, length)
    return kvs


def seen_by(span: Span, row: int) -> list[tuple[int, int]]:
    """Slot offset and position of everything that row `row` of the span sees; the last one is the row itself."""
    base = span.kv.num_tokens - span.num_cached_nodes
    if row < span.num_chain:
        return [(place, place) for place in range(base + row + 1)]
    root = base + span.num_chain - 1
    ancestors, node = [], row - span.num_chain + span.num_cached_nodes
    while node != ROOT:
        ancestors.append(node)
        node = span.parents[node]
    chain = [(place, place) for place in range(root + 1)]
    return chain + [(root + 1 + node, root + depth) for depth, node in enumerate(reversed(ancestors), 1)]


def written_out(
    cache: KVCache, span: Span, row: int, query: torch.Tensor, window: int | None, softcap: float | None, sinks: Any
) -> torch.Tensor:
    """Attention of one row, head by head, in float64.  # [H, D]"""
    *_, (_, own_position) = seen_by(span, row)
    seen = [place for place, at in seen_by(span, row) if window is None or own_position - at < window]
    slots = [cache.slot(span.kv, place) for place in seen]
    outputs = []
    for head in range(HEADS):
        keys, values = (t[slots, head // PACKED].double() for t in (cache.keys[0], cache.values[0]))
        scores = keys @ query[head].double() * DIM**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1].double()])
        outputs.append(torch.softmax(scores, 0)[: len(slots)] @ values)
    return torch.stack(outputs)


def random_spans(rng: random.Random, kvs: list[Any]) -> list[Span]:
    spans, first = [], 0
    for kv in kvs:
        num_nodes = rng.choice([0, 0, 3, 7, 20])
        parents = tuple(rng.randint(ROOT, node - 1) for node in range(num_nodes))
        num_cached_nodes = min(rng.choice([0, 2, num_nodes - 1]), kv.num_tokens - 1) if num_nodes else 0
        span = Span(kv, first, rng.choice([1, 1, 2, 5, 40]), parents)
        if num_cached_nodes > 0:
            span = Span(kv, first, 0, parents, num_cached_nodes)
        spans.append(span)
        first += span.num_rows
    return spans


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(),
        Tiling(min_rows=8, query_rows=4, kv_tokens=32),
        Tiling(min_rows=8, query_rows=4, kv_tokens=32, by_branch=True),
    ],
    ids=["plain", "tiled", "by branch"],
)
@pytest.mark.parametrize(
    "kind",
    [{}, {"sliding_window": 6}, {"softcap": 1.5}, {"s_aux": torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0, -3.0])}],
    ids=lambda kind: next(iter(kind), "plain"),
)
@pytest.mark.parametrize("seed", range(4))
def test_every_row_equals_attention_written_out(seed: int, kind: dict[str, Any], tiling: Tiling) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cache = make_cache()
    kvs = fill(cache, [rng.randint(0, 12) for _ in range(4)] + [300])
    spans = random_spans(rng, kvs)
    num_rows = sum(span.num_rows for span in spans) + 2  # two rows of padding
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    query = torch.randn(1, HEADS, num_rows, DIM)
    key, value = torch.randn(2, 1, KV_HEADS, num_rows, DIM)
    plan = plan_step(cache, spans, num_rows, tiling)
    output, _ = attend(LAYER, query, key, value, None, plan=plan, **kind)
    for span in spans:
        for row in range(span.num_rows):
            want = written_out(
                cache,
                span,
                row,
                query[0, :, span.first_row + row],
                kind.get("sliding_window"),
                kind.get("softcap"),
                kind.get("s_aux"),
            )
            torch.testing.assert_close(output[0, span.first_row + row].double(), want, rtol=1e-5, atol=1e-5)


def test_a_lone_sequence_is_read_and_answered_in_place() -> None:
    cache = make_cache()
    (kv,) = fill(cache, [9])
    cache.reserve(kv, 10)
    plan = plan_step(cache, [Span(kv, 0, 1)], 4, Tiling(min_rows=4))
    assert isinstance(plan.reads.groups[0].stretches, slice)
    assert plan.reads.groups[0].query_rows is None
    assert plan.reads.row_order is None


def test_tiles_that_read_the_same_get_no_copies_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that does not take keys in place would copy them for each tile of a long prompt."""
    right, num_read = torch.matmul, []

    def matmul(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        num_read.append(len(other))
        return right(left, other)

    monkeypatch.setattr(torch, "matmul", matmul)
    cache = make_cache()
    (kv,) = fill(cache, [9])
    cache.reserve(kv, 20)
    plan = plan_step(cache, [Span(kv, 0, 11)], 11, Tiling(query_rows=4, kv_tokens=32))
    query, (key, value) = torch.randn(1, HEADS, 11, DIM), torch.randn(2, 1, KV_HEADS, 11, DIM)
    attend(LAYER, query, key, value, None, plan=plan, softcap=1.5)
    assert num_read == [1] * 6


def test_padding_has_no_tiles_of_its_own() -> None:
    cache = make_cache()
    (kv,) = fill(cache, [9])
    cache.reserve(kv, 10)
    (group,) = plan_step(cache, [Span(kv, 0, 1)], 8, Tiling(min_rows=8, query_rows=4, kv_tokens=32)).reads.groups
    assert group.mask.shape == (1, 4, 32)


def test_like_sequences_share_a_group_and_prefill_does_not() -> None:
    cache = make_cache()
    kvs = fill(cache, [10, 20, 0, 300])
    spans = [Span(kvs[0], 0, 1), Span(kvs[1], 1, 1), Span(kvs[2], 2, 100), Span(kvs[3], 102, 1)]
    cache.reserve_all((span.kv, span.num_kv) for span in spans)
    plan = plan_step(cache, spans, 103, Tiling())
    assert [group.mask.shape for group in plan.reads.groups] == [(2, 1, 24), (1, 100, 100), (1, 1, 304)]


def test_branches_are_chains_that_read_what_is_above_them() -> None:
    """In the tree 0(1(3), 2(4)), 5 the first branch continues the chain of tokens; if nodes are held none does."""
    cache = make_cache()
    (kv,) = fill(cache, [9])
    parents = (ROOT, 0, 0, 1, 2, ROOT)
    whole = [(branch.rows, branch.num_kv) for branch in branches_of(Span(kv, 10, 2, parents))]
    assert whole == [([10, 11, 12, 13, 15], 14), ([14, 16], 14), ([17], 12)]
    later = branches_of(Span(kv, 10, 0, parents, num_cached_nodes=2))
    assert [(branch.rows, branch.num_kv) for branch in later] == [([10, 12], 10), ([11], 10), ([13], 8)]
    cache.reserve(kv, 13)
    assert later[0].stretches(cache) == ([cache.slot(kv, row) for row in [*range(7), 7, 9, 11]], 1)
    chain = Span(kv, 0, 1, (ROOT, 0, 1))
    assert branches_of(chain) == [chain]


def test_a_mask_is_made_once_for_all_layers_of_a_kind() -> None:
    cache = make_cache()
    (kv,) = fill(cache, [9])
    cache.reserve(kv, 10)
    (group,) = plan_step(cache, [Span(kv, 0, 1)], 1, Tiling()).reads.groups
    assert group.bias(None, 3, torch.float32) is group.bias(None, 3, torch.float32)
    assert group.bias(4, 3, torch.float32) is not group.bias(None, 3, torch.float32)


def test_what_a_plan_cannot_express_is_refused() -> None:
    rows = torch.zeros(1, HEADS, 1, DIM)
    with pytest.raises(UnsupportedModel, match="own attention mask"):
        attend(LAYER, rows, rows, rows, torch.zeros(1), plan=LayerProbe())
    with pytest.raises(UnsupportedModel, match="position bias"):
        attend(LAYER, rows, rows, rows, None, plan=LayerProbe(), position_bias=torch.zeros(1))
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        attend(SimpleNamespace(layer_idx=0, is_causal=False), rows, rows, rows, None, plan=LayerProbe())  # type: ignore[arg-type]  # stands for a module
    with pytest.raises(UnsupportedModel, match="keyword arguments"):
        attend(LAYER, rows, rows, rows, None)


def test_a_probe_learns_what_a_layer_stores() -> None:
    probe = LayerProbe()
    query, key, value = torch.zeros(1, 6, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 3)
    output, _ = attend(LAYER, query, key, value, None, plan=probe, sliding_window=7)
    assert output.shape == (1, 5, 6, 3)
    assert probe.shapes == {0: LayerShape(2, 8, 3)}
    assert probe.windows == {0: 7}
    with pytest.raises(UnsupportedModel, match="more than once"):
        attend(LAYER, query, key, value, None, plan=probe)
