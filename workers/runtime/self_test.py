"""Self-tests at start: steps of arbitrary tokens, whose logits must agree between backends or between batches.

Knows how a runtime is called. Must not know models or backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat, starmap

import torch
from torch import Tensor

from core.speculation import EMPTY_BLOCK, ROOT, TokenTree
from workers.step import KVCache, SequenceKV, StepRows

STEP_SIZES = (1, 2, 1, 3, 1, 4, 1, *range(5, 23), 31, 64, 129, *[1] * 24)
"""Rows of each step of one sequence. Many are single rows, as in plain decoding: after rounding to bfloat16, another
order of summation shows in few rows only. Most single rows come last, so that a small engine has room for the other
sizes."""
_ROOT = (0,)
TREE = TokenTree((0, 1, 2, 0, 1), (ROOT, ROOT, 0, 1, 1))
BATCHES = (
    (EMPTY_BLOCK, EMPTY_BLOCK, EMPTY_BLOCK),
    (TREE,),
    (EMPTY_BLOCK, TokenTree.chain((2, 0, 1)), TREE),
    (TokenTree.chain((1, 2, 0, 1, 2, 0, 1, 2)), EMPTY_BLOCK),
)
"""Steps of several sequences, or of trees: the nodes below the last token of each sequence."""
BRIEF_ROWS = 24
"""Limit on a sequence's rows in a brief self-test, which checks shapes only: steps of 1 to 6 rows, and all BATCHES."""
PREFIX_TOKENS = 5
"""Prefix length of a batch's first sequence; the second has twice as many tokens, and so on."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Runs the steps of a self-test, except those that the engine has no room for."""

    forward: Callable[[Sequence[StepRows]], Tensor]
    """Returns logits [rows, vocab]."""
    cache: KVCache
    max_rows: int
    """Limit on the rows of one step, and of one sequence."""
    vocab_size: int

    def brief(self) -> SelfTest:
        """The same test with fewer steps, for a backend of the same operators, where only shapes can be wrong."""
        return replace(self, max_rows=min(self.max_rows, BRIEF_ROWS))

    def logits(self) -> Tensor:
        """Logits of all steps.  # [rows, vocab]"""
        return torch.cat([self.in_steps(), *self.together()])

    def is_batch_invariant(self) -> bool:
        """Whether a row's bits are independent of the number of rows in its step and of other sequences."""
        pairs = zip(self.together(), self.apart(), strict=True)
        return torch.equal(self.in_one_step(), self.in_steps()) and all(starmap(torch.equal, pairs))

    def noise(self) -> float:
        """How much a sequence's logits change with the number of rows in a step, relative to a row's norm."""
        return largest_error(self.in_one_step(), self.in_steps())

    def in_one_step(self) -> Tensor:
        """Logits of the rows of `in_steps`, computed in one step.  # [rows, vocab]"""
        return self._chain_logits([sum(self._sizes())])

    def in_steps(self) -> Tensor:
        """Logits of one sequence, computed in steps of STEP_SIZES.  # [rows, vocab]"""
        return self._chain_logits(self._sizes())

    def together(self) -> list[Tensor]:
        """Logits of each of BATCHES, computed in one step.  # [rows, vocab]"""
        return self._batch_logits(lambda kvs, trees: self.forward([*map(StepRows, kvs, repeat(_ROOT), trees)]))

    def apart(self) -> list[Tensor]:
        """Logits of the same rows, each computed in a step of its path alone.  # [rows, vocab]"""
        return self._batch_logits(lambda kvs, trees: torch.cat([*map(self._node_by_node, kvs, trees)]))

    def _sizes(self) -> list[int]:
        sizes: list[int] = []
        for size in STEP_SIZES:
            if sum(sizes) + size <= self.max_rows:
                sizes.append(size)
        return sizes

    def _chain_logits(self, sizes: Sequence[int]) -> Tensor:
        rest = [row * row % self.vocab_size for row in range(sum(sizes))]
        logits = []
        with self._sequences(1) as [kv]:
            for size in sizes:
                logits.append(self.forward([StepRows(kv, rest[:1], TokenTree.chain(rest[1:size]))]))
                del rest[:size]
        return torch.cat(logits)

    def _batch_logits(self, logits_of: Callable[[list[SequenceKV], Sequence[TokenTree]], Tensor]) -> list[Tensor]:
        """Logits of each of BATCHES that there is room for, after a prefix of each sequence."""
        logits = []
        for trees in BATCHES:
            num_prefix = [PREFIX_TOKENS * (1 + place) for place in range(len(trees))]
            if not self._has_room(num_prefix, trees):
                continue
            with self._sequences(len(trees)) as kvs:
                for kv, count in zip(kvs, num_prefix, strict=True):
                    self.forward([StepRows(kv, [token % self.vocab_size for token in range(count)])])
                logits.append(logits_of(kvs, trees))
        return logits

    def _node_by_node(self, kv: SequenceKV, tree: TokenTree) -> Tensor:
        num_prefix = kv.num_tokens
        logits = []
        for path in ((), *(_path_to(node, tree) for node in range(len(tree)))):
            logits.append(self.forward([StepRows(kv, _ROOT, TokenTree.chain(path))])[-1:])
            self.cache.truncate(kv, num_prefix)
        return torch.cat(logits)

    def _has_room(self, num_prefix: Sequence[int], trees: Sequence[TokenTree]) -> bool:
        lengths = [count + 1 + len(tree) for count, tree in zip(num_prefix, trees, strict=True)]
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


def largest_error(got: Tensor, want: Tensor) -> float:
    """The largest error of a row relative to its norm; NaN if there is any.  # [R, V], [R, V]"""
    errors = torch.linalg.vector_norm(got - want, dim=1) / torch.linalg.vector_norm(want, dim=1)
    return float(errors.max())


def _path_to(node: int, tree: TokenTree) -> tuple[int, ...]:
    """Tokens from below the root down to `node`."""
    above = _path_to(tree.parents[node], tree) if tree.parents[node] != ROOT else ()
    return (*above, tree.tokens[node])
