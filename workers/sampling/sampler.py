"""Logits to p, and p to tokens, for a batch of rows on any device; agrees with `core.exact.sampling`.

Knows sampling parameters, noise and torch; must not know models, caches or sessions. Rows without truncation do not pay
for rows of the same batch that have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core import noise
from core.exact import Q_MASS, TOP_P_SLACK
from core.noise import Purpose
from core.records import Sampling, TokenLogprobs
from workers.noise import largest_with_gumbel, prepare_gumbel_rows
from workers.sampling.logits import (
    NEVER,
    LogitsTransform,
    Row,
    adjusted,
    apply_now,
    column,
    compose,
    identity,
    in_rows,
    samplings,
)
from workers.step import Readback, Uploads, upload

GROUP_TOKENS = 16
FEW_SCORES = 1 << 17
"""Number of scores up to which a plain `topk` is faster than choosing groups first, which takes a dozen operators
(adr/cpu-runtime)."""
FEW_KEPT = 1 << 10
"""Number of tokens that top-p examines first; it rarely keeps more."""


def process(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p [R, V] in float32, by the steps of `core.exact.sampling.log_probs`. Does not modify `logits` [R, V]."""
    return distribution(adjusted(logits, rows), rows)


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p [R, V] of adjusted logits, after temperature and truncation: the second half of `process`."""
    return apply_now(prepare_distribution, logits, rows)


def prepare_distribution(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> LogitsTransform:
    """`distribution` as a function to call after the upload."""
    of_rows = samplings(rows)
    if all(sampling.is_greedy for sampling in of_rows):
        return _one_hot
    if uploads.device.type == "cpu" and all(map(_is_softmax, of_rows)):
        # Same bits as the general way below, because log_softmax subtracts the largest logit too.
        return lambda logits: logits.log_softmax(dim=-1)
    steps = [
        _tempered(rows, uploads),
        _top_k(rows, vocab_size, uploads),
        _top_p(rows, uploads),
        _min_p(rows, uploads),
        lambda logits: logits.log_softmax(dim=-1),
    ]
    return _one_hot_where_greedy(rows, compose(steps), uploads)


def _one_hot_where_greedy(rows: Sequence[Row], sampled: LogitsTransform, uploads: Uploads) -> LogitsTransform:
    is_greedy = [row.sampling.is_greedy for row in rows]
    if not any(is_greedy):
        return sampled
    where = column(is_greedy, uploads)
    return lambda logits: torch.where(where(), _one_hot(logits), sampled(logits))


def _one_hot(logits: Tensor) -> Tensor:
    """log p of greedy decoding: 0 at the argmax, -inf elsewhere."""
    return torch.full_like(logits, NEVER).scatter(1, argmax(logits)[:, None], 0.0)


def _is_softmax(sampling: Sampling) -> bool:
    """Whether p is the softmax of the logits, without temperature or truncation."""
    is_whole = not sampling.top_k and sampling.top_p == 1 and not sampling.min_p
    return sampling.temperature == 1 and is_whole


def _tempered(rows: Sequence[Row], uploads: Uploads) -> LogitsTransform:
    """Divide by the temperature, after a shift to a largest logit of 0, so that no temperature overflows."""
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    # Only on a CPU: for a Python number, a GPU multiplies by its reciprocal, which gives other bits.
    is_one = uploads.device.type == "cpu" and len(set(temperatures)) == 1
    there = None if is_one else column(temperatures, uploads)

    def tempered(logits: Tensor) -> Tensor:
        return (logits - logits.amax(dim=-1, keepdim=True)).div_(there() if there else temperatures[0])

    return tempered


def _top_k(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> LogitsTransform:
    ks = [row.sampling.top_k if row.sampling.top_k < vocab_size else 0 for row in rows]
    if not any(ks):
        return identity
    k = column(ks, uploads)

    def cut_off(logits: Tensor) -> Tensor:
        threshold = largest(logits, max(ks))[0].gather(1, (k() - 1).clamp(min=0))
        return logits.masked_fill((logits < threshold) & (k() > 0), NEVER)

    return cut_off


def _top_p(rows: Sequence[Row], uploads: Uploads) -> LogitsTransform:
    chosen = [index for index, row in enumerate(rows) if row.sampling.top_p < 1 and not row.sampling.is_greedy]
    if not chosen:
        return identity
    outside = _outside_nucleus_on_cpu if uploads.device.type == "cpu" else _outside_nucleus
    top_p = column([rows[i].sampling.top_p for i in chosen], uploads, torch.float64)
    return in_rows(chosen, len(rows), lambda logits: logits.masked_fill(outside(logits, top_p()), NEVER), uploads)


def _outside_nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """True for tokens [R, V] outside the nucleus: the likeliest tokens that together reach `top_p` [R, 1]."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.double().softmax(dim=-1)
    is_dropped = probs.cumsum(dim=-1) - probs >= top_p - TOP_P_SLACK
    is_dropped[:, 0] = False
    return torch.zeros_like(is_dropped).scatter(1, order, is_dropped)


def _outside_nucleus_on_cpu(logits: Tensor, top_p: Tensor) -> Tensor:
    """`_outside_nucleus` by the smallest logit that is kept: numpy sorts logits alone ten times as fast as with ids."""
    is_outside = torch.zeros_like(logits, dtype=torch.bool)
    for row, least_mass, out in zip(logits.numpy(), top_p.flatten().tolist(), is_outside.numpy(), strict=True):
        least, num_equals = _nucleus_end(np.sort(row)[::-1], least_mass - TOP_P_SLACK)
        np.less(row, least, out=out)
        out[np.flatnonzero(row == least)[num_equals:]] = True
    return is_outside


def _nucleus_end(ordered: NDArray[np.float32], mass: float) -> tuple[np.float32, int]:
    """The smallest logit needed to reach `mass`, and how many logits equal to it are needed.

    `ordered` is in descending order and starts with 0. Of equal logits, those of lower ids are kept first.
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


def _min_p(rows: Sequence[Row], uploads: Uploads) -> LogitsTransform:
    min_ps = [row.sampling.min_p for row in rows]
    if not any(min_ps):
        return identity
    threshold = column([math.log(min_p) if min_p else NEVER for min_p in min_ps], uploads)
    return lambda logits: logits.masked_fill(logits < threshold(), NEVER)


def argmax(scores: Tensor) -> Tensor:
    """Id [R] of the largest score of each row [R, V]; the lowest id wins a tie. On a CPU numpy takes a tenth of torch's
    time."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def perturbed(log_p: Tensor, rows: Sequence[Row]) -> Tensor:
    """log p + shared noise [R, V]; its argmax is the token of coupled sampling. Greedy rows get no noise."""
    return apply_now(prepare_perturbation, log_p, rows)


def prepare_perturbation(
    rows: Sequence[Row], vocab_size: int, uploads: Uploads, token_ids: Tensor | None = None
) -> LogitsTransform:
    """`perturbed` as a function to call after the upload. `token_ids`: those of the columns, if not all in order."""
    chosen = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    if not chosen:
        return identity
    whole = prepare_gumbel_rows([_shared_key(rows[i]) for i in chosen], vocab_size, uploads)
    gumbel = whole if token_ids is None else lambda: whole().index_select(1, token_ids)
    if len(chosen) == len(rows):
        return lambda log_p: gumbel().add_(log_p)  # in place: a temporary of this size costs more than the addition
    index = uploads.add(chosen)
    return lambda log_p: log_p.index_add(0, index(), gumbel())


Draw: TypeAlias = Callable[[Tensor, Readback], Callable[[], list[int]]]
"""(log p [R, V], readback) -> the token of each row. Call it after the upload, and its result after the readback."""


def drawn(log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Callable[[], list[int]]:
    """Sample each row's token by coupled sampling: the argmax of `perturbed`. Call the result after the readback."""
    uploads = Uploads(log_p.device)
    draw = prepare_draw(rows, log_p.shape[1], uploads)
    uploads.send()
    return draw(log_p, readback)


def prepare_draw(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Draw:
    """`drawn` as a function to call after the upload."""
    draw = _drawn_on_cpu if uploads.device.type == "cpu" else _drawn
    return draw(rows, vocab_size, uploads)


def _drawn(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Draw:
    perturb = prepare_perturbation(rows, vocab_size, uploads)

    def draw(log_p: Tensor, readback: Readback) -> Callable[[], list[int]]:
        argmax = readback.argmax(perturb(log_p))
        return lambda: argmax()[0]

    return draw


def _drawn_on_cpu(rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Draw:
    """`_drawn` without computing the noise of tokens that cannot win."""
    if any(row.sampling.is_greedy for row in rows):
        return _drawn(rows, vocab_size, uploads)

    def draw(log_p: Tensor, _: Readback) -> Callable[[], list[int]]:
        token_ids = largest_with_gumbel(log_p.numpy(), [_shared_key(row) for row in rows])
        return lambda: token_ids

    return draw


def _shared_key(row: Row) -> noise.Key:
    return noise.key(row.sampling.seed, row.position, 0, Purpose.SHARED)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and ids [R, count] of the `count` largest scores of each row, in descending order, as by `topk`.

    The vocabulary is split into strided groups; the `count` groups with the largest maxima contain all these scores.
    Finding these groups takes a fraction of the time of `topk` over the vocabulary, unless they are a large part of it.
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
    """Cut q for rules that need it: the fewest likeliest tokens that hold `Q_MASS`, at most `top_tokens`, renormalised.

    Returns probabilities and token ids [R, M], likeliest first. Tokens that are cut off have probability 0.
    """
    log_probs, ids = largest(log_q, top_tokens)
    whole = log_probs.double().exp()
    is_outside = whole.cumsum(dim=-1) - whole >= Q_MASS
    return log_probs.masked_fill(is_outside, NEVER).softmax(dim=-1), ids


def logprobs(
    raw_logits: Tensor, token_ids: Sequence[int], num_top: int, readback: Readback
) -> Callable[[], list[TokenLogprobs]]:
    """For each row of `raw_logits` [N, V]: the log probabilities of its token and of the `num_top` likeliest tokens.

    Call the result after the readback.
    """
    log_p = raw_logits.float().log_softmax(dim=-1)
    values, ids = log_p.topk(min(num_top, log_p.shape[1]))
    chosen = log_p.gather(1, upload(list(token_ids), log_p.device)[:, None]).flatten()
    readers = [readback.add(tensor) for tensor in (chosen, ids, values)]
    return lambda: [
        TokenLogprobs(logprob, tuple(zip(top_ids, top_values, strict=True)))
        for logprob, top_ids, top_values in zip(*(values() for values in readers), strict=True)
    ]
