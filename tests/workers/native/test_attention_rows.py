"""Attention of native programs: right by torch's, and a row's bits are its own whatever rows are computed beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from workers.native.attention.rows import ROWS, SPARE, attend, num_scratch, store
from workers.native.attention.tiles import STRETCH
from workers.native.vectors import HAS_PAIRS

BLOCK_TOKENS = 16
ROOM = 1024
"""Tokens that there is scratch memory for."""


@dataclass(frozen=True)
class Case:
    """Heads, widths and kind of a layer."""

    num_heads: int = 6
    group: int = 3
    """Heads that read the same keys."""
    key_width: int = 64
    value_width: int = 64
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    is_short: bool = True


CASES = {
    "llama": Case(),
    "one head a key": Case(4, 1),
    "all heads one key": Case(5, 5),
    "narrow": Case(4, 2, 8, 8),
    "odd widths": Case(4, 2, 80, 48),
    "wider keys": Case(2, 1, 192, 128),
    "window": Case(window=21),
    "softcap and sinks": Case(softcap=5.0, has_sinks=True),
    "float32": Case(is_short=False),
    "float32, narrow": Case(6, 2, 24, 8, window=9, is_short=False),
}


class Layer:
    """A layer's KV of one sequence, whose blocks lie in any order, and queries of all of its tokens."""

    def __init__(self, case: Case, num_tokens: int) -> None:
        self.case, self.num_tokens, self.left_offset = case, num_tokens, 0
        torch.manual_seed(num_tokens)
        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        self.blocks = torch.randperm(num_blocks + 3)[:num_blocks].numpy().astype(np.int64)
        self.num_kv_heads = case.num_heads // case.group
        rounded = lambda numbers: numbers.bfloat16().float() if case.is_short else numbers  # noqa: E731
        self.queries = rounded(torch.randn(num_tokens, case.num_heads, case.key_width))
        self.keys = rounded(torch.randn(num_tokens, self.num_kv_heads, case.key_width))
        self.values = rounded(torch.randn(num_tokens, self.num_kv_heads, case.value_width))
        self.sinks = torch.randn(case.num_heads)
        slots = (num_blocks + 3) * BLOCK_TOKENS
        dtype = torch.bfloat16 if case.is_short else torch.float32
        self.key_cache = torch.full((slots, self.num_kv_heads * case.key_width), torch.nan, dtype=dtype)
        self.value_cache = torch.full((slots, self.num_kv_heads * case.value_width), torch.nan, dtype=dtype)
        for token in range(num_tokens):
            self.key_cache[self.slot(token)] = self.keys[token].reshape(-1).to(dtype)
            self.value_cache[self.slot(token)] = self.values[token].reshape(-1).to(dtype)

    def slot(self, token: int) -> int:
        return int(self.blocks[token // BLOCK_TOKENS]) * BLOCK_TOKENS + token % BLOCK_TOKENS

    def attended(
        self, tokens: list[int], paths: dict[int, list[int]] | None = None, num_threads: int = 1
    ) -> np.ndarray:
        """Outputs of these tokens' queries, as rows of one step. A token with a path reads no others than it names:
        a number of tokens from the first one on, then single tokens.  # [tokens, heads, value_width]"""
        case, count = self.case, len(tokens)
        reads, nodes = [], []
        for token in tokens:
            if paths and token in paths:
                shared, *single = paths[token]
                reads.append((0, shared, len(nodes), len(single), BLOCK_TOKENS))
                nodes += map(self.slot, single)
            else:
                reads.append((0, token + 1, 0, 0, BLOCK_TOKENS))
        query_width, out_width = case.num_heads * case.key_width, case.num_heads * case.value_width
        memory = np.zeros(len(self.sinks) + count * (query_width + out_width), np.float32)
        memory[: len(self.sinks)] = self.sinks
        base = len(self.sinks)
        memory[base : base + count * query_width] = self.queries[tokens].reshape(-1)
        code = np.zeros(22, np.int64)
        code[0:2] = 0, query_width
        code[6:8] = query_width, out_width
        code[8:10] = self.key_cache.data_ptr(), self.value_cache.data_ptr()
        code[10:12] = self.num_kv_heads * case.key_width, self.num_kv_heads * case.value_width
        code[12:14] = case.window, case.is_short
        code[14:18] = case.num_heads, case.group, case.key_width, case.value_width
        code[18:20] = np.array([case.key_width**-0.5, case.softcap], np.float32).view(np.uint32)
        code[20:22] = case.has_sinks, 0
        for thread in range(num_threads):
            offsets = np.full(2 * (ROOM + SPARE), self.left_offset, np.int64)
            scratch = np.full(num_scratch(ROOM, case.key_width, case.value_width), np.nan, np.float32)
            attend(
                code, memory, base, count, thread, num_threads, np.array(reads, np.int64), self.blocks,
                np.array(nodes, np.int64), offsets, scratch,
            )  # fmt: skip
        return memory[base + count * query_width :].reshape(count, case.num_heads, case.value_width)

    def expected(self, token: int, seen: list[int]) -> torch.Tensor:
        """The formula in float32, over the tokens that are seen."""
        case = self.case
        seen = seen[-case.window :] if case.window else seen
        keys, values = (each[seen].repeat_interleave(case.group, 1) for each in (self.keys, self.values))
        scores = torch.einsum("hd,thd->ht", self.queries[token], keys) * case.key_width**-0.5
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if case.has_sinks:
            scores = torch.cat([scores, self.sinks[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(seen)]
        return torch.einsum("ht,thd->hd", weights, values)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("num_tokens", [1, 2, 37, STRETCH + 30])
def test_outputs_are_those_of_the_formula(case: Case, num_tokens: int) -> None:
    layer = Layer(case, num_tokens)
    tokens = [*range(num_tokens)]
    found = layer.attended(tokens)
    want = torch.stack([layer.expected(token, [*range(token + 1)]) for token in tokens])
    tolerance = 0.02 if case.is_short else 2e-5
    torch.testing.assert_close(torch.tensor(found), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits_of_a_row_are_its_own(case: Case) -> None:
    layer = Layer(case, STRETCH + 2 * ROWS + 5)
    tokens = [*range(layer.num_tokens)]
    alone = np.concatenate([layer.attended([token]) for token in tokens])
    for start, num_threads in ((0, 1), (0, 2), (0, 3), (3, 1), (STRETCH - 1, 2)):
        together = layer.attended(tokens[start:], num_threads=num_threads)
        assert np.array_equal(together, alone[start:]), (start, num_threads)


@pytest.mark.parametrize("case", [CASES["llama"], CASES["float32"], CASES["all heads one key"]])
def test_a_later_row_that_is_no_number_spoils_no_earlier_one(case: Case) -> None:
    layer = Layer(case, 24)
    layer.value_cache[layer.slot(23)] = torch.inf
    layer.key_cache[layer.slot(22)] = torch.nan
    found = layer.attended([*range(24)])
    assert np.isfinite(found[:22]).all()
    assert np.array_equal(found[:22], np.concatenate([layer.attended([token]) for token in range(22)]))
    assert not np.isfinite(found[23]).any()


def test_nothing_is_read_by_the_offsets_of_another_layer() -> None:
    """Lists keep what a wider layer, or a longer sequence, has left: an address beyond the cache ends the process."""
    layer = Layer(CASES["llama"], 37)
    alone = layer.attended([36])
    layer.left_offset = 1 << 45
    assert np.array_equal(layer.attended([36]), alone)


@pytest.mark.parametrize("case", [CASES["llama"], replace(CASES["llama"], window=9)], ids=["llama", "window"])
def test_rows_of_a_tree_read_their_own_branch(case: Case) -> None:
    layer = Layer(case, 40)
    paths = {36: [36, 36], 37: [36, 36, 37], 38: [36, 38], 39: [36, 36, 37, 39]}
    rows = [34, 35, *paths]
    found = layer.attended(rows, paths)
    for row, token in enumerate(rows):
        shared, *single = paths.get(token, [token + 1])
        want = layer.expected(token, [*range(shared), *single])
        torch.testing.assert_close(torch.tensor(found[row]), want, atol=0.02, rtol=0.02)
    alone = np.concatenate([layer.attended([row], paths) for row in rows])
    assert np.array_equal(found, alone)


def test_a_path_as_a_chain_has_the_bits_of_the_chain() -> None:
    layer = Layer(CASES["llama"], 40)
    chain, path = layer.attended([39]), layer.attended([39], {39: [30, *range(30, 40)]})
    assert np.array_equal(chain, path)


@pytest.mark.skipif(not HAS_PAIRS, reason="the processor multiplies no pairs")
def test_keys_and_values_are_rounded_as_they_are_stored() -> None:
    code, memory = np.zeros(22, np.int64), np.zeros(16, np.float32)
    memory[:] = np.linspace(0.1, 1.7, 16)
    stored = [torch.zeros(2, 8, dtype=torch.bfloat16) for _ in range(2)]
    code[2:6] = 0, 8, 8, 8
    code[8:14] = *(each.data_ptr() for each in stored), 8, 8, 0, 1
    store(code, memory, 0, 1, 0, 1, np.array([1], np.int64))
    assert torch.equal(torch.cat([each[1] for each in stored]), torch.tensor(memory).bfloat16())
