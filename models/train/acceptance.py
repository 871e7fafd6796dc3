"""How often a draft's token is accepted, on text written by the target.

greedy     argmax p == argmax q
rejection  sum over tokens of min(p, q): the chance that rejection sampling accepts (arXiv:2211.17192)
coupled    the chance that argmax(log p + G) == argmax(log q + G) with the same Gumbel noise G for both, in closed form
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from models.train.objectives import logits_of
from models.train.sampling import continue_prompts
from workers.training import accepted_by_rule

ROWS_AT_ONCE: Final = 16


@dataclass(frozen=True)
class Acceptance:
    """Mean acceptance of the draft's next token at one temperature, with its standard error over prompts."""

    temperature: float
    rule: str
    alpha: float
    standard_error: float


def measure_acceptance(
    target: Any, draft: Any, prompts: Tensor, num_tokens: int, temperature: float, seed: int
) -> list[Acceptance]:
    """Acceptance over `num_tokens` positions after each prompt, for each rule that applies at the temperature."""
    generator = torch.Generator(prompts.device).manual_seed(seed)
    texts = continue_prompts(target, prompts, num_tokens, temperature, generator)
    by_rule: dict[str, list[Tensor]] = {}
    for log_p, log_q in distributions(target, draft, texts, num_tokens, temperature or 1.0):
        for rule, accepted in accepted_by_rule(log_p, log_q, temperature).items():
            by_rule.setdefault(rule, []).append(accepted.mean(dim=1))
    return [summary(temperature, rule, torch.cat(per_prompt)) for rule, per_prompt in by_rule.items()]


def distributions(
    target: Any, draft: Any, texts: Tensor, num_tokens: int, temperature: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (log p, log q) at the positions after the prompt, a few prompts at a time.  # each [rows, num_tokens, V]"""
    for rows in torch.split(texts, ROWS_AT_ONCE):
        with torch.no_grad():
            both = [logits_of(model, rows)[:, -num_tokens - 1 : -1].float() for model in (target, draft)]
        log_p, log_q = ((logits / temperature).log_softmax(-1) for logits in both)
        yield log_p, log_q


def summary(temperature: float, rule: str, per_prompt: Tensor) -> Acceptance:
    """Mean and standard error over prompts: prompts are independent, positions of one text are not."""
    error = per_prompt.std() / len(per_prompt) ** 0.5
    return Acceptance(temperature, rule, round(float(per_prompt.mean()), 4), round(float(error), 4))
