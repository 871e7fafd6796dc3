"""Teaches a draft model to agree with its target, and measures how often it does.

Knows two models and packed texts; must not know where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import UnsupportedModel, first_line
from workers.training.draft.agreement import OBJECTIVES, accepted_by_rule
from workers.training.packing import PackedTexts, pack, packed
from workers.training.texts import TrainingText
from workers.training.trainer import TrainingPlan

TEMPERATURES = (0.0, 0.7, 1.0)
"""Temperatures of the card's figures."""
MAX_ERROR = 1e-2
"""Largest error of packed texts' logits relative to their norm; rounding to bfloat16 makes less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPlan(TrainingPlan):
    """How a draft is trained."""

    objective: str
    """A name of `OBJECTIVES`."""
    temperature: float = 1.0
    """Temperature at which target and draft are compared."""


@dataclass(frozen=True, slots=True)
class DraftAgreement:
    """How often a draft's guesses are accepted on some texts."""

    num_tokens: int
    by_rule: dict[tuple[float, str], float]
    """Mean chance that a guess is accepted, by temperature and rule."""


class DraftLearner:
    """A draft in training, beside its target."""

    num_guesses = 1

    def __init__(self, draft: Any, target: Any, plan: DraftPlan) -> None:
        self.module, self.plan, self._target = draft, plan, target

    def num_rows(self, one: PackedTexts) -> int:
        return int((one.texts >= 0).sum())

    def loss(self, one: PackedTexts, step: int, hits: Tensor, tried: Tensor) -> Tensor:  # noqa: ARG002
        """Sum over all rows of texts, prompts included. A guess is right if it is the target's likeliest token."""
        log_p, log_q = compared(self._target, self.module, one, one.texts >= 0, self.plan.temperature)
        hits[0] += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        tried[0] += len(log_p)
        return OBJECTIVES[self.plan.objective](log_p, log_q).sum()


def compared(target: Any, draft: Any, one: PackedTexts, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log p and log q after these rows, of the tokens that both models have rows for.  # [n, V] each

    Only the draft's has a gradient. It computes in bfloat16 if the target does.
    """
    num_tokens = min(target.config.vocab_size, draft.config.vocab_size)
    with torch.no_grad():
        p = _logits(target, one)[rows.to(target.device), :num_tokens]
    with torch.autocast(draft.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        q = _logits(draft, one)[rows.to(draft.device), :num_tokens]
    return (p.float() / temperature).log_softmax(-1), (q.float() / temperature).log_softmax(-1)


def _logits(model: Any, one: PackedTexts) -> Tensor:
    """# [S, V]"""
    found: Tensor = model(
        input_ids=one.token_ids[None].to(model.device),
        attention_mask=one.mask()[None, None].to(model.device, model.dtype),
        position_ids=one.positions[None].to(model.device),
        use_cache=False,
    ).logits
    return found[0]


@torch.inference_mode()
def measure_agreement(target: Any, draft: Any, texts: Sequence[TrainingText], length: int) -> DraftAgreement:
    """Agreement at the tokens of `texts` that are to be guessed, after the texts' own tokens."""
    sums: dict[tuple[float, str], float] = {}
    num_tokens = 0
    for one in packed(texts, None, length):
        both = compared(target, draft, one, one.ahead(1), 1.0)
        num_tokens += len(both[0])
        for temperature in TEMPERATURES:
            log_p, log_q = ((each / (temperature or 1.0)).log_softmax(-1) for each in both)
            for rule, chances in accepted_by_rule(log_p, log_q, temperature).items():
                sums[temperature, rule] = sums.get((temperature, rule), 0.0) + float(chances.sum())
    return DraftAgreement(num_tokens, {each: total / max(1, num_tokens) for each, total in sums.items()})


@torch.inference_mode()
def check_packing(model: Any, name: str) -> None:
    """Check that texts beside each other in a sequence do not see each other. Raises: UnsupportedModel."""
    texts = [TrainingText(list(range(first, first + 4)), []) for first in (0, 4)]
    try:
        together = _logits(model, pack(texts, [0, 1], 8)).float()
        alone = torch.cat([model(torch.tensor([text.token_ids], device=model.device)).logits[0] for text in texts])
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise UnsupportedModel(f"{name}: {type(model).__name__} takes no packed texts: {first_line(error)}") from error
    if float((together - alone.float()).norm() / alone.float().norm()) > MAX_ERROR:
        raise UnsupportedModel(
            f"{name}: in {type(model).__name__} texts of one sequence see each other (recurrent layers, or positions "
            "of its own), so it is not trained here"
        )
