"""A mask hides what a row must not see, whether its bias is cut out of a table or made slot by slot."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.speculation import ROOT
from workers.step import masks
from workers.step.kv_cache import SequenceKV
from workers.step.masks import ChainMask, TreeMask, mask_of
from workers.step.readers import Span

CPU = torch.device("cpu")
FLOAT = torch.float32


def chain(num_held: int, num_rows: int, parents: tuple[int, ...] = ()) -> Span:
    return Span(SequenceKV(num_tokens=num_held), 0, num_rows, parents)


def expected(position: int, num_slots: int, window: int | None) -> list[float]:
    """The definition: slots up to the row's own, and of these the last `window`."""
    first = 0 if window is None else position - window + 1
    return [0.0 if first <= slot <= position else -math.inf for slot in range(num_slots)]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=4),
    num_padding=st.integers(0, 3),
    num_spare=st.integers(0, 40),
    window=st.none() | st.integers(1, 50),
    heads_per_row=st.integers(1, 3),
)
def test_a_row_of_a_chain_sees_the_slots_up_to_its_own(
    sizes: list[tuple[int, int]], num_padding: int, num_spare: int, window: int | None, heads_per_row: int
) -> None:
    readers = [chain(*size) for size in sizes]
    num_queries = max(num_rows for _, num_rows in sizes) + num_padding
    num_slots = max(reader.num_kv for reader in readers) + num_spare
    mask = mask_of(readers, num_queries, num_slots, num_queries)
    assert isinstance(mask, ChainMask)
    assert mask.shape == (len(readers), num_queries, num_slots)
    bias = mask.bias(window, heads_per_row, FLOAT, CPU)
    bias = bias.expand(len(readers), 1, num_queries * heads_per_row, num_slots)
    for reader, of_reader in zip(readers, bias[:, 0], strict=True):
        for index, row in enumerate(of_reader):
            position = min(reader.num_kv - reader.num_chain + index // heads_per_row, reader.num_kv - 1)
            assert row.tolist() == expected(position, num_slots, window)


@pytest.mark.parametrize("window", [None, 3])
def test_chains_beside_a_tree_are_masked_as_without_it(window: int | None) -> None:
    """A group with a tree has its biases made slot by slot."""
    chains = [chain(7, 2), chain(3, 1)]
    tree = chain(4, 1, (ROOT, ROOT))
    mixed = mask_of([*chains, tree], 3, 16, 3)
    assert isinstance(mixed, TreeMask)
    alone = mask_of(chains, 3, 16, 3)
    assert torch.equal(mixed.bias(window, 2, FLOAT, CPU)[:2], alone.bias(window, 2, FLOAT, CPU))
    assert mixed.bias(None, 1, FLOAT, CPU)[2, 0, 2].isfinite().nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 6]


def test_on_a_gpu_no_mask_begins_in_the_middle_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused kernels read it in aligned pieces: they refuse a view of a table that begins anywhere."""
    gpu = torch.device("meta")  # knows shapes and offsets, and computes nothing
    monkeypatch.setattr(masks, "upload", lambda values, device: torch.tensor(values, device=device))
    bias = mask_of([chain(5, 1)], 1, 16, 1).bias(None, 2, torch.bfloat16, gpu)
    assert bias.storage_offset() == 0
    assert bias.expand(1, 1, 2, 16).shape == (1, 1, 2, 16)


@pytest.mark.parametrize("reader", [chain(5, 1), chain(5, 2), chain(5, 1, (ROOT, ROOT))], ids=["row", "chain", "tree"])
def test_a_bias_has_the_type_of_what_it_is_added_to(reader: Span) -> None:
    """Whatever was asked for before: kernels of GPUs refuse any other."""
    num_rows = len(reader.rows)
    mask = mask_of([reader], num_rows, 16, num_rows)
    for dtype in (FLOAT, torch.bfloat16):
        assert mask.bias(None, 1, dtype, CPU).dtype is dtype


def test_rows_that_are_cut_into_tiles_stay_in_order() -> None:
    whole, tiled = (mask_of([chain(5, 8)], 8, 16, tile) for tile in (8, 4))
    assert tiled.shape == (2, 4, 16)
    assert torch.equal(tiled.bias(None, 2, FLOAT, CPU).view(16, 16), whole.bias(None, 2, FLOAT, CPU).view(16, 16))
