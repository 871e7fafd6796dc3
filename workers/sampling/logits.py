"""Logits after masks, bias, penalties and grammars: the first half of the way to p, for a batch of rows.

Temperature, top-k, top-p and min-p follow in `workers.sampling.sampler`. Knows sampling parameters and torch; agrees
with `core.exact.sampling`. Must not know models, caches or sessions. Rows without any of these do not pay for rows of
the same batch that have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from core.records import Sampling
from workers.grammar import Mask
from workers.step import upload

NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class Row:
    """Everything that the distribution of one row of logits depends on."""

    sampling: Sampling
    position: int
    """Index, in the whole sequence, of the token that is drawn from this row."""
    tokens: Sequence[int]
    """All tokens before `position`, guesses on the path to this row included; read only if `sampling.reads_tokens`."""
    prompt_len: int
    """Length of the prompt in tokens. This and `position` are not read if `is_argmax(sampling)`."""
    mask: Mask | None = None
    """Tokens that the grammar allows; None without a grammar."""
    lenience: float = 1.0
    """Lenience of the sequence's rule, in (0, 1]; 1 for rules without it."""

    @property
    def num_output(self) -> int:
        return self.position - self.prompt_len


def is_argmax(sampling: Sampling) -> bool:
    """Whether each token is simply the argmax of the logits: greedy, without masks, bias and penalties."""
    return sampling.is_greedy and not _is_adjusted(sampling)


def adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits [R, V] in float32 after masks, bias, penalties and grammars: the first half of `sampler.process`.

    Returns `logits` itself if it is float32 and no row has any of these.
    """
    logits = logits.float()
    if any(map(_is_adjusted, samplings(rows))):
        logits = _penalised(_biased(_without_bad_words(_allowed(logits, rows), rows), rows), rows)
    return _held_to_grammars(logits, rows)


def _is_adjusted(sampling: Sampling) -> bool:
    return bool(
        sampling.logit_bias
        or sampling.min_tokens
        or sampling.has_penalties
        or sampling.allowed_token_ids
        or sampling.bad_words
    )


def samplings(rows: Sequence[Row]) -> Iterable[Sampling]:
    """The different sampling parameters of the rows: rows of one sequence share one object."""
    return {id(row.sampling): row.sampling for row in rows}.values()


def column(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """One value for each row.  # [R, 1]"""
    return upload(list(values), device, dtype)[:, None]


def _allowed(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    vocab_size = logits.shape[1]
    for allowed in {row.sampling.allowed_token_ids for row in rows} - {()}:
        index = upload([i for i, row in enumerate(rows) if row.sampling.allowed_token_ids == allowed], logits.device)
        ids = upload([token for token in allowed if 0 <= token < vocab_size], logits.device, torch.int64)
        subset = logits[index]
        kept = torch.full_like(subset, NEVER).index_copy(1, ids, subset[:, ids])
        logits = logits.index_copy(0, index, kept)
    return logits


def _without_bad_words(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    bad = [
        (index, token)
        for index, row in enumerate(rows)
        for token in row.sampling.bad_after(row.tokens, row.prompt_len)
        if 0 <= token < logits.shape[1]
    ]
    if not bad:
        return logits
    index, ids = upload(bad, logits.device).T
    return logits.index_put((index, ids), logits.new_full((), NEVER))


def _biased(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    vocab_size = logits.shape[1]
    biases = [
        (index, token_id, bias)
        for index, row in enumerate(rows)
        for token_id, bias in row.sampling.logit_bias
        if 0 <= token_id < vocab_size
    ]
    suppressed = [
        (index, token_id)
        for index, row in enumerate(rows)
        if row.num_output < row.sampling.min_tokens
        for token_id in _suppressed(row)
        if 0 <= token_id < vocab_size
    ]
    if biases:
        index, ids, values = (upload(part, logits.device) for part in zip(*biases, strict=True))
        logits = logits.index_put((index, ids), values.float(), accumulate=True)
    if suppressed:
        index, ids = upload(suppressed, logits.device).T
        logits = logits.index_put((index, ids), logits.new_full((), NEVER))
    return logits


def _suppressed(row: Row) -> Sequence[int]:
    """Ids that may not end the output yet; none where the grammar allows nothing else."""
    ids = row.sampling.suppressed_ids
    if row.mask is None:
        return ids
    others = row.mask.copy()
    for token_id in ids:
        if token_id >> 3 < len(others):
            others[token_id >> 3] &= ~np.uint8(1 << (token_id & 7))
    return ids if others.any() else ()


def _held_to_grammars(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits with -inf where a grammar forbids the token; a row whose mask allows nothing has no finite one."""
    chosen = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
    if not chosen:
        return logits
    masks = upload(np.stack([mask for _, mask in chosen]), logits.device)  # [M, ceil(V / 8)]
    bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    is_forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    if len(chosen) == len(rows):
        return logits.masked_fill(is_forbidden, NEVER)
    index = upload([index for index, _ in chosen], logits.device)
    return logits.index_copy(0, index, logits[index].masked_fill(is_forbidden, NEVER))


def _penalised(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    chosen = [index for index, row in enumerate(rows) if row.sampling.has_penalties]
    if not chosen:
        return logits
    index = upload(chosen, logits.device)
    subset, subset_rows = logits[index], [rows[i] for i in chosen]
    seen = _counts([row.tokens for row in subset_rows], subset) > 0
    counts = _counts([row.tokens[row.prompt_len :] for row in subset_rows], subset)
    repetition, frequency, presence = (
        column([getattr(row.sampling, name) for row in subset_rows], logits.device)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    repeated = torch.where(subset > 0, subset / repetition, subset * repetition)
    subset = torch.where(seen, repeated, subset) - frequency * counts - presence * counts.clamp(max=1)
    return logits.index_copy(0, index, subset)


def _counts(token_lists: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """How often each row's list names each id, in the shape and dtype of `like` [R, V]."""
    lengths = [len(tokens) for tokens in token_lists]
    ids = np.fromiter(chain.from_iterable(token_lists), np.int64, sum(lengths))
    rows = np.repeat(np.arange(len(lengths)), lengths)
    index, ids_there = upload(np.stack([rows, ids]), like.device)
    return torch.zeros_like(like).index_put((index, ids_there), like.new_ones(()), accumulate=True)
