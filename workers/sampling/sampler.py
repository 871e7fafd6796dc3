"""From logits to p, and from p to tokens, for a batch of rows on any device; agrees with `core.exact.sampling`.

Knows sampling parameters, noise and torch; must not know models, caches or sessions. Rows without truncation do not pay
for rows of the same batch that have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core import noise
from core.exact import Q_MASS, TOP_P_SLACK
from core.noise import Purpose
from core.records import Sampling, TokenLogprobs
from workers.noise import gumbel_rows, largest_with_gumbel
from workers.sampling.logits import NEVER, Row, adjusted, column, samplings
from workers.step import Readback, upload

GROUP_TOKENS = 16
FEW_SCORES = 1 << 17
"""Number of scores up to which `topk` alone is faster than choosing groups for it first, which takes a dozen kinds of
operators (adr/0063)."""
FEW_KEPT = 1 << 10
"""Most often top-p keeps fewer tokens, so that no more are looked at."""


def process(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p [R, V] in float32, by the steps of `core.exact.sampling.log_probs`; does not change `logits` [R, V]."""
    return distribution(adjusted(logits, rows), rows)


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p [R, V] of adjusted logits, by temperature and truncation: the second half of `process`."""
    of_rows = samplings(rows)
    if all(sampling.is_greedy for sampling in of_rows):
        return _one_hot(logits)
    if logits.device.type == "cpu" and all(map(_is_softmax, of_rows)):
        return logits.log_softmax(dim=-1)  # which has the bits of what follows: it subtracts the largest, too
    is_greedy = [row.sampling.is_greedy for row in rows]
    log_p = _min_p(_top_p(_top_k(_tempered(logits, rows), rows), rows), rows).log_softmax(dim=-1)
    if any(is_greedy):
        log_p = torch.where(column(is_greedy, logits.device), _one_hot(logits), log_p)
    return log_p


def _one_hot(logits: Tensor) -> Tensor:
    """log p of greedy decoding: 0 at the argmax, -inf elsewhere."""
    return torch.full_like(logits, NEVER).scatter(1, argmax(logits)[:, None], 0.0)


def _is_softmax(sampling: Sampling) -> bool:
    """Whether p is the softmax of the logits as they are."""
    is_whole = not sampling.top_k and sampling.top_p == 1 and not sampling.min_p
    return sampling.temperature == 1 and is_whole


def _tempered(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits divided by the temperature, shifted so that the largest is 0 and no temperature overflows."""
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    is_one = logits.device.type == "cpu" and len(set(temperatures)) == 1  # a GPU multiplies by a number's reciprocal
    divisor = temperatures[0] if is_one else column(temperatures, logits.device)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(divisor)


def _top_k(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    vocab_size = logits.shape[1]
    ks = [row.sampling.top_k if row.sampling.top_k < vocab_size else 0 for row in rows]
    if not any(ks):
        return logits
    k = column(ks, logits.device)
    threshold = largest(logits, max(ks))[0].gather(1, (k - 1).clamp(min=0))
    return logits.masked_fill((logits < threshold) & (k > 0), NEVER)


def _top_p(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    chosen = [index for index, row in enumerate(rows) if row.sampling.top_p < 1 and not row.sampling.is_greedy]
    if not chosen:
        return logits
    beyond = _beyond_on_cpu if logits.device.type == "cpu" else _beyond
    top_p = column([rows[i].sampling.top_p for i in chosen], logits.device, torch.float64)
    if len(chosen) == len(rows):
        return logits.masked_fill(beyond(logits, top_p), NEVER)
    index = upload(chosen, logits.device)
    subset = logits[index]
    return logits.index_copy(0, index, subset.masked_fill(beyond(subset, top_p), NEVER))


def _beyond(logits: Tensor, top_p: Tensor) -> Tensor:
    """Where a token [R, V] is less likely than those that reach `top_p` [R, 1] together."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.double().softmax(dim=-1)
    is_dropped = probs.cumsum(dim=-1) - probs >= top_p - TOP_P_SLACK
    is_dropped[:, 0] = False
    return torch.zeros_like(is_dropped).scatter(1, order, is_dropped)


def _beyond_on_cpu(logits: Tensor, top_p: Tensor) -> Tensor:
    """The same by the least logit that is kept: numpy sorts numbers ten times as fast as tokens."""
    is_beyond = torch.zeros_like(logits, dtype=torch.bool)
    for row, least_mass, out in zip(logits.numpy(), top_p.flatten().tolist(), is_beyond.numpy(), strict=True):
        least, num_equals = _nucleus_end(np.sort(row)[::-1], least_mass - TOP_P_SLACK)
        np.less(row, least, out=out)
        out[np.flatnonzero(row == least)[num_equals:]] = True
    return is_beyond


def _nucleus_end(ordered: NDArray[np.float32], mass: float) -> tuple[np.float32, int]:
    """Of logits of which the largest is 0, in descending order: the last that is needed for `mass`, and how many of its
    equals, of which the lower ids come first.
    """
    masses = np.exp(ordered, dtype=np.float64)
    total = masses.sum()
    num_seen = num_kept = 0
    while num_kept == num_seen < len(ordered):
        num_seen = min(max(FEW_KEPT, 8 * num_seen), len(ordered))
        probs = masses[:num_seen] / total
        num_kept = max(1, int(np.searchsorted(np.cumsum(probs) - probs, mass)))
    least = ordered[num_kept - 1]
    return least, num_kept - int(np.count_nonzero(ordered[:num_kept] > least))


def _min_p(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    min_ps = [row.sampling.min_p for row in rows]
    if not any(min_ps):
        return logits
    threshold = column([math.log(min_p) if min_p else NEVER for min_p in min_ps], logits.device)
    return logits.masked_fill(logits < threshold, NEVER)


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
    keys = [_shared_key(rows[i]) for i in chosen]
    gumbel = gumbel_rows(keys, log_p.shape[1], log_p.device)
    if len(chosen) == len(rows):
        return gumbel.add_(log_p)  # in place: a temporary of this size costs more than the addition
    return log_p.index_add(0, upload(chosen, log_p.device), gumbel)


def drawn(log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Callable[[], list[int]]:
    """The token of each row by coupled sampling: the largest of `perturbed`. Call the result after the readback."""
    draw = _drawn_on_cpu if log_p.device.type == "cpu" else _drawn
    return draw(log_p, rows, readback)


def _drawn(log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Callable[[], list[int]]:
    argmax = readback.argmax(perturbed(log_p, rows))
    return lambda: argmax()[0]


def _drawn_on_cpu(log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Callable[[], list[int]]:
    """The same without the noise of tokens that it cannot make the largest."""
    if any(row.sampling.is_greedy for row in rows):
        return _drawn(log_p, rows, readback)
    token_ids = largest_with_gumbel(log_p.numpy(), [_shared_key(row) for row in rows])
    return lambda: token_ids


def _shared_key(row: Row) -> noise.Key:
    return noise.key(row.sampling.seed, row.position, 0, Purpose.SHARED)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids [R, count] of the `count` largest scores of each row, in descending order, as by `topk`.

    Of G strided groups of the vocabulary, the `count` groups with the largest maxima contain them all. To find these
    groups takes a fraction of the time of `topk` over the vocabulary, unless they are a large part of all.
    """
    num_rows, vocab_size = scores.shape
    num_groups = vocab_size // GROUP_TOKENS
    if num_groups < 4 * count or scores.numel() <= FEW_SCORES:
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
    return log_probs.masked_fill(is_beyond, NEVER).softmax(dim=-1), ids


def logprobs(
    raw_logits: Tensor, token_ids: Sequence[int], num_top: int, readback: Readback
) -> Callable[[], list[TokenLogprobs]]:
    """For each row of `raw_logits` [N, V]: the log probability of its token, and the `num_top` likeliest tokens.

    Call the result after the readback.
    """
    log_p = raw_logits.float().log_softmax(dim=-1)
    values, ids = log_p.topk(min(num_top, log_p.shape[1]))
    chosen = log_p.gather(1, column(token_ids, log_p.device)).flatten()
    asked = [readback.ask(tensor) for tensor in (chosen, ids, values)]
    return lambda: [
        TokenLogprobs(logprob, tuple(zip(top_ids, top_values, strict=True)))
        for logprob, top_ids, top_values in zip(*(values() for values in asked), strict=True)
    ]
