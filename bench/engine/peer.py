"""transformers' own generation from a checkpoint, the baseline for our engines.

Knows `generate`; must not know our engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from core.config import Dtype

ATTENTION = "sdpa"
"""transformers' default, and its fastest without further packages."""


class Peer:
    """Completes prompts greedily to a fixed length, ignoring ends of text."""

    def __init__(self, model: Path, dtype: Dtype, device: torch.device) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
        )
        self._model: Any = loaded.to(device).eval()
        self._device = device

    def complete(self, prompt: Sequence[int], num_tokens: int, assistant: Peer | None = None) -> tuple[int, ...]:
        """The next tokens. An assistant guesses with transformers' default settings for it."""
        ids = torch.tensor([prompt], device=self._device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=assistant._model if assistant else None,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            max_new_tokens=num_tokens,
        )
        tokens: tuple[int, ...] = tuple(output[0, len(prompt) :].tolist())
        assert len(tokens) == num_tokens, f"{len(tokens)} of {num_tokens} tokens"
        return tokens
