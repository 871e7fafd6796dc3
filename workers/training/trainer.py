"""Trains a network by the steps of a learner, with average gradients of several processes; resumes where a run stopped.

Knows packed texts; must not know what is trained (`head`, `draft`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from core.errors import ConfigError, StartupError, first_line
from workers.training.packing import KeptStates, PackedTexts, pack, sequences
from workers.training.texts import TrainingText

DECAY = 0.6
"""Last part of the training, in which the learning rate falls to zero."""
WARM_UP = 20
"""Steps in which the learning rate rises."""
MAX_NORM = 1.0
"""Gradients are cut to this norm."""
CHECKPOINT_EVERY = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """How long and how a network is trained."""

    num_steps: int
    length: int = 512
    """Tokens of a sequence."""
    batch: int = 4
    """Sequences of a step."""
    learning_rate: float = 1.5e-3
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate: rises, stays, and falls to zero."""
        rise = min(1.0, (step + 1) / WARM_UP)
        fall = min(1.0, (self.num_steps - step) / max(1.0, DECAY * self.num_steps))
        return self.learning_rate * rise * fall


class Trainable(Protocol):
    """A network in training, and its loss."""

    @property
    def plan(self) -> TrainingPlan: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def num_guesses(self) -> int:
        """Guesses of a row that are counted apart."""

    def num_rows(self, one: PackedTexts) -> int:
        """Rows by which the loss of a step is divided."""

    def loss(self, one: PackedTexts, step: int, hits: Tensor, tried: Tensor) -> Tensor:
        """Sum over rows. Adds to `hits` and `tried` [num_guesses] how many guesses were right, and were made."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Figures of one step of training."""

    step: int
    loss: float
    right: list[float]
    """How often each guess was right, after a right prefix."""


class Trainer:
    """One learner in training."""

    def __init__(self, learner: Trainable) -> None:
        self._learner, self._plan = learner, learner.plan
        self._optimizers = optimizers_of(learner.module)
        self.step = 0

    def train(
        self, texts: Sequence[TrainingText], states: KeptStates | None, done: Callable[[Progress], None], saved: Path
    ) -> None:
        """Train to the plan's last step. Raises: StartupError if the loss is not a number."""
        self._resume(saved)
        batches = self._batches(texts, states)
        while self.step < self._plan.num_steps:
            batch = [next(batches) for _ in range(self._plan.batch)]
            done(self._one_step(batch))
            if self.step % CHECKPOINT_EVERY == 0 or self.step == self._plan.num_steps:
                self._save(saved)

    def _batches(self, texts: Sequence[TrainingText], states: KeptStates | None) -> Iterator[PackedTexts]:
        """Endless; begins with what the next step reads in a training that never stopped."""
        plan = self._plan
        orders = (random.Random(f"{plan.seed} {epoch}") for epoch in count())  # noqa: S311
        chosen = chain.from_iterable(sequences(texts, plan.length, order) for order in orders)
        for each in islice(chosen, self.step * plan.batch, None):
            yield pack(texts, each, plan.length, states)

    def _one_step(self, batch: Sequence[PackedTexts]) -> Progress:
        for group in (group for each in self._optimizers for group in each.param_groups):
            group["lr"] = self._plan.rate(self.step)
        torch.manual_seed(self._plan.seed * 1_000_003 + self.step)  # a resumed training makes the same draws
        learner, loss = self._learner, 0.0
        hits, tried = torch.zeros(2, learner.num_guesses)
        num = max(1, sum(map(learner.num_rows, batch)))
        for each in batch:
            part = learner.loss(each, self.step, hits, tried) / num
            part.backward()  # type: ignore[no-untyped-call]  # torch's types
            loss += float(part.detach())
        _average_gradients(learner.module)
        norm = torch.nn.utils.clip_grad_norm_(learner.module.parameters(), MAX_NORM)
        if not bool(norm.isfinite()):
            raise StartupError(
                f"training step {self.step}: the loss or its gradient is not a number; lower --learning-rate"
            )
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return Progress(self.step, loss, (hits / tried.clamp(min=1)).tolist())

    def _save(self, file: Path) -> None:
        if distributed.is_initialized() and distributed.get_rank():
            return
        kept = {"weights": self._learner.module.state_dict(), "step": self.step}
        kept["optimizers"] = [each.state_dict() for each in self._optimizers]
        partial = file.with_suffix(".partial")
        torch.save(kept, partial)
        partial.rename(file)

    def _resume(self, file: Path) -> None:
        if file.exists():
            kept = torch.load(file, map_location=_device_of(self._learner.module), weights_only=True)
            if kept["step"] > self._plan.num_steps:
                raise ConfigError(
                    f"--steps {self._plan.num_steps}: the training in {file.parent} has made {kept['step']}; give as "
                    "many at least, or name another --work"
                )
            try:
                self._learner.module.load_state_dict(kept["weights"])
            except (RuntimeError, KeyError) as error:
                raise StartupError(f"{file} is of another model; remove it, or name another --work") from error
            for optimizer, state in zip(self._optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step = kept["step"]


def optimizers_of(module: nn.Module, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for embeddings, the output layer and all else; one learning rate for both.

    Muon needs far fewer steps for the same loss, which matters in short runs. Its update is scaled to the size of
    AdamW's. Source: arXiv 2502.16982.
    """
    tables = [each.weight for each in module.modules() if isinstance(each, nn.Embedding)]
    if isinstance(module, PreTrainedModel):
        tables.append(module.get_output_embeddings().weight)
    is_table = {id(each) for each in tables}
    matrices = [each for each in module.parameters() if each.dim() == 2 and id(each) not in is_table]
    decayed = [each for each in module.parameters() if each.dim() > 2 or id(each) in is_table]
    vectors = [each for each in module.parameters() if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW([each for each in groups if each["params"]], lr=0.0, betas=(0.9, 0.95), fused=True)
    if not matrices:
        return [adam]
    return [torch.optim.Muon(matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"), adam]


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its mean over all processes."""
    if not distributed.is_initialized():
        return
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    try:
        distributed.all_reduce(flat)
    except RuntimeError as error:
        raise StartupError(f"another process of the training has ended: {first_line(error)}") from error
    flat /= distributed.get_world_size()
    for each, part in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
        each.copy_(part.view_as(each))
