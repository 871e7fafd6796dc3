"""The state of a run in its work folder: weights, optimizer state and time spent."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from models.train.architecture import build_model


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    loss: float = float("nan")
    """Running mean of the training loss, in nats per token."""


def checkpoint_path(work: Path, name: str) -> Path:
    return work / f"{name}.pt"


def save_checkpoint(path: Path, model: Any, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Write to a temporary file, then rename it, so that an interrupted write leaves the last checkpoint intact."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def resume(path: Path, model: Any, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Load the last checkpoint into `model` and `optimizers`, if there is one."""
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


def load_trained(path: Path, role: str) -> Any:
    """The trained model of `role` in fp32, for inference."""
    model = build_model(role)
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model.eval().requires_grad_(False)


def load_progress(path: Path) -> Progress:
    return Progress(**torch.load(path, weights_only=True)["progress"])
