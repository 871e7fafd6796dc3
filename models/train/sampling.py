"""Batched generation with a cache and nothing clever: what the pair is measured against must be plain."""

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def continue_prompts(
    model: Any, prompts: Tensor, num_tokens: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """`prompts` [B, L] with `num_tokens` more tokens each, [B, L + num_tokens]; temperature 0 takes the likeliest."""
    output = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    tokens = [prompts]
    for _ in range(num_tokens - 1):
        tokens.append(choose(output.logits[:, -1], temperature, generator))
        output = model(input_ids=tokens[-1], past_key_values=output.past_key_values, use_cache=True)
    tokens.append(choose(output.logits[:, -1], temperature, generator))
    return torch.cat(tokens, dim=1)


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token a row, [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probabilities = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)
