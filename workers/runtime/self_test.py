"""Steps of tokens that mean nothing, which are run at start in two ways to see whether the logits agree.

Knows how a step is asked for; must not know models, nor which ways there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat, starmap

import torch
from torch import Tensor

from core.speculation import EMPTY_BLOCK, ROOT, TokenTree
from workers.step import KVCache, SequenceKV, StepRows

TRIED_ROWS = (1, 2, 1, 3, 1, 4, 1, *range(5, 23), 31, 64, 129, *[1] * 24)
"""A step of each of these sizes, one after the other. Single rows are what plain decoding is made of, and there are
many of them: where results are rounded to bfloat16, another order of sums shows in a few rows only. The many come last,
so that they take no room from other sizes where there is little."""
_ROOT = (0,)
_TREE = TokenTree((0, 1, 2, 0, 1), (ROOT, ROOT, 0, 1, 1))
TRIED_TOGETHER = (
    (EMPTY_BLOCK, EMPTY_BLOCK, EMPTY_BLOCK),
    (_TREE,),
    (EMPTY_BLOCK, TokenTree.chain((2, 0, 1)), _TREE),
    (TokenTree.chain((1, 2, 0, 1, 2, 0, 1, 2)), EMPTY_BLOCK),
)
"""Steps of several sequences, or of trees: what is below the last token of each."""
TOKENS_ABOVE = 5
"""Of KV, for the first of several sequences; twice as many for the second, and so on."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What has room is tried: a small engine may have none for the larger steps."""

    forward: Callable[[Sequence[StepRows]], Tensor]
    """Answers logits [rows, vocab]."""
    cache: KVCache
    max_rows: int
    """Of one step, and of one sequence."""
    vocab_size: int

    def logits(self) -> Tensor:
        """Of everything that is tried.  # [rows, vocab]"""
        return torch.cat([self.in_steps(), *self.together()])

    def has_equal_bits(self) -> bool:
        """Whether rows have the same bits however many there are to a step, and whatever else is in it."""
        pairs = zip(self.together(), self.apart(), strict=True)
        return torch.equal(self.at_once(), self.in_steps()) and all(starmap(torch.equal, pairs))

    def at_once(self) -> Tensor:
        """Of the rows of `in_steps`, in one step.  # [rows, vocab]"""
        return self._taken([sum(self._sizes())])

    def in_steps(self) -> Tensor:
        """Of one sequence, in steps of TRIED_ROWS.  # [rows, vocab]"""
        return self._taken(self._sizes())

    def together(self) -> list[Tensor]:
        """Of each of TRIED_TOGETHER, in one step.  # [rows, vocab]"""
        return self._of_each(lambda kvs, trees: self.forward([*map(StepRows, kvs, repeat(_ROOT), trees)]))

    def apart(self) -> list[Tensor]:
        """Of the same rows, each with nothing beside it but the chain that it ends.  # [rows, vocab]"""
        return self._of_each(lambda kvs, trees: torch.cat([*map(self._node_by_node, kvs, trees)]))

    def _sizes(self) -> list[int]:
        sizes: list[int] = []
        for size in TRIED_ROWS:
            if sum(sizes) + size <= self.max_rows:
                sizes.append(size)
        return sizes

    def _taken(self, sizes: Sequence[int]) -> Tensor:
        rest = [row * row % self.vocab_size for row in range(sum(sizes))]
        logits = []
        with self._sequences(1) as [kv]:
            for size in sizes:
                logits.append(self.forward([StepRows(kv, rest[:1], TokenTree.chain(rest[1:size]))]))
                del rest[:size]
        return torch.cat(logits)

    def _of_each(self, logits_of: Callable[[list[SequenceKV], Sequence[TokenTree]], Tensor]) -> list[Tensor]:
        """Of each of TRIED_TOGETHER that there is room for, with what is above it in place."""
        logits = []
        for trees in TRIED_TOGETHER:
            num_above = [TOKENS_ABOVE * (1 + place) for place in range(len(trees))]
            if not self._has_room(num_above, trees):
                continue
            with self._sequences(len(trees)) as kvs:
                for kv, count in zip(kvs, num_above, strict=True):
                    self.forward([StepRows(kv, [token % self.vocab_size for token in range(count)])])
                logits.append(logits_of(kvs, trees))
        return logits

    def _node_by_node(self, kv: SequenceKV, tree: TokenTree) -> Tensor:
        num_above = kv.num_tokens
        logits = []
        for path in ((), *(_path_to(node, tree) for node in range(len(tree)))):
            logits.append(self.forward([StepRows(kv, _ROOT, TokenTree.chain(path))])[-1:])
            self.cache.truncate(kv, num_above)
        return torch.cat(logits)

    def _has_room(self, num_above: Sequence[int], trees: Sequence[TokenTree]) -> bool:
        lengths = [count + 1 + len(tree) for count, tree in zip(num_above, trees, strict=True)]
        num_rows = sum(1 + len(tree) for tree in trees)
        num_blocks = sum(map(self.cache.num_blocks_for, lengths))
        return max(num_rows, *lengths) <= self.max_rows and num_blocks <= self.cache.num_free_blocks

    @contextmanager
    def _sequences(self, count: int) -> Iterator[list[SequenceKV]]:
        kvs = [self.cache.new_sequence() for _ in range(count)]
        try:
            yield kvs
        finally:
            for kv in kvs:
                self.cache.free(kv)


def _path_to(node: int, tree: TokenTree) -> tuple[int, ...]:
    """Tokens from below the root down to `node`."""
    above = _path_to(tree.parents[node], tree) if tree.parents[node] != ROOT else ()
    return (*above, tree.tokens[node])
