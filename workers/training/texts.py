"""Texts to train on, as token ids; which tokens a draft's vocabulary has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HELD_OUT = 20
"""Each of this number of texts is left out of the training, and measured afterwards."""


@dataclass(frozen=True, slots=True)
class TrainingText:
    """A conversation or a text, and which of its tokens are to be guessed."""

    token_ids: list[int]
    spans: list[tuple[int, int]]
    """Places of the target's own tokens: the first, and one after the last."""
    kind: str = ""
    temperature: float = 0.0
    """Temperature at which the target drew them."""

    def guessed(self) -> Tensor:
        """# bool [tokens]"""
        guessed = torch.zeros(len(self.token_ids), dtype=torch.bool)
        for first, end in self.spans:
            guessed[first:end] = True
        return guessed


def held_out(texts: Sequence[TrainingText]) -> list[TrainingText]:
    return list(texts[::HELD_OUT])


def trained(texts: Sequence[TrainingText]) -> list[TrainingText]:
    return [text for index, text in enumerate(texts) if index % HELD_OUT]


def by_kind(texts: Iterable[TrainingText]) -> dict[tuple[str, float], list[TrainingText]]:
    """The texts of each kind and temperature, in order of these."""
    groups: dict[tuple[str, float], list[TrainingText]] = {}
    for text in texts:
        groups.setdefault((text.kind, text.temperature), []).append(text)
    return dict(sorted(groups.items()))


def choose_vocabulary(texts: Iterable[TrainingText], num_tokens: int) -> list[int]:
    """The tokens that are guessed most often, in ascending order; the lowest ids fill up."""
    counts = Counter[int]()
    for text in texts:
        for first, end in text.spans:
            counts.update(text.token_ids[first:end])
    chosen = dict.fromkeys(token for token, _ in counts.most_common(num_tokens))
    spare = (token for token in range(num_tokens) if token not in chosen)
    return sorted([*chosen, *(next(spare) for _ in range(num_tokens - len(chosen)))])
