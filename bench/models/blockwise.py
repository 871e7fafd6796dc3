"""Fits Blockwise heads of a target in closed form, and writes them as a directory that engines read.

Head i shall turn the last hidden state h_t into that of the token that comes i + 1 later, because the target's output
layer then gives the token after that one. For a linear layer with a residual connection, h_t + W h_t, that is ridge
regression.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.config import EngineConfig
from workers.model import reference_model

RIDGE = 1e-3
"""Of the mean square of the hidden states."""


def write_heads(folder: Path, target: Path, texts: Iterable[Sequence[int]], num_heads: int = 1) -> Path:
    """Fit the heads of this target on texts of token ids."""
    model = reference_model(EngineConfig(str(target)))
    states = [_last_states(model, text) for text in texts]
    weights = {f"heads.{head}.weight": _fit_ahead(states, head + 1) for head in range(num_heads)}
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "blockwise",
        "num_heads": num_heads,
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "feature_layers": [-1],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors")
    return folder


def _fit_ahead(states: Sequence[Tensor], num_ahead: int) -> Tensor:
    before, after = (torch.cat(each) for each in zip(*((s[:-num_ahead], s[num_ahead:]) for s in states), strict=True))
    return fit(before, after).contiguous()


def fit(states: Tensor, following: Tensor) -> Tensor:
    """W of the least ||h + W h - h'||^2 + ridge.  # [n, hidden], [n, hidden] -> [hidden, hidden]"""
    gram = states.T @ states
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    weight: Tensor = torch.linalg.solve(gram + ridge, states.T @ (following - states)).T
    return weight


@torch.inference_mode()
def _last_states(model: Any, text: Sequence[int]) -> Tensor:
    output = model(torch.tensor([list(text)]), output_hidden_states=True)
    states: Tensor = output.hidden_states[-1][0].float()
    return states
