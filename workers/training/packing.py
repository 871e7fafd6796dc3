"""Packs texts into sequences of one length, with masks by which no text sees another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.training.texts import TrainingText

LOOK_AHEAD = 64
"""Number of waiting texts among which the one is looked for that fills a sequence best."""


class KeptStates(Protocol):
    """The target's states of the rows of each text."""

    def of(self, index: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Some texts one after the other; rows that are left are padding."""

    states: Tensor
    """The target's, if they are kept.  # bfloat16 [S, 4 hidden]; else [S, 0]"""
    token_ids: Tensor  # [S]
    guessed: Tensor
    """Tokens to be guessed.  # bool [S]"""
    texts: Tensor
    """Index of each row's text; -1 for padding.  # [S]"""
    positions: Tensor
    """Position of each row in its text.  # [S]"""

    def mask(self) -> Tensor:
        """Added to scores: earlier rows of the same text.  # [S, S]"""
        rows = torch.arange(len(self.texts))
        seen = (self.texts[:, None] == self.texts[None]) & (rows[:, None] >= rows[None])
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))

    def taught(self, by: int) -> Tensor:
        """Rows whose token `by` later belongs to the same text.  # bool [S]"""
        same = torch.zeros_like(self.guessed)
        same[:-by] = (self.texts[by:] == self.texts[:-by]) & (self.texts[by:] >= 0)
        return same

    def ahead(self, by: int) -> Tensor:
        """Rows of `taught` whose token `by` later is to be guessed.  # bool [S]"""
        return self.taught(by) & torch.roll(self.guessed, -by)


def packed(
    texts: Sequence[TrainingText], states: KeptStates | None, length: int, order: random.Random | None = None
) -> Iterator[PackedTexts]:
    """All texts once; each is cut to `length` tokens and stands in one sequence."""
    return (pack(texts, chosen, length, states) for chosen in sequences(texts, length, order))


def sequences(
    texts: Sequence[TrainingText], length: int, order: random.Random | None = None
) -> Iterator[Sequence[int]]:
    """The texts of each sequence, by index; in random order if `order` is given."""
    waiting = list(range(len(texts)))
    if order is not None:
        order.shuffle(waiting)
    while waiting:
        chosen, room = list[int](), length
        while waiting and (place := _largest(texts, waiting[:LOOK_AHEAD], room, is_first=not chosen)) is not None:
            chosen.append(waiting.pop(place))
            room -= min(length, len(texts[chosen[-1]].token_ids))
        yield chosen


def _largest(texts: Sequence[TrainingText], waiting: Sequence[int], room: int, *, is_first: bool) -> int | None:
    """Place of the longest text that fits; of the first text if the sequence is empty. None if no text fits."""
    if is_first:
        return 0
    sizes = {place: len(texts[index].token_ids) for place, index in enumerate(waiting)}
    fitting = [place for place, size in sizes.items() if size <= room]
    return max(fitting, key=sizes.__getitem__, default=None)


def pack(
    texts: Sequence[TrainingText], chosen: Sequence[int], length: int, states: KeptStates | None = None
) -> PackedTexts:
    """One sequence of the texts with these indices."""
    own = [texts[index] for index in chosen]
    sizes = [min(length, len(text.token_ids)) for text in own]
    left = length - sum(sizes)
    padding = torch.zeros(left, dtype=torch.long)
    rows = [states.of(index)[:length] for index in chosen] if states is not None else [torch.zeros(length - left, 0)]
    return PackedTexts(
        states=torch.cat([*rows, rows[0].new_zeros(left, rows[0].shape[1])]),
        token_ids=torch.cat([*(torch.tensor(text.token_ids[:length]) for text in own), padding]),
        guessed=torch.cat([*(text.guessed()[:length] for text in own), padding.bool()]),
        texts=torch.cat([*(torch.full((size,), number) for number, size in enumerate(sizes)), padding - 1]),
        positions=torch.cat([torch.arange(size) for size in (*sizes, left)]),
    )
