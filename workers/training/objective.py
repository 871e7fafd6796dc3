"""Cross entropy against the target's distribution over the draft's vocabulary, by a frozen output layer.

The gradient is computed in the forward pass, so that no more than one matrix of logits is alive at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
