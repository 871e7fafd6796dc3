"""Fits Blockwise heads of a target in closed form, from passes of the target over texts.

Head i shall turn the last hidden state h_t into that of the token that comes i + 1 later, because the target's output
layer then gives the token after that one. For a linear layer with a residual connection, h_t + W h_t, that is ridge
regression; only sums over the texts are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.config import EngineConfig
from workers.model import reference_model

RIDGE = 1e-3
"""Regularization of the fit, as a share of the mean square of the hidden states."""
HELD_OUT = 10
"""Each of this number of texts is left out of the fit, and tried afterwards."""


@dataclass(frozen=True, slots=True)
class FittedHeads:
    """Heads, and how often their first guesses are what the target says, on held-out texts."""

    weights: list[Tensor]
    """One for each head.  # [hidden, hidden]"""
    agreement: list[float]
    num_tokens: int
    """Tokens that were fitted."""
    hidden_size: int
    vocab_size: int

    def write(self, folder: Path) -> Path:
        """Write the directory that engines read (`workers.heads.files`); its config.json has the figures, too."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": "blockwise",
            "num_heads": len(self.weights),
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "feature_layers": [-1],
            "fitted_tokens": self.num_tokens,
            "agreement": [round(each, 4) for each in self.agreement],
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {f"heads.{index}.weight": weight.contiguous() for index, weight in enumerate(self.weights)}
        save_file(tensors, folder / "model.safetensors")
        return folder


@torch.inference_mode()
def fit_heads(
    config: EngineConfig, texts: Sequence[Sequence[int]], num_heads: int, done: Callable[[], None] = lambda: None
) -> FittedHeads:
    """Fit heads of the model of `config` on texts of token ids. `done` is called after each text.

    Raises: StartupError.
    """
    model = reference_model(config)
    fitted = [text for index, text in enumerate(texts) if index % HELD_OUT or len(texts) == 1]
    tried = texts[::HELD_OUT]
    sums = [_Sums(model.config.hidden_size) for _ in range(num_heads)]
    for states in _states_of(model, fitted, done):
        for ahead, each in enumerate(sums, 1):
            each.add(states[:-ahead], states[ahead:])
    weights = [each.solved() for each in sums]
    agreement = _agreement(model, weights, _states_of(model, tried, done))
    sizes = model.config.hidden_size, model.config.vocab_size
    return FittedHeads(weights, agreement, sum(map(len, fitted)), *sizes)


class _Sums:
    """Normal equations of one head."""

    def __init__(self, hidden_size: int) -> None:
        self._gram = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)
        self._cross = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)

    def add(self, states: Tensor, later: Tensor) -> None:
        """# [n, hidden], [n, hidden]"""
        self._gram += (states.T @ states).double()
        self._cross += (states.T @ (later - states)).double()

    def solved(self) -> Tensor:
        """W of the least |h + W h - h'|^2 + ridge |W|^2.  # [hidden, hidden]"""
        ridge = RIDGE * self._gram.diagonal().mean() * torch.eye(len(self._gram))
        weight: Tensor = torch.linalg.solve(self._gram + ridge, self._cross).T.float()
        return weight


def _states_of(model: Any, texts: Iterable[Sequence[int]], done: Callable[[], None]) -> Iterable[Tensor]:
    """Last hidden states of each text, on the host.  # [tokens, hidden]"""
    for text in texts:
        output = model(torch.tensor([list(text)], device=model.device), output_hidden_states=True, logits_to_keep=1)
        yield output.hidden_states[-1][0].float().cpu()
        done()


def _agreement(model: Any, weights: Sequence[Tensor], texts: Iterable[Tensor]) -> list[float]:
    output = model.get_output_embeddings()
    right, num = [0] * len(weights), [0] * len(weights)

    def said(states: Tensor) -> Tensor:
        token_ids: Tensor = output(states.to(model.device, model.dtype)).argmax(dim=-1)
        return token_ids

    for states in texts:
        target = said(states)
        for head, weight in enumerate(weights):
            guessed = said(states[: -1 - head] + states[: -1 - head] @ weight.T)
            right[head] += int((guessed == target[1 + head :]).sum())
            num[head] += len(guessed)
    return [hits / max(1, tried) for hits, tried in zip(right, num, strict=True)]
