"""From logits to p, and from p to tokens, for a batch of rows on any device: the twin of `core.sampling`.

Knows sampling parameters, noise and torch; must not know models, caches or sessions. Rows that ask for no bias, penalty
or truncation do not pay for those of their batch that do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core import noise
from core.noise import Key, Purpose
from core.records import Sampling, SparseDistribution, TokenLogprobs
from core.sampling import TOP_P_SLACK

_NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits and all that its distribution depends on."""

    sampling: Sampling
    position: int
    """Index, in the whole sequence, of the token that this row draws."""
    tokens: Sequence[int]
    """All before `position`, guesses on the path to this row included; read only if `sampling.has_penalties`."""
    prompt_len: int

    @property
    def num_output(self) -> int:
        return self.position - self.prompt_len


def bad_rows(logits: Tensor) -> Tensor:
    """Rows [R] that give no distribution: a NaN or +inf among the logits [R, V], or none finite. Ask first."""
    return ~logits.amax(dim=-1).isfinite()


def process(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p [R, V] in float32, by the steps of `core.sampling.log_probs`; `logits` [R, V] are left as they are."""
    logits = _penalised(_biased(logits.float(), rows), rows)
    is_greedy = [row.sampling.is_greedy for row in rows]
    if all(is_greedy):
        return _one_hot(logits)
    log_p = _min_p(_top_p(_top_k(_tempered(logits, rows), rows), rows), rows).log_softmax(dim=-1)
    if any(is_greedy):
        log_p = torch.where(_column(is_greedy, logits.device), _one_hot(logits), log_p)
    return log_p


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


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
        for token_id in row.sampling.suppressed_ids
        if 0 <= token_id < vocab_size
    ]
    if biases:
        index, ids, values = (torch.tensor(part, device=logits.device) for part in zip(*biases, strict=True))
        logits = logits.index_put((index, ids), values.float(), accumulate=True)
    if suppressed:
        index, ids = torch.tensor(suppressed, device=logits.device).T
        logits = logits.index_put((index, ids), logits.new_tensor(_NEVER))
    return logits


def _penalised(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    chosen = [index for index, row in enumerate(rows) if row.sampling.has_penalties]
    if not chosen:
        return logits
    index = torch.tensor(chosen, device=logits.device)
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
    ids = torch.tensor([token for tokens in token_lists for token in tokens], dtype=torch.int64, device=like.device)
    lengths = torch.tensor([len(tokens) for tokens in token_lists], device=like.device)
    index = torch.arange(len(token_lists), device=like.device).repeat_interleave(lengths)
    return torch.zeros_like(like).index_put((index, ids), like.new_ones(()), accumulate=True)


def _one_hot(logits: Tensor) -> Tensor:
    """log p of greedy decoding; `argmax` takes the lowest id of several."""
    return torch.full_like(logits, _NEVER).scatter(1, logits.argmax(dim=-1, keepdim=True), 0.0)


def _tempered(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits over temperature, the largest of each row 0, so that no temperature overflows."""
    temperatures = _column([row.sampling.temperature or 1.0 for row in rows], logits.device)
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperatures


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
    index = torch.tensor(chosen, device=logits.device)
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


def gumbel_rows(keys: Sequence[Key], vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise [R, V], equal bit for bit to `core.noise.gumbel_rows`; equal keys are computed once.

    On a CPU numpy does it in half the time.
    """
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    if device.type == "cpu":
        unique = torch.from_numpy(noise.gumbel_rows(list(places), vocab_size))
    else:
        unique = _gumbel_on_device(torch.tensor(list(places), device=device), vocab_size)
    return unique if len(places) == len(keys) else unique[[places[key] for key in keys]]


def _gumbel_on_device(keys: Tensor, vocab_size: int) -> Tensor:
    """Not to be compiled: a fused multiply-add would change the last bit."""
    blocks = torch.arange(-(-vocab_size // 4), device=keys.device)
    bits = torch.stack(noise.words(blocks, *keys[:, :, None].unbind(dim=1)), dim=-1)
    gumbel: Tensor = noise.gumbel_of(bits.flatten(1).double(), _frexp)
    return gumbel.float()[:, :vocab_size]


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    mantissa, exponent = torch.frexp(x)
    return mantissa, exponent.double()


def sample_coupled(log_p: Tensor, rows: Sequence[Row]) -> Tensor:
    """The token [R] that both sides draw in coupled mode: argmax of log p + shared noise, greedy rows without noise."""
    chosen = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if not chosen:
        return log_p.argmax(dim=-1)
    keys = [noise.key(rows[i].sampling.seed, rows[i].position, 0, Purpose.SHARED) for i in chosen]
    gumbel = gumbel_rows(keys, log_p.shape[1], log_p.device)
    if len(chosen) == len(rows):
        return (log_p + gumbel).argmax(dim=-1)
    index = torch.tensor(chosen, device=log_p.device)
    return log_p.index_add(0, index, gumbel).argmax(dim=-1)


def draft_sample(
    log_q: Tensor, rows: Sequence[Row], row_index: Sequence[int], top_tokens: int
) -> list[tuple[int, SparseDistribution]]:
    """A guess for each row, and the q that it was drawn from: `log_q` [R, V] cut to its likeliest tokens, renormalised.

    `row_index` is each guess's place in its block, from 0.
    """
    vocab_size = log_q.shape[1]
    log_probs, ids = log_q.topk(min(top_tokens, vocab_size))
    probs = log_probs.softmax(dim=-1)
    keys = [
        noise.key(row.sampling.seed, row.position, place, Purpose.DRAFT)
        for row, place in zip(rows, row_index, strict=True)
    ]
    gumbel = gumbel_rows(keys, vocab_size, log_q.device).gather(1, ids)
    picks = (probs.double().log().float() + gumbel).argmax(dim=-1).tolist()
    return [
        (token_ids[pick], _sparse(token_ids, row_probs))
        for pick, token_ids, row_probs in zip(picks, ids.tolist(), probs.tolist(), strict=True)
    ]


def _sparse(token_ids: list[int], probs: list[float]) -> SparseDistribution:
    num_positive = sum(prob > 0 for prob in probs)  # they come likeliest first
    return SparseDistribution(tuple(token_ids[:num_positive]), tuple(probs[:num_positive]))


def logprobs(raw_logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """For each row of `raw_logits` [N, V], the log probability of its token and the `num_top` likeliest."""
    log_p = raw_logits.float().log_softmax(dim=-1)
    chosen = log_p.gather(1, _column(token_ids, log_p.device)).flatten().tolist()
    values, ids = log_p.topk(min(num_top, log_p.shape[1]))
    return [
        TokenLogprobs(logprob, tuple(zip(top_ids, top_values, strict=True)))
        for logprob, top_ids, top_values in zip(chosen, ids.tolist(), values.tolist(), strict=True)
    ]
