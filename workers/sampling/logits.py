"""Logits after masks, bias, penalties and grammars, for a batch of rows: the first half of computing p.

Temperature, top-k, top-p and min-p follow in `workers.sampling.sampler`. Knows sampling parameters and torch; agrees
with `core.exact.sampling`. Must not know models, caches or sessions. A row pays only for the adjustments that it has,
whatever other rows of the batch have.

A function that takes `Uploads` adds its inputs to the upload and returns a function of logits, to be called after the
upload. So all inputs of a step are sent in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from core.records import Sampling
from workers.grammar import Mask
from workers.step import Uploads

NEVER = -math.inf
LogitsTransform: TypeAlias = Callable[[Tensor], Tensor]
"""A function of logits or log p [R, V]. Call it after the upload. It does not modify its argument, but returns it if
there is nothing to change."""


@dataclass(frozen=True, slots=True)
class Row:
    """Everything that the distribution of one row of logits depends on."""

    sampling: Sampling
    position: int
    """Index, in the whole sequence, of the token that is drawn from this row."""
    tokens: Sequence[int]
    """All tokens before `position`, including guesses on the path to this row. Read only if `sampling.reads_tokens`."""
    prompt_len: int
    """Length of the prompt in tokens. Neither this nor `position` is read if `is_argmax(sampling)`."""
    mask: Mask | None = None
    """Tokens that the grammar allows; None without a grammar."""
    lenience: float = 1.0
    """Lenience of the sequence's rule, in (0, 1]; 1 for rules without it."""

    @property
    def num_output(self) -> int:
        return self.position - self.prompt_len


def is_adjusted(row: Row) -> bool:
    """Whether masks, bias, penalties or a grammar change the row's logits."""
    return row.mask is not None or _is_adjusted(row.sampling)


def is_argmax(sampling: Sampling) -> bool:
    """Whether each token is the argmax of the raw logits: greedy, without masks, bias and penalties."""
    return sampling.is_greedy and not _is_adjusted(sampling)


def adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits [R, V] in float32 after masks, bias, penalties and grammars: the first half of `sampler.process`.

    Returns `logits` itself if it is float32 and no row has any of these.
    """
    return apply_now(prepare_adjustment, logits, rows)


def prepare_adjustment(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> LogitsTransform:
    """`adjusted` as a function to call after the upload."""
    steps: list[LogitsTransform] = [Tensor.float]
    if any(map(_is_adjusted, samplings(rows))):
        steps += [step(rows, vocab_size, uploads) for step in (_allowed, _without_bad_words, _biased, _suppressed)]
        steps.append(_penalised(rows, uploads))
    steps.append(_apply_grammar_masks(rows, uploads))
    return compose(steps)


def apply_now(
    prepare: Callable[[Sequence[Row], int, Uploads], LogitsTransform], values: Tensor, rows: Sequence[Row]
) -> Tensor:
    """Prepare a transform and apply it to `values` [R, V], with an upload of its own."""
    uploads = Uploads(values.device)
    transform = prepare(rows, values.shape[1], uploads)
    uploads.send()
    return transform(values)


def compose(steps: Sequence[LogitsTransform]) -> LogitsTransform:
    def transform(logits: Tensor) -> Tensor:
        for step in steps:
            logits = step(logits)
        return logits

    return transform


def identity(logits: Tensor) -> Tensor:
    return logits


def _is_adjusted(sampling: Sampling) -> bool:
    return bool(
        sampling.logit_bias
        or sampling.min_tokens
        or sampling.has_penalties
        or sampling.allowed_token_ids
        or sampling.bad_words
    )


def samplings(rows: Sequence[Row]) -> Iterable[Sampling]:
    """The distinct sampling parameters of the rows; rows of one sequence share an object."""
    return {id(row.sampling): row.sampling for row in rows}.values()


def column(values: Sequence[float], uploads: Uploads, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    """One value for each row.  # [R, 1]"""
    there = uploads.add(list(values), dtype)
    return lambda: there()[:, None]


def _allowed(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> LogitsTransform:
    return compose(
        [
            _only(
                uploads.add([i for i, row in enumerate(rows) if row.sampling.allowed_token_ids == allowed]),
                uploads.add([token for token in allowed if 0 <= token < vocab_size], torch.int64),
            )
            for allowed in {row.sampling.allowed_token_ids for row in rows} - {()}
        ]
    )


def _only(index: Callable[[], Tensor], ids: Callable[[], Tensor]) -> LogitsTransform:
    """Allow only these ids in these rows."""

    def transform(logits: Tensor) -> Tensor:
        subset = logits[index()]
        kept = torch.full_like(subset, NEVER).index_copy(1, ids(), subset[:, ids()])
        return logits.index_copy(0, index(), kept)

    return transform


def _without_bad_words(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> LogitsTransform:
    bad = (
        (index, token) for index, row in enumerate(rows) for token in row.sampling.bad_after(row.tokens, row.prompt_len)
    )
    return _without(bad, vocab_size, uploads)


def _without(places: Iterable[tuple[int, int]], vocab_size: int, uploads: Uploads) -> LogitsTransform:
    """Forbid these (row, token id) pairs."""
    wanted = [(row, token_id) for row, token_id in places if 0 <= token_id < vocab_size]
    if not wanted:
        return identity
    there = uploads.add(wanted)
    return lambda logits: logits.index_put(there().unbind(dim=1), logits.new_full((), NEVER))


def _biased(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> LogitsTransform:
    biases = [
        (index, token_id, bias)
        for index, row in enumerate(rows)
        for token_id, bias in row.sampling.logit_bias
        if 0 <= token_id < vocab_size
    ]
    if not biases:
        return identity
    index, ids, values = (uploads.add(part) for part in zip(*biases, strict=True))
    return lambda logits: logits.index_put((index(), ids()), values().float(), accumulate=True)


def _suppressed(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> LogitsTransform:
    suppressed = (
        (index, token_id)
        for index, row in enumerate(rows)
        if row.num_output < row.sampling.min_tokens
        for token_id in _suppressed_ids(row)
    )
    return _without(suppressed, vocab_size, uploads)


def _suppressed_ids(row: Row) -> Sequence[int]:
    """Ids that may not end the output yet; none if the grammar allows no other token."""
    ids = row.sampling.suppressed_ids
    if row.mask is None:
        return ids
    others = row.mask.copy()
    for token_id in ids:
        if token_id >> 3 < len(others):
            others[token_id >> 3] &= ~np.uint8(1 << (token_id & 7))
    return ids if others.any() else ()


def _apply_grammar_masks(rows: Sequence[Row], uploads: Uploads) -> LogitsTransform:
    """Set logits of forbidden tokens to -inf. A row whose mask allows nothing keeps no finite logit."""
    chosen = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
    if not chosen:
        return identity
    masks = uploads.add(np.stack([mask for _, mask in chosen]))  # [M, ceil(V / 8)]

    def masked(logits: Tensor) -> Tensor:
        bits = masks()[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
        is_forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
        return logits.masked_fill(is_forbidden, NEVER)

    return in_rows([index for index, _ in chosen], len(rows), masked, uploads)


def in_rows(chosen: Sequence[int], num_rows: int, transform: LogitsTransform, uploads: Uploads) -> LogitsTransform:
    """Limit a transform to the chosen rows."""
    if len(chosen) == num_rows:
        return transform
    index = uploads.add(list(chosen))
    return lambda logits: logits.index_copy(0, index(), transform(logits[index()]))


def _penalised(rows: Sequence[Row], uploads: Uploads) -> LogitsTransform:
    chosen = [index for index, row in enumerate(rows) if row.sampling.has_penalties]
    if not chosen:
        return identity
    subset_rows = [rows[i] for i in chosen]
    seen = _counts([row.tokens for row in subset_rows], uploads)
    counted = _counts([row.tokens[row.prompt_len :] for row in subset_rows], uploads)
    repetition, frequency, presence = (
        column([getattr(row.sampling, name) for row in subset_rows], uploads)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )

    def penalised(logits: Tensor) -> Tensor:
        repeated = torch.where(logits > 0, logits / repetition(), logits * repetition())
        counts = counted(logits)
        logits = torch.where(seen(logits) > 0, repeated, logits) - frequency() * counts
        return logits - presence() * counts.clamp(max=1)

    return in_rows(chosen, len(rows), penalised, uploads)


def _counts(token_lists: Sequence[Sequence[int]], uploads: Uploads) -> LogitsTransform:
    """Count each id in each row's list, in the shape and dtype of given logits [R, V]."""
    lengths = [len(tokens) for tokens in token_lists]
    ids = np.fromiter(chain.from_iterable(token_lists), np.int64, sum(lengths))
    there = uploads.add(np.stack([np.repeat(np.arange(len(lengths)), lengths), ids]))

    def counts(like: Tensor) -> Tensor:
        return torch.zeros_like(like).index_put(there().unbind(), like.new_ones(()), accumulate=True)

    return counts
