"""Lookahead decoding: n-grams out of the target's own answers, with no draft, no training and no text to copy from.

A window of guessed text hangs below the root. Each round the target says what comes after each place of it (one Jacobi
step for all places at once), in the pass that verifies the block anyway. Its last answers are a row of n-grams, of
which those that begin with the last committed token are guessed. Knows committed tokens and answers. Source: Fu et al.
2024 (arXiv 2402.02057), section 3; what is done otherwise here: docs/adr/0042.

The window has W columns and N - 1 levels, one for each of the last rounds. Level 0 is a chain below the root, which is
itself its column 0; the token of level k in column j stands below that of level k - 1 in the same column. So a column
is a text of its own behind the first level's tokens up to it, and the window is a tree (W = 3, N = 4; level, column):

    root ── 0,1 ── 0,2
     │       │      └── 1,2 ── 2,2 ── ?
     │       └── 1,1 ── 2,1 ── ?
     └── 1,0 ── 2,0 ── ?

Each "?" is an answer, and ends an n-gram of its column. After the round level 1 is the chain, level 2 is level 1, and
the answers are the last level.

With shared noise an answer is drawn with the noise of the place at which its node stands in this round, which is not
that of the place where its n-gram will be guessed: above temperature 0 an n-gram is what the target might say, and at
temperature 0 what it would. No guess can change the output, whichever place its noise was of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from core.speculation import NO_GUESSES, ROOT, Guesses, TokenTree
from orchestrator.guessers.continuations import tree_of

MAX_FIRST_TOKENS = 256
"""Of n-grams, that are kept apart; the one that has been extended or asked for least recently goes first."""
MAX_CONTINUATIONS = 8
"""Of one first token; the oldest goes first."""

Tokens = tuple[int, ...]


class NgramPool:
    """The n-grams that have been found, by their first token."""

    def __init__(self) -> None:
        self._by_first: OrderedDict[int, list[Tokens]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_first.values()))

    def add(self, first: int, rest: Tokens) -> None:
        """One more; what was found before is the latest again."""
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
        """What followed this token, the latest first."""
        found = self._by_first.get(first)
        if found is None:
            return []
        self._by_first.move_to_end(first)
        return found[::-1]


class Lookahead:
    """An `Asker`: a window of questions, and guesses out of the pool of n-grams that their answers have made."""

    def __init__(self, max_depth: int, *, window: int, ngram: int) -> None:
        self._max_depth = max_depth
        self._window = window
        self._ngram = ngram
        self._levels: list[list[int]] = []
        """Tokens by column. Level 0 begins with column 1: its column 0 is the root. While there are fewer than
        N - 1 levels, each has a column more for each that is to come, since every round takes the first away."""
        self._root = ROOT
        """The root's token, when the questions were asked."""
        self._pool = NgramPool()

    # Guessing

    def propose(self, text: Sequence[int]) -> Guesses:
        found = self._pool.after(text[-1]) if text else []
        if not found:
            return NO_GUESSES
        return tree_of((rest[: self._max_depth] for rest in found), MAX_CONTINUATIONS * (self._ngram - 1))

    # Asking

    def questions(self, text: Sequence[int]) -> TokenTree:
        """The window. At first it is the chain alone, of tokens that the text ends in."""
        if not self._levels:
            self._levels = [self._first_level(text)]
        self._root = text[-1]
        trunk, *others = self._levels
        parents, ends = list(range(ROOT, len(trunk) - 1)), list(range(ROOT, len(trunk)))
        num = len(trunk)
        for level in others:
            parents += ends[: len(level)]
            ends = list(range(num, num + len(level)))
            num += len(level)
        return TokenTree(tuple(chain.from_iterable(self._levels)), tuple(parents))

    def _first_level(self, text: Sequence[int]) -> list[int]:
        num = self._window + self._ngram - 3
        tail = list(text[-num:])
        return tail + [tail[-1]] * (num - len(tail))

    def answered(self, samples: Sequence[int]) -> None:
        """What the target draws after the root and after each node of the last questions."""
        levels = self._levels
        is_filled = len(levels) == self._ngram - 1
        num_columns = len(levels[-1]) + (len(levels) == 1)
        answers = list(samples[-num_columns:])
        if is_filled:
            for first, *rest in zip((self._root, *levels[0]), *levels[1:], answers, strict=True):
                self._pool.add(first, tuple(rest))
            _, trunk, *others = (*levels, answers)
            self._levels = [trunk[1:], *others]
        else:
            self._levels = [level[1:] for level in (*levels, answers)]
