"""Controls: unigram and bigram frequencies of a corpus.

Knows the last token and the index. Source: Leviathan et al. 2023 (arXiv 2211.17192), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.speculation import Guesses, SparseDistribution
from orchestrator.guessers.corpus.index import CorpusIndex


class CorpusTable:
    """A unigram (order 1) or bigram (order 2) table of a corpus: a chain of its most frequent tokens, or a
    distribution."""

    def __init__(self, index: CorpusIndex, order: int, max_depth: int, max_distribution_tokens: int) -> None:
        self._index = index
        self._num_before = order - 1
        self._max_depth = max_depth
        self._max_distribution_tokens = max_distribution_tokens

    def propose(self, text: Sequence[int]) -> Guesses:
        tokens, chances = list[int](), list[float]()
        while len(tokens) < self._max_depth and (q := self.distribution(text, tokens)).token_ids:
            tokens.append(q.token_ids[0])
            chances.append(q.probs[0])
        return Guesses.chain(tokens, chances)

    def distribution(self, text: Sequence[int], drawn: Sequence[int]) -> SparseDistribution:
        before = drawn or text
        context = tuple(before[len(before) - self._num_before :])
        return self._index.distribution_after(context, self._max_distribution_tokens)
