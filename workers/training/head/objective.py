"""Losses against the target's distribution over the draft's vocabulary, by an output layer that may be frozen.

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
        _save_slopes(ctx, logits.to(output.dtype), states, output)
        ctx.mark_non_differentiable(guesses)
        return loss, guesses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return _scaled_slopes(ctx, grads[0])


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
        _save_slopes(ctx, slope.to(output.dtype), states, output)
        ctx.mark_non_differentiable(guesses)
        return -mass.log().sum(), guesses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return _scaled_slopes(ctx, grads[0])


def _save_slopes(ctx: Any, slope: Tensor, states: Tensor, output: Tensor) -> None:
    """`slope`: of the loss by each logit [n, V], which is not kept."""
    ctx.save_for_backward(slope @ output, slope.T @ states.to(output.dtype) if output.requires_grad else None)


def _scaled_slopes(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor | None, None]:
    by_states, by_output = ctx.saved_tensors
    return by_states.float() * scale, None if by_output is None else by_output * scale, None
