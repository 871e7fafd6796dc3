"""Lookahead decoding: n-grams from the target's own answers, with no draft, no training and no text to copy from.

A window of guessed text is verified below the root. Each round the target returns the token after each position of the
window (one Jacobi step for all positions at once), in the pass that verifies the block anyway. Its last answers
complete a row of n-grams. The n-grams that begin with the last committed token become guesses. Knows committed tokens
and answers. Source: Fu et al. 2024 (arXiv 2402.02057), section 3; differences: docs/adr/guessers.

The window has W columns and N - 1 levels, one for each of the last rounds. Level 0 is a chain whose column 0 is the
root. The token of level k in column j is the child of level k - 1 in the same column. Column j thus continues the
chain's first j tokens, and the window is a tree (W = 3, N = 4; nodes are level, column):

    root ── 0,1 ── 0,2
     │       │      └── 1,2 ── 2,2 ── ?
     │       └── 1,1 ── 2,1 ── ?
     └── 1,0 ── 2,0 ── ?

Each "?" is an answer, and ends an n-gram of its column. After the round level 1 becomes the chain, level 2 becomes
level 1, and the answers become the last level.

With shared noise an answer is drawn with the noise of its node's position in this round, not that of the position where
its n-gram will be guessed. Above temperature 0 the target may therefore draw another continuation there; at temperature
0 it would say the same. No guess can change the output, whichever noise it was drawn with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from core.speculation import NO_GUESSES, ROOT, Guesses, TokenTree
from orchestrator.guessers.continuations import tree_of

MAX_FIRST_TOKENS = 256
"""Maximum number of first tokens in the pool. The one extended or looked up least recently is dropped first."""
MAX_CONTINUATIONS = 8
"""Maximum number of n-grams per first token. The oldest is dropped first."""

Tokens = tuple[int, ...]


class NgramPool:
    """The n-grams found so far, by their first token."""

    def __init__(self) -> None:
        self._by_first: OrderedDict[int, list[Tokens]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def add(self, first: int, rest: Tokens) -> None:
        """Add an n-gram, or mark a known one as the latest."""
        found = self._by_first.get(first)
        if found is None:
            self._by_first[first] = [rest]
            if len(self._by_first) > MAX_FIRST_TOKENS:
                self._by_first.popitem(last=False)
            return
        if rest in found:
            found.remove(rest)
        found.append(rest)
        if len(found) > MAX_CONTINUATIONS:
            del found[0]
        self._by_first.move_to_end(first)

    def after(self, first: int) -> list[Tokens]:
        """Return the continuations of this token, the latest first."""
        found = self._by_first.get(first)
        if found is None:
            return []
        self._by_first.move_to_end(first)
        return found[::-1]


class Lookahead:
    """A `QuestioningGuesser`: asks about a window of nodes, and guesses from the pool of n-grams in the answers."""

    def __init__(self, max_depth: int, *, window: int, ngram: int) -> None:
        self._max_depth = max_depth
        self._window = window
        self._ngram = ngram
        self._levels: list[list[int]] = []
        """Tokens by level and column. Level 0 begins with column 1, since its column 0 is the root. Every round drops
        the first column, so a level starts with one extra column for each level that is still missing."""
        self._root = ROOT
        """Token of the root when the questions were asked."""
        self._pool = NgramPool()

    # Guessing

    def propose(self, text: Sequence[int]) -> Guesses:
        found = self._pool.after(text[-1]) if text else []
        if not found:
            return NO_GUESSES
        return tree_of((rest[: self._max_depth] for rest in found), MAX_CONTINUATIONS * (self._ngram - 1))

    # Asking

    def questions(self, text: Sequence[int]) -> TokenTree:
        """Return the window as a tree. The first window is a chain of the text's last tokens."""
        if not self._levels:
            self._levels = [self._first_level(text)]
        self._root = text[-1]
        trunk, *later_levels = self._levels
        parents, ends = list(range(ROOT, len(trunk) - 1)), list(range(ROOT, len(trunk)))
        num = len(trunk)
        for level in later_levels:
            parents += ends[: len(level)]
            ends = list(range(num, num + len(level)))
            num += len(level)
        return TokenTree(tuple(chain.from_iterable(self._levels)), tuple(parents))

    def _first_level(self, text: Sequence[int]) -> list[int]:
        num = self._window + self._ngram - 3
        tail = list(text[-num:])
        return tail + [tail[-1]] * (num - len(tail))

    def answered(self, samples: Sequence[int]) -> None:
        """Record the target's tokens after the root and after each node of the last questions."""
        levels = self._levels
        is_filled = len(levels) == self._ngram - 1
        num_columns = len(levels[-1]) + (len(levels) == 1)
        answers = list(samples[-num_columns:])
        if is_filled:
            for first, *rest in zip((self._root, *levels[0]), *levels[1:], answers, strict=True):
                self._pool.add(first, tuple(rest))
            _, trunk, *later_levels = (*levels, answers)
            self._levels = [trunk[1:], *later_levels]
        else:
            self._levels = [level[1:] for level in (*levels, answers)]
