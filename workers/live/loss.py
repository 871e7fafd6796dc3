"""The loss that a draft minimises on live traffic, from the target's likeliest tokens alone."""

from __future__ import annotations

from torch import Tensor

MIN_PROB = 1e-6
"""Least probability of all other tokens together, so that its logarithm is finite."""


def missed_loss(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """Sum over missed places of KL(p || q), where all tokens but the target's likeliest count as one.

    logits: [N, V]; top_ids, top_logprobs: [N, K], of the target. A lower bound of the divergence over all tokens, with
    the same minimum for the likeliest ones.
    """
    own = logits.log_softmax(-1).gather(1, top_ids)  # [N, K]
    p = top_logprobs.exp()
    rest_p, rest_q = ((1 - probs.sum(-1)).clamp(min=MIN_PROB) for probs in (p, own.exp()))
    return (p * (top_logprobs - own)).sum() + (rest_p * (rest_p.log() - rest_q.log())).sum()
