"""From logits to p, and from p to a token: the reference implementation for one row, in numpy.

The batched implementation is `workers.sampling.logits` for the steps before the temperature and
`workers.sampling.sampler` for the rest. Knows the request's sampling parameters and the noise; must not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core import noise
from core.noise import Purpose
from core.records import Sampling
from core.rules import draw
from core.speculation import SparseDistribution

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

Q_MASS = 0.995
"""q keeps the fewest tokens that hold this share of the draft's distribution, at most `q_top_tokens`. On the demo pair
at T = 0.7 these are 208 tokens on average. A chain of 8 then yields as many tokens a round as with 1,024 tokens, which
take 0.7 ms longer; 0.95 yields 2% less. If the draft were the target itself, 0.995 would lose 2% of a round, and 0.98
8%."""
TOP_P_SLACK = 1e-6
"""A mass within this distance of top_p counts as reaching it. Rounding of float32 logits can hide smaller distances."""


def log_probs(
    logits: Float32,
    sampling: Sampling,
    tokens: Sequence[int],
    prompt_len: int,
    allowed: NDArray[np.bool_] | None = None,
) -> Float64:
    """log p [V] of the token after `tokens` (prompt included).

    The steps, in this order: allowed_token_ids, bad_words, logit_bias, suppressed_ids, repetition penalty, presence and
    frequency penalty, the grammar's mask (`allowed` [V]), temperature, top-k, top-p, min-p. If the grammar allows only
    suppressed_ids, they are not suppressed.
    Raises: ValueError if a logit is NaN or +inf, or none is finite, before the steps or after the mask.
    """
    _check_finite(logits)
    num_output = len(tokens) - prompt_len if _may_suppress(sampling, allowed) else sampling.min_tokens
    with np.errstate(over="ignore"):  # `_check_finite` finds overflows
        logits = _masked(logits, sampling, tokens, prompt_len)
        logits = _penalised(_biased(logits, sampling, num_output), sampling, tokens, prompt_len)
    if allowed is not None:
        logits = np.where(allowed, logits, np.float32(-np.inf))
    _check_finite(logits)
    if sampling.is_greedy:
        return _one_hot(logits)
    with np.errstate(over="ignore"):  # an overflow to -inf is probability zero
        logits = (logits - logits.max()) / np.float32(sampling.temperature)
    for cut in (_top_k, _top_p, _min_p):
        logits = cut(logits, sampling)
    return _log_softmax(logits)


def _may_suppress(sampling: Sampling, allowed: NDArray[np.bool_] | None) -> bool:
    """Whether the grammar allows a token that does not end the output."""
    return allowed is None or not {*np.flatnonzero(allowed).tolist()} <= {*sampling.suppressed_ids}


def _check_finite(logits: Float32) -> None:
    if not np.isfinite(logits.max()):
        raise ValueError("the logits hold NaN or +inf, or no finite value at all")


def _masked(logits: Float32, sampling: Sampling, tokens: Sequence[int], prompt_len: int) -> Float32:
    """Apply allowed_token_ids and bad_words as vLLM does: a bad word counts only within the output, not in the
    prompt."""
    masked = logits.astype(np.float32)  # a copy
    if sampling.allowed_token_ids:
        is_allowed = np.zeros(len(logits), dtype=bool)
        is_allowed[[token for token in sampling.allowed_token_ids if 0 <= token < len(logits)]] = True
        masked[~is_allowed] = -np.inf
    masked[[token for token in sampling.bad_after(tokens, prompt_len) if 0 <= token < len(logits)]] = -np.inf
    return masked


def _biased(logits: Float32, sampling: Sampling, num_output: int) -> Float32:
    logits = logits.astype(np.float32)  # a copy
    for token_id, bias in sampling.logit_bias:
        if 0 <= token_id < len(logits):
            logits[token_id] += np.float32(bias)
    if num_output < sampling.min_tokens:
        logits[[token_id for token_id in sampling.suppressed_ids if 0 <= token_id < len(logits)]] = -np.inf
    return logits


def _penalised(logits: Float32, sampling: Sampling, tokens: Sequence[int], prompt_len: int) -> Float32:
    """Apply the penalties. Repetition: Keskar et al. 2019, section 4.1, with transformers' rule for negative logits."""
    if not sampling.has_penalties:
        return logits
    seen = _counts(tokens, len(logits)) > 0
    counts = _counts(tokens[prompt_len:], len(logits))
    penalty = np.float32(sampling.repetition_penalty)
    logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - np.float32(sampling.frequency_penalty) * counts
    return np.subtract(logits, np.float32(sampling.presence_penalty) * counts.clip(max=1), dtype=np.float32)


def _counts(tokens: Sequence[int], vocab_size: int) -> Float32:
    counts: Float32 = np.bincount(np.asarray(tokens, dtype=np.int64), minlength=vocab_size).astype(np.float32)
    return counts


def _one_hot(logits: Float32) -> Float64:
    log_p = np.full(len(logits), -np.inf)
    log_p[int(logits.argmax())] = 0.0  # the lowest id on ties
    return log_p


def _top_k(logits: Float32, sampling: Sampling) -> Float32:
    """Keep the k likeliest tokens and all ties with the k-th."""
    if not 0 < sampling.top_k < len(logits):
        return logits
    threshold = np.sort(logits)[-sampling.top_k]
    return np.where(logits < threshold, np.float32(-np.inf), logits)


def _top_p(logits: Float32, sampling: Sampling) -> Float32:
    """Keep the shortest prefix whose mass reaches top_p, likeliest token first, lower ids first on ties."""
    if sampling.top_p == 1:
        return logits
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(_log_softmax(logits[order]))
    mass_before = np.cumsum(probs) - probs
    is_dropped = mass_before >= sampling.top_p - TOP_P_SLACK
    is_dropped[0] = False
    logits = logits.copy()
    logits[order[is_dropped]] = -np.inf
    return logits


def _min_p(logits: Float32, sampling: Sampling) -> Float32:
    """Keep tokens at least `min_p` times as likely as the likeliest, whose logit is 0 here."""
    if sampling.min_p == 0:
        return logits
    return np.where(logits < np.float32(np.log(sampling.min_p)), np.float32(-np.inf), logits)


def _log_softmax(logits: Float32) -> Float64:
    shifted = logits.astype(np.float64) - float(logits.max())
    log_p: Float64 = shifted - np.log(np.exp(shifted).sum())
    return log_p


def sample_coupled(log_p: Float64, sampling: Sampling, position: int) -> int:
    """The token that draft and target both draw at `position` in coupled mode. Greedy: the argmax, without noise."""
    if sampling.is_greedy:
        return int(log_p.argmax())
    return draw(log_p, sampling.seed, position, 0, Purpose.SHARED)


def truncate(log_q: Float64, top_tokens: int, mass: float = Q_MASS) -> SparseDistribution:
    """q for rules that need it: the fewest likeliest tokens that hold `mass`, at most `top_tokens`.

    The probabilities are renormalised in float32.
    """
    kept = np.argsort(-log_q, kind="stable")[:top_tokens]
    kept = kept[np.isfinite(log_q[kept])]
    whole = np.exp(log_q[kept])
    kept = kept[np.cumsum(whole) - whole < mass]
    probs = np.exp(_log_softmax(log_q[kept].astype(np.float32))).astype(np.float32)
    kept, probs = kept[probs > 0], probs[probs > 0]
    return SparseDistribution(tuple(kept.tolist()), tuple(probs.tolist()))


def draw_guess(q: SparseDistribution, vocab_size: int, seed: int, position: int, row: int) -> int:
    """Draw a guess from q. `row` is the guess's index in its block, from 0."""
    log_q = np.full(vocab_size, -np.inf)
    log_q[list(q.token_ids)] = np.log(q.probs)
    return draw(log_q, seed, position, row, Purpose.DRAFT)


def draw_several(
    q: SparseDistribution,
    vocab_size: int,
    seed: int,
    position: int,
    row: int,
    num_draws: int,
    *,
    with_replacement: bool,
) -> tuple[int, ...]:
    """Draw guesses from q after one node, in the order of drawing.

    Without replacement no token repeats, and there are at most as many draws as tokens in q. `row` comes from
    `core.noise.row_of`.
    """
    if with_replacement:
        rows = [row + noise.ROWS_APART * each for each in range(num_draws)]
        return tuple(draw_guess(q, vocab_size, seed, position, each) for each in rows)
    gumbel = noise.gumbel(seed, position, row, Purpose.DRAFT, vocab_size)[list(q.token_ids)]
    scores = np.log(q.probs).astype(np.float32) + gumbel
    order = np.argsort(-scores, kind="stable")[:num_draws]
    return tuple(q.token_ids[index] for index in order)
