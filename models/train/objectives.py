"""Training losses: next-token cross-entropy, and distillation from the target's distribution."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.training import OBJECTIVES

Objective = Callable[[Any, Tensor], Tensor]
"""(model, windows [rows, length]) -> scalar loss, in nats per token."""


def logits_of(model: Any, windows: Tensor) -> Tensor:
    """Logits at every position, computed without a cache.  # [rows, length, V]"""
    logits: Tensor = model(input_ids=windows, use_cache=False).logits
    return logits  # [rows, length, V]


def next_token_loss(model: Any, windows: Tensor) -> Tensor:
    """Mean cross-entropy of each token after the first."""
    logits = logits_of(model, windows)[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, windows[:, 1:].flatten())


def distillation_from(target: Any, name: str) -> Objective:
    """The objective of `outrider distill` of this name, by the frozen target's full distribution.

    KL makes a draft fit all of p, which a small model cannot do. The others raise the chance of acceptance itself.
    """

    def loss(draft: Any, windows: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = logits_of(target, windows).flatten(0, 1).float().log_softmax(-1)
        log_q = logits_of(draft, windows).flatten(0, 1).float().log_softmax(-1)
        return OBJECTIVES[name](log_p, log_q).mean()

    return loss
