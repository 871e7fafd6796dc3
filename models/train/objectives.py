"""What a step minimises: the next token's surprise, or the distance from the target's distribution."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

Objective = Callable[[Any, Tensor], Tensor]
"""(model, windows [rows, length]) to a scalar loss, in nats a token."""
Distillation = Callable[[Any], Objective]
"""From a frozen target."""


def logits_of(model: Any, windows: Tensor) -> Tensor:
    """Logits at every position, without a cache."""
    logits: Tensor = model(input_ids=windows, use_cache=False).logits
    return logits  # [rows, length, V]


def next_token_loss(model: Any, windows: Tensor) -> Tensor:
    """Mean cross-entropy of each token after the first."""
    logits = logits_of(model, windows)[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, windows[:, 1:].flatten())


def distillation_from(target: Any) -> Objective:
    """KL(p || q) from the frozen target's full distribution p; forward, so that q covers all that p might sample."""

    def loss(draft: Any, windows: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits_of(target, windows).flatten(0, 1).float().log_softmax(-1)
        q = logits_of(draft, windows).flatten(0, 1).float().log_softmax(-1)
        return F.kl_div(q, p, log_target=True, reduction="batchmean")

    return loss


def acceptance_from(target: Any) -> Objective:
    """-log Σ min(p, q), of the chance that a token drawn from q is accepted; p is all of the frozen target's law.

    KL asks a draft for all of p, which a small one cannot hold; this asks for what it is used for. Its gradient is that
    of the total variation, divided by the acceptance. Source: Leviathan et al. 2023, Corollary 3.6.
    """

    def loss(draft: Any, windows: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits_of(target, windows).flatten(0, 1).float().softmax(-1)
        q = logits_of(draft, windows).flatten(0, 1).float().softmax(-1)
        return -torch.minimum(p, q).sum(-1).clamp_min(1e-9).log().mean()

    return loss


DISTILLATIONS: Final[dict[str, Distillation]] = {"kl": distillation_from, "acceptance": acceptance_from}
