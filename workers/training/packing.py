"""Packs texts into sequences of one length, with masks by which no text sees another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.training.features import TargetStates
from workers.training.texts import TrainingText


@dataclass(frozen=True, slots=True)
class Packed:
    """Some texts one after the other; rows that are left are padding."""

    states: Tensor
    """The target's.  # bfloat16 [S, 4 hidden]"""
    token_ids: Tensor  # [S]
    guessed: Tensor
    """Tokens to be guessed.  # bool [S]"""
    texts: Tensor
    """Index of each row's text; -1 for padding.  # [S]"""
    positions: Tensor
    """Of each row in its text.  # [S]"""

    def mask(self) -> Tensor:
        """Added to scores: earlier rows of the same text.  # [S, S]"""
        rows = torch.arange(len(self.texts))
        seen = (self.texts[:, None] == self.texts[None]) & (rows[:, None] >= rows[None])
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))

    def ahead(self, by: int) -> Tensor:
        """Rows whose token `by` later is to be guessed and belongs to the same text.  # bool [S]"""
        same = torch.zeros_like(self.guessed)
        same[:-by] = self.guessed[by:] & (self.texts[by:] == self.texts[:-by])
        return same


def packed(
    texts: Sequence[TrainingText], states: TargetStates, length: int, order: random.Random | None = None
) -> Iterator[Packed]:
    """All texts once, in random order; each is cut to `length` tokens and stands in one sequence."""
    indices = list(range(len(texts)))
    if order is not None:
        order.shuffle(indices)
    chosen, size = list[int](), 0
    for index in indices:
        tokens = min(length, len(texts[index].token_ids))
        if size + tokens > length:
            yield _pack(texts, states, chosen, length)
            chosen, size = [], 0
        chosen.append(index)
        size += tokens
    if chosen:
        yield _pack(texts, states, chosen, length)


def _pack(texts: Sequence[TrainingText], states: TargetStates, chosen: Sequence[int], length: int) -> Packed:
    rows = [states.of(index)[:length] for index in chosen]
    width, sizes = rows[0].shape[1], [len(each) for each in rows]
    left = length - sum(sizes)
    return Packed(
        states=torch.cat([*rows, torch.zeros(left, width, dtype=rows[0].dtype)]),
        token_ids=torch.cat([*(torch.tensor(texts[index].token_ids[:length]) for index in chosen), torch.zeros(left, dtype=torch.long)]),
        guessed=torch.cat([*(texts[index].guessed()[:length] for index in chosen), torch.zeros(left, dtype=torch.bool)]),
        texts=torch.cat([*(torch.full((size,), number) for number, size in enumerate(sizes)), torch.full((left,), -1)]),
        positions=torch.cat([torch.arange(size) for size in (*sizes, left)]),
    )
