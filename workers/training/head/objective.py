"""Losses against the target's distribution over the draft's vocabulary, by a frozen output layer.

Gradients are computed in the forward pass, so that no more than a few matrices of logits are alive at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TEMPERATURE = 0.7
"""Temperature of accepted mass: between greedy outputs and those at 1."""
LEAST_MASS = 1e-3
"""Bounds the gradient of rows where nothing would be accepted."""


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of -Σ p log q, with q of `states` @ `output`ᵀ, and each row's likeliest token.

    # [n, hidden], [V, hidden], [n, V] -> scalar, [n]
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, output: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        logits = (states.to(output.dtype) @ output.T).float()
        guesses, log_sum = logits.argmax(-1), logits.logsumexp(-1)
        loss = log_sum.sum() - (teacher * logits).sum()
        logits.sub_(log_sum[:, None]).exp_().sub_(teacher)
        ctx.save_for_backward(logits.to(output.dtype) @ output)
        ctx.mark_non_differentiable(guesses)
        return loss, guesses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope.float() * grads[0], None, None


class AcceptedMass(torch.autograd.Function):
    """Sum over rows of -log Σ min(p, q), the chance that a draw of q is accepted, with q at `TEMPERATURE`; and each
    row's likeliest token. `teacher` is p at that temperature.

    # [n, hidden], [V, hidden], [n, V] -> scalar, [n]
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, output: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        logits = (states.to(output.dtype) @ output.T).float()
        guesses = logits.argmax(-1)
        own = (logits / TEMPERATURE).softmax(-1)
        mass = torch.minimum(teacher, own).sum(-1, keepdim=True).clamp(min=LEAST_MASS)
        lacking = torch.where(own < teacher, own, 0.0)  # more chance for these tokens would be accepted
        slope = (own * lacking.sum(-1, keepdim=True) - lacking) / (mass * TEMPERATURE)
        ctx.save_for_backward(slope.to(output.dtype) @ output)
        ctx.mark_non_differentiable(guesses)
        return -mass.log().sum(), guesses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope.float() * grads[0], None, None
