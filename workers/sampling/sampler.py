"""From logits to p, and from p to tokens, for a batch of rows on any device; agrees with `core.exact.sampling`.

Knows sampling parameters, noise and torch; must not know models, caches or sessions. Rows without bias, penalties or
truncation do not pay for rows of the same batch that have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from core import noise
from core.exact import Q_MASS, TOP_P_SLACK
from core.noise import Purpose
from core.records import Sampling, TokenLogprobs
from workers.grammar import Mask
from workers.sampling.gumbel import gumbel_rows
from workers.sampling.masks import has_masks, masked
from workers.step import Readback, upload

_NEVER = -math.inf
GROUP_TOKENS = 16
FEW_SCORES = 1 << 17
"""Number of scores up to which `topk` alone is faster than choosing groups for it first, which takes a dozen kinds of
operators (adr/0063)."""


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


def process(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p [R, V] in float32, by the steps of `core.exact.sampling.log_probs`; does not change `logits` [R, V]."""
    return distribution(adjusted(logits, rows), rows)


def adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits [R, V] in float32 after masks, bias, penalties and grammars: the first half of `process`.

    Returns `logits` itself if it is float32 and no row has any of these.
    """
    logits = logits.float()
    if any(map(_is_adjusted, _samplings(rows))):
        logits = _penalised(_biased(masked(logits, rows), rows), rows)
    return _held_to_grammars(logits, rows)


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p [R, V] of adjusted logits, by temperature and truncation: the second half of `process`."""
    if all(sampling.is_greedy for sampling in _samplings(rows)):
        return _one_hot(logits)
    is_greedy = [row.sampling.is_greedy for row in rows]
    log_p = _min_p(_top_p(_top_k(_tempered(logits, rows), rows), rows), rows).log_softmax(dim=-1)
    if any(is_greedy):
        log_p = torch.where(_column(is_greedy, logits.device), _one_hot(logits), log_p)
    return log_p


def _samplings(rows: Sequence[Row]) -> Iterable[Sampling]:
    """The different sampling parameters of the rows: rows of one sequence share one object."""
    return {id(row.sampling): row.sampling for row in rows}.values()


def _is_adjusted(sampling: Sampling) -> bool:
    return bool(sampling.logit_bias or sampling.min_tokens or sampling.has_penalties or has_masks(sampling))


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    return upload(list(values), device, dtype)[:, None]


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
        logits = logits.index_put((index, ids), logits.new_full((), _NEVER))
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
        return logits.masked_fill(is_forbidden, _NEVER)
    index = upload([index for index, _ in chosen], logits.device)
    return logits.index_copy(0, index, logits[index].masked_fill(is_forbidden, _NEVER))


def _penalised(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    chosen = [index for index, row in enumerate(rows) if row.sampling.has_penalties]
    if not chosen:
        return logits
    index = upload(chosen, logits.device)
    subset, subset_rows = logits[index], [rows[i] for i in chosen]
    seen = _counts([row.tokens for row in subset_rows], subset) > 0
    counts = _counts([row.tokens[row.prompt_len :] for row in subset_rows], subset)
    repetition, frequency, presence = (
        _column([getattr(row.sampling, name) for row in subset_rows], logits.device)
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


def _one_hot(logits: Tensor) -> Tensor:
    """log p of greedy decoding: 0 at the argmax, -inf elsewhere."""
    return torch.full_like(logits, _NEVER).scatter(1, argmax(logits)[:, None], 0.0)


def _tempered(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits divided by the temperature, shifted so that the largest is 0 and no temperature overflows."""
    temperatures = _column([row.sampling.temperature or 1.0 for row in rows], logits.device)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures)


def _top_k(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    vocab_size = logits.shape[1]
    ks = [row.sampling.top_k if row.sampling.top_k < vocab_size else 0 for row in rows]
    if not any(ks):
        return logits
    k = _column(ks, logits.device)
    threshold = logits.topk(max(ks)).values.gather(1, (k - 1).clamp(min=0))
    return logits.masked_fill((logits < threshold) & (k > 0), _NEVER)


def _top_p(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    chosen = [index for index, row in enumerate(rows) if row.sampling.top_p < 1 and not row.sampling.is_greedy]
    if not chosen:
        return logits
    index = upload(chosen, logits.device)
    top_p = _column([rows[i].sampling.top_p for i in chosen], logits.device, torch.float64)
    subset = logits[index]
    ordered, order = subset.sort(dim=-1, descending=True, stable=True)
    probs = ordered.double().softmax(dim=-1)
    is_dropped = probs.cumsum(dim=-1) - probs >= top_p - TOP_P_SLACK
    is_dropped[:, 0] = False
    mask = torch.zeros_like(is_dropped).scatter(1, order, is_dropped)
    return logits.index_copy(0, index, subset.masked_fill(mask, _NEVER))


def _min_p(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    min_ps = [row.sampling.min_p for row in rows]
    if not any(min_ps):
        return logits
    threshold = _column([math.log(min_p) if min_p else _NEVER for min_p in min_ps], logits.device)
    return logits.masked_fill(logits < threshold, _NEVER)


def argmax(scores: Tensor) -> Tensor:
    """The id [R] of the largest score of each row [R, V], of several the lowest. On a CPU numpy takes a tenth of the
    time."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def perturbed(log_p: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p + shared noise [R, V], of which the largest is coupled sampling's token; greedy rows get no noise."""
    chosen = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if not chosen:
        return log_p
    keys = [noise.key(rows[i].sampling.seed, rows[i].position, 0, Purpose.SHARED) for i in chosen]
    gumbel = gumbel_rows(keys, log_p.shape[1], log_p.device)
    if len(chosen) == len(rows):
        return gumbel.add_(log_p)  # in place: a temporary of this size costs more than the addition
    return log_p.index_add(0, upload(chosen, log_p.device), gumbel)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids [R, count] of the `count` largest scores of each row, in descending order, as by `topk`.

    Of G strided groups of the vocabulary, the `count` groups with the largest maxima contain them all. Finding these
    groups takes a fraction of the time of `topk` over the vocabulary.
    """
    num_rows, vocab_size = scores.shape
    num_groups = vocab_size // GROUP_TOKENS
    if num_groups < count or scores.numel() <= FEW_SCORES:
        values, ids = scores.topk(min(count, vocab_size))
        return values, ids
    grouped = num_groups * GROUP_TOKENS
    ids = torch.arange(vocab_size, device=scores.device)
    groups = scores[:, :grouped].view(num_rows, GROUP_TOKENS, num_groups).amax(dim=1).topk(count).indices
    members = groups[:, None] + ids[:grouped:num_groups, None]  # [R, GROUP_TOKENS, count]
    candidates = torch.cat([members.flatten(1), ids[grouped:].expand(num_rows, -1)], dim=1)
    values, index = scores.gather(1, candidates).topk(count)
    return values, candidates.gather(1, index)


def cut(log_q: Tensor, top_tokens: int) -> tuple[Tensor, Tensor]:
    """q of the verifications that need it: the likeliest tokens, as few as hold `Q_MASS` and at most `top_tokens`,
    renormalised.

    Returns probabilities and token ids [R, M], likeliest first; what is cut off has probability 0.
    """
    log_probs, ids = largest(log_q, top_tokens)
    whole = log_probs.double().exp()
    is_beyond = whole.cumsum(dim=-1) - whole >= Q_MASS
    return log_probs.masked_fill(is_beyond, _NEVER).softmax(dim=-1), ids


def logprobs(
    raw_logits: Tensor, token_ids: Sequence[int], num_top: int, readback: Readback
) -> Callable[[], list[TokenLogprobs]]:
    """For each row of `raw_logits` [N, V]: the log probability of its token, and the `num_top` likeliest tokens.

    Call the result after the readback.
    """
    log_p = raw_logits.float().log_softmax(dim=-1)
    values, ids = log_p.topk(min(num_top, log_p.shape[1]))
    chosen = log_p.gather(1, _column(token_ids, log_p.device)).flatten()
    asked = [readback.ask(tensor) for tensor in (chosen, ids, values)]
    return lambda: [
        TokenLogprobs(logprob, tuple(zip(top_ids, top_values, strict=True)))
        for logprob, top_ids, top_values in zip(*(wanted.values for wanted in asked), strict=True)
    ]
