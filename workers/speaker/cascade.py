"""A vertical cascade: a lookup guesses for the draft as the draft guesses for the target.

One pass of the draft computes, beside the nodes that were chosen, the rows of a few tokens that once followed the same
words. Where the draft itself goes on with them, several nodes in a row come of one pass. Source: the vertical cascade
of Chen et al. 2023 (Cascade Speculative Drafting, arXiv 2312.11462), with a lookup as the last, model-free drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.sampling import Place
from workers.speaker.speaker import Said, Speaker
from workers.speaker.text_index import TextIndex


class Cascade:
    """A speaker that is asked about a few looked-up tokens, too."""

    def __init__(self, speaker: Speaker, num_tokens: int) -> None:
        self._speaker = speaker
        self.num_ahead = num_tokens

    def ahead(self, index: TextIndex, text: Sequence[int], path: Sequence[int], most: int) -> Sequence[int]:
        """What followed the last time that the text, or the text with `path`, ended as it does now."""
        index.follow(text)
        return index.after(text, path, most)

    def says(self, logits: Tensor, places: Sequence[Sequence[Place]]) -> Said:
        return self._speaker.says(logits, places)
