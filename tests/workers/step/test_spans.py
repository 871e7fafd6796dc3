"""A span tells what its rows were when the step was flattened, whatever becomes of the sequence."""

from __future__ import annotations

import torch

from core.speculation import ROOT, TokenTree
from workers.step import KVCache, LayerShape, StepRows
from workers.step.kv_cache import SequenceKV
from workers.step.readers import Span
from workers.step.rows import flatten


def test_rows_and_slots_are_those_of_the_step_once_its_rows_are_counted() -> None:
    """They are computed once: a later look must not take the step's own rows for held ones."""
    cache = KVCache([LayerShape(1, 2, 2)], 4, 8, torch.float32, torch.device("cpu"))
    kv = cache.new_sequence()
    for num_held, tokens in ((0, [5, 6, 7]), (3, [8])):
        rows = StepRows(kv, tokens)
        cache.reserve(kv, num_held + rows.num_rows)
        (span,) = flatten([rows]).spans
        cache.extend(kv, rows.num_rows)
        assert (span.num_rows, span.num_kv) == (len(tokens), num_held + len(tokens))
        assert span.root == num_held + len(tokens) - 1
    cache.truncate(kv, 2)
    assert flatten([StepRows(kv, [9])]).spans[0].num_kv == 3


def test_cached_nodes_are_slots_and_no_rows() -> None:
    span = Span(SequenceKV(num_tokens=9), 0, 0, (ROOT, 0, 0), num_cached_nodes=2)
    assert (span.num_rows, span.num_kv, span.root) == (1, 10, 6)


def test_a_step_lists_the_rows_of_chains_and_trees_one_after_the_other() -> None:
    held = [SequenceKV(num_tokens=num_tokens) for num_tokens in (4, 0, 7)]
    tree = TokenTree((11, 12, 13), (ROOT, ROOT, 0))
    step = flatten(
        [StepRows(held[0], [1]), StepRows(held[1], [2, 3], wants_logits=False), StepRows(held[2], [4, 5], tree)]
    )
    assert step.ids == [1, 2, 3, 4, 5, 11, 12, 13]
    assert step.positions == [4, 0, 1, 7, 8, 9, 9, 10]
    assert step.wanted == [0, 4, 5, 6, 7]
    assert [(span.first_row, span.num_rows) for span in step.spans] == [(0, 1), (1, 2), (3, 5)]
