"""What a run leaves in its work folder, outside the repository: weights, optimizer state and the time spent."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from models.train.architecture import build_model


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    loss: float = float("nan")
    """Running mean of the training loss, in nats a token."""


def checkpoint_path(work: Path, name: str) -> Path:
    """Where the run `name` keeps its state."""
    return work / f"{name}.pt"


def save_checkpoint(path: Path, model: Any, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Write the state beside its place, then rename: an interrupted write leaves the last one whole."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def resume(path: Path, model: Any, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Load the last state into `model` and `optimizers`, if there is one."""
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["progress"])


def load_trained(path: Path, role: str) -> Any:
    """The trained model of `role`, in fp32, ready to be read from."""
    model = build_model(role)
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model.eval().requires_grad_(False)


def load_progress(path: Path) -> Progress:
    """How far the run at `path` came."""
    return Progress(**torch.load(path, weights_only=True)["progress"])
