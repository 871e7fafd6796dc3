"""Results of the target's passes over training texts, kept in a file: features of each token, and its last state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from core.errors import ConfigError, UnsupportedModel
from workers.training.head.eagle3 import NUM_FEATURES
from workers.training.job import digest
from workers.training.texts import TrainingText

MIN_LAYERS = 2
MAX_ERROR = 1e-2
"""Largest error of logits relative to their norm; rounding to bfloat16 makes less."""
COLUMNS = NUM_FEATURES + 1


def tapped(num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs a head reads: the authors' choice. In a target of few layers these coincide; there it reads
    the first layer's input, the middle one's, and the last state (-1).

    Raises: ConfigError for a target of one layer.
    """
    if is_usual(num_layers):
        return 2, num_layers // 2, num_layers - 3
    if num_layers < MIN_LAYERS:
        raise ConfigError(f"--target: a head reads {NUM_FEATURES} hidden states, but the model has {num_layers} layer")
    return 0, num_layers // 2, -1


def is_usual(num_layers: int) -> bool:
    """Whether readers know the layers of such a target without a key in the head's configuration."""
    return num_layers > 6


class TargetStates:
    """Hidden states of texts, one after the other: low, middle, high, last after the norm.

    # bfloat16 [tokens, 4 hidden]
    """

    def __init__(self, file: Path, texts: Sequence[TrainingText], hidden_size: int) -> None:
        self._starts = [0]
        for text in texts:
            self._starts.append(self._starts[-1] + len(text.token_ids))
        size = self._starts[-1] * COLUMNS * hidden_size
        self._rows = torch.from_file(str(file), shared=True, size=size, dtype=torch.bfloat16).view(
            -1, COLUMNS * hidden_size
        )

    def of(self, index: int) -> Tensor:
        return self._rows[self._starts[index] : self._starts[index + 1]]


@torch.inference_mode()
def check_logits(model: Any) -> None:
    """Check that logits are the last state times the output layer's weight, as training and served heads compute them.

    Raises: UnsupportedModel for a model that scales or caps its logits, or adds a bias.
    """
    found = model(torch.arange(8, device=model.device)[None], output_hidden_states=True)
    expected = linear(found.hidden_states[-1], model.get_output_embeddings().weight).float()
    if float((found.logits.float() - expected).norm() / expected.norm()) > MAX_ERROR:
        raise UnsupportedModel(
            f"--target: {type(model).__name__} scales or caps its logits, or adds a bias; "
            "EAGLE-3 heads are not trained for such targets"
        )


@torch.inference_mode()
def read_states(
    model: Any, texts: Sequence[TrainingText], folder: Path, done: Callable[[], None] = lambda: None
) -> TargetStates:
    """Run the target over `texts`, or take the file in `folder` that an earlier run has written for the same texts.

    `folder` must be this target's own.
    """
    file = folder / f"states-{digest([text.token_ids for text in texts])}.bin"
    hidden_size = model.config.hidden_size
    if file.exists():
        return TargetStates(file, texts, hidden_size)
    partial = file.with_suffix(".partial")
    with partial.open("wb") as written:
        for text in texts:
            written.write(_states_of(model, text.token_ids).view(torch.uint8).numpy().tobytes())
            done()
    partial.rename(file)
    return TargetStates(file, texts, hidden_size)


def _states_of(model: Any, token_ids: Sequence[int]) -> Tensor:
    """# bfloat16 [tokens, 4 hidden]"""
    output = model(torch.tensor([list(token_ids)], device=model.device), output_hidden_states=True, logits_to_keep=1)
    states = output.hidden_states
    chosen = [states[layer][0] for layer in (*tapped(len(states) - 1), -1)]
    return torch.cat(chosen, -1).to("cpu", torch.bfloat16)
