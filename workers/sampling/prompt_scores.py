"""Log probabilities of a prompt's own tokens, from the rows of its prefill.

Each row gives the probability of the token after it. A prefix adopted from the KV cache has no logits, so a scored
prompt is computed from its first token on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from core.records import TokenLogprobs
from workers.sampling import sampler
from workers.step import Readback, StepRows

SCORED_ROWS = 128
"""Largest number of prompt rows scored in one step. Each needs memory for two rows as wide as the vocabulary."""


class PromptScores:
    """Scores of one prompt, as far as it has been computed."""

    def __init__(self, num_top: int, prompt_len: int) -> None:
        self._num_top = num_top
        self._prompt_len = prompt_len
        self.found: list[TokenLogprobs] = []
        """One for each token of the prompt after the first."""

    @property
    def has_nan(self) -> bool:
        """Whether a score is NaN: the model gave no distribution for a token."""
        return any(math.isnan(each.logprob) for each in self.found)

    def restart(self) -> None:
        """Drop all scores, because the prompt is computed again from its first token."""
        self.found.clear()

    def read(
        self, logits: Tensor, first: int, following: Sequence[int], readback: Readback
    ) -> Callable[[], list[TokenLogprobs]]:
        """Scores of the tokens that follow positions `first`, `first` + 1, ..., up to the end of the prompt.

        Call the result after the readback.
        """
        count = max(0, min(len(following), self._prompt_len - 1 - first))
        if count == 0:
            return list
        return sampler.logprobs(logits[:count], following[:count], self._num_top, readback)


ScoredRows = tuple[StepRows, PromptScores | None, int, Sequence[int], bool]
"""Rows of a step, the scores of their prompt (or None), the position of the first row, the tokens after the rows, and
whether the rows end with the last pending token, whose logits are needed for sampling too."""


def store_scores(scored: Sequence[ScoredRows], logits: Tensor) -> list[int]:
    """Store the scores of prompt rows in their `PromptScores`. Returns the rows of `logits` [R, V] to sample from."""
    readback, kept, readers, start = Readback(), list[int](), [], 0
    for rows, scores, first, following, is_last in scored:
        stretch = range(start, start + rows.num_wanted)
        start += rows.num_wanted
        if scores is not None:
            readers.append((scores, scores.read(logits[stretch.start : start], first, following, readback)))
        if rows.wants_all:
            stretch = stretch[len(rows.tokens) - 1 :] if is_last else stretch[:0]
        kept += stretch
    readback.wait()
    for scores, read in readers:
        scores.found += read()
    return kept
