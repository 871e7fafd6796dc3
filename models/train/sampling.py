"""Batched generation with a KV cache, kept simple because it is the reference for measurements."""

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def continue_prompts(
    model: Any, prompts: Tensor, num_tokens: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Append `num_tokens` tokens to each prompt [B, L]; temperature 0 is greedy.  # [B, L + num_tokens]"""
    output = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    tokens = [prompts]
    for _ in range(num_tokens - 1):
        tokens.append(choose(output.logits[:, -1], temperature, generator))
        output = model(input_ids=tokens[-1], past_key_values=output.past_key_values, use_cache=True)
    tokens.append(choose(output.logits[:, -1], temperature, generator))
    return torch.cat(tokens, dim=1)


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Choose one token per row.  # [B, 1]"""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probabilities = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)
