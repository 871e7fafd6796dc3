"""Masks of allowed token ids and bad words for a batch of rows, as in `core.exact.sampling`.

Knows sampling parameters and torch. The mask of a row depends on the tokens before it, guesses included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from core.records import Sampling
from workers.step import upload

_NEVER = -math.inf


class MaskedRow(Protocol):
    """The part of a `Row` on which its mask depends."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_len(self) -> int: ...


def has_masks(sampling: Sampling) -> bool:
    """Whether a request has allowed token ids or bad words."""
    return bool(sampling.allowed_token_ids or sampling.bad_words)


def masked(logits: Tensor, rows: Sequence[MaskedRow]) -> Tensor:
    """Logits [R, V] with -inf at ids that a row does not allow, and at ids that would complete one of its bad words."""
    return _without_bad_words(_allowed(logits, rows), rows)


def _allowed(logits: Tensor, rows: Sequence[MaskedRow]) -> Tensor:
    vocab_size = logits.shape[1]
    for allowed in {row.sampling.allowed_token_ids for row in rows} - {()}:
        index = upload([i for i, row in enumerate(rows) if row.sampling.allowed_token_ids == allowed], logits.device)
        ids = upload([token for token in allowed if 0 <= token < vocab_size], logits.device, torch.int64)
        subset = logits[index]
        kept = torch.full_like(subset, _NEVER).index_copy(1, ids, subset[:, ids])
        logits = logits.index_copy(0, index, kept)
    return logits


def _without_bad_words(logits: Tensor, rows: Sequence[MaskedRow]) -> Tensor:
    bad = [
        (index, token)
        for index, row in enumerate(rows)
        for token in row.sampling.bad_after(row.tokens, row.prompt_len)
        if 0 <= token < logits.shape[1]
    ]
    if not bad:
        return logits
    index, ids = upload(bad, logits.device).T
    return logits.index_put((index, ids), logits.new_full((), _NEVER))
