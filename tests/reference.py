"""Outputs of transformers, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def generate(path: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy output of transformers, by the checkpoint at `path`."""
    return _generated(path, tuple(prompt), num_tokens)


def search(path: Path, prompt: Sequence[int], num_tokens: int, **settings: Any) -> list[list[int]]:
    """The outputs of transformers' beam search with these settings of `generate`, best first."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        found = _loaded(path).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, **settings
        )
    outputs: list[list[int]] = found[:, len(prompt) :].tolist()
    return outputs


@lru_cache(maxsize=2)
def _loaded(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@cache
def _generated(path: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    model = _loaded(path)
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    found: list[int] = output[0, len(prompt) :].tolist()
    return found
