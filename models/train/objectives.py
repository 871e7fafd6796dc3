"""Training losses: next-token cross-entropy, and distillation from the target's distribution."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

Objective = Callable[[Any, Tensor], Tensor]
"""(model, windows [rows, length]) -> scalar loss, in nats per token."""
Distillation = Callable[[Any], Objective]
"""A frozen target -> the objective of its draft."""


def logits_of(model: Any, windows: Tensor) -> Tensor:
    """Logits at every position, computed without a cache.  # [rows, length, V]"""
    logits: Tensor = model(input_ids=windows, use_cache=False).logits
    return logits  # [rows, length, V]


def next_token_loss(model: Any, windows: Tensor) -> Tensor:
    """Mean cross-entropy of each token after the first."""
    logits = logits_of(model, windows)[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, windows[:, 1:].flatten())


def distillation_from(target: Any) -> Objective:
    """KL(p || q), p being the frozen target's full distribution. Forward KL, so that q covers everything p may
    sample."""

    def loss(draft: Any, windows: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits_of(target, windows).flatten(0, 1).float().log_softmax(-1)
        q = logits_of(draft, windows).flatten(0, 1).float().log_softmax(-1)
        return F.kl_div(q, p, log_target=True, reduction="batchmean")

    return loss


def acceptance_from(target: Any) -> Objective:
    """-log Σ min(p, q), where the sum is the chance that a token drawn from q is accepted; p is the frozen target's.

    KL makes a draft fit all of p, which a small model cannot do. This objective is the acceptance itself. Its gradient
    is that of the total variation distance divided by the acceptance. Source: Leviathan et al. 2023, Corollary 3.6.
    """

    def loss(draft: Any, windows: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits_of(target, windows).flatten(0, 1).float().softmax(-1)
        q = logits_of(draft, windows).flatten(0, 1).float().softmax(-1)
        return -torch.minimum(p, q).sum(-1).clamp_min(1e-9).log().mean()

    return loss


DISTILLATIONS: Final[dict[str, Distillation]] = {"kl": distillation_from, "acceptance": acceptance_from}
