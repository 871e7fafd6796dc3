"""Trains an EAGLE-3 head by its own unrolled steps (training-time test); resumes where an earlier run stopped.

Knows the head, packed texts and the target's embeddings and output layer; must not know how either was made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from core.errors import StartupError, first_line
from workers.training.eagle3 import Eagle3
from workers.training.features import TargetStates
from workers.training.objective import TEMPERATURE, AcceptedMass, SoftCrossEntropy
from workers.training.packing import PackedTexts, packed
from workers.training.texts import TrainingText

STEP_WEIGHT = 0.8
"""Weight of each unrolled step's loss in that of the one before; SpecForge's."""
DECAY = 0.6
"""Last part of the training, in which the learning rate falls to zero."""
WARM_UP = 20
"""Steps in which the learning rate rises."""
MAX_NORM = 1.0
"""Gradients are cut to this norm."""
CHECKPOINT_EVERY = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """How long and how a head is trained."""

    num_steps: int
    unrolled: int = 3
    """Steps of a chain."""
    length: int = 512
    """Tokens of a sequence."""
    batch: int = 4
    """Sequences of a step."""
    learning_rate: float = 1.5e-3
    mass_from: float = 0.65
    """Part of the steps after which the loss is accepted mass, not cross entropy."""
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate: rises, stays, and falls to zero."""
        rise = min(1.0, (step + 1) / WARM_UP)
        fall = min(1.0, (self.num_steps - step) / max(1.0, DECAY * self.num_steps))
        return self.learning_rate * rise * fall


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's layers around the head, for the draft's vocabulary."""

    embeddings: Tensor  # [V, hidden]
    output: Tensor
    """Rows of the draft's vocabulary.  # [D, hidden]"""
    draft_ids: Tensor
    """Of each token of the target, in the draft's vocabulary; -1 for tokens outside.  # [V]"""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of some steps of training."""

    step: int
    loss: float
    right: list[float]
    """How often the first guess is the text's token, by depth, after a right prefix."""


class Trainer:
    """One head in training."""

    def __init__(self, head: Eagle3, teacher: Teacher, plan: TrainingPlan, device: torch.device) -> None:
        self._head, self._teacher, self._plan, self._device = head, teacher, plan, device
        self._optimizers = _optimizers(head, plan.learning_rate)
        self.step = 0

    def train(
        self, texts: Sequence[TrainingText], states: TargetStates, done: Callable[[Progress], None], saved: Path
    ) -> None:
        """Train to the plan's last step. Raises: StartupError if the loss is not a number."""
        self._resume(saved)
        batches = self._batches(texts, states)
        while self.step < self._plan.num_steps:
            batch = [next(batches) for _ in range(self._plan.batch)]
            done(self._one_step(batch))
            if self.step % CHECKPOINT_EVERY == 0 or self.step == self._plan.num_steps:
                self._save(saved)

    def _batches(self, texts: Sequence[TrainingText], states: TargetStates) -> Any:
        epoch = 0
        while True:
            order = random.Random(f"{self._plan.seed} {self.step} {epoch}")  # noqa: S311  # after a resume: another order
            yield from packed(texts, states, self._plan.length, order)
            epoch += 1

    def _one_step(self, batch: Sequence[PackedTexts]) -> Progress:
        for group in (group for each in self._optimizers for group in each.param_groups):
            group["lr"] = self._plan.rate(self.step)
        loss, hits, tried = 0.0, torch.zeros(self._plan.unrolled), torch.zeros(self._plan.unrolled)
        num = max(1, sum(int(each.taught(2).sum()) for each in batch))
        for each in batch:
            part = self._loss(each, hits, tried) / num
            part.backward()  # type: ignore[no-untyped-call]  # torch's types
            loss += float(part.detach())
        _average_gradients(self._head)
        norm = torch.nn.utils.clip_grad_norm_(self._head.parameters(), MAX_NORM)
        if not bool(norm.isfinite()):
            raise StartupError(
                f"training step {self.step}: the loss or its gradient is not a number; lower --learning-rate"
            )
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return Progress(self.step, loss, (hits / tried.clamp(min=1)).tolist())

    def _loss(self, one: PackedTexts, hits: Tensor, num: Tensor) -> Tensor:
        # The target's distribution teaches at prompts' tokens, too; only those to be guessed are counted as right.
        total = torch.zeros((), device=self._device)
        teacher, plan = self._teacher, self._plan
        outputs = unrolled(self._head, one, teacher, plan.unrolled)
        is_mass = self.step >= plan.mass_from * plan.num_steps
        objective, probs = (
            (AcceptedMass if is_mass else SoftCrossEntropy),
            self._probs(one, TEMPERATURE if is_mass else 1.0),
        )
        stands = torch.ones(len(one.token_ids), dtype=torch.bool)
        for step, output in enumerate(outputs):
            token_ids = torch.roll(teacher.draft_ids[one.token_ids], -2 - step)
            rows = (one.taught(2 + step) & (token_ids >= 0)).nonzero().flatten()
            states = self._head.normed(output[0][rows.to(self._device)])
            taught = probs[rows.to(self._device) + 1 + step]
            loss, guesses = objective.apply(states, teacher.output, taught)  # type: ignore[no-untyped-call]
            total = total + STEP_WEIGHT**step * loss
            is_right = torch.zeros_like(stands)
            is_right[rows] = guesses.cpu() == token_ids[rows]
            counted = one.ahead(2 + step)
            num[step] += int((stands & counted).sum())
            stands &= is_right
            hits[step] += int((stands & counted).sum())
        return total

    def _probs(self, one: PackedTexts, temperature: float) -> Tensor:
        """The target's distribution after each row, over the draft's vocabulary.  # [S, D]"""
        output = self._teacher.output
        last = one.states[:, -output.shape[1] :].to(self._device, output.dtype)
        with torch.no_grad():
            return ((last @ output.T).float() / temperature).softmax(-1)

    def _save(self, file: Path) -> None:
        if distributed.is_initialized() and distributed.get_rank():
            return
        kept = {"head": self._head.state_dict(), "step": self.step}
        kept["optimizers"] = [each.state_dict() for each in self._optimizers]
        partial = file.with_suffix(".partial")
        torch.save(kept, partial)
        partial.rename(file)

    def _resume(self, file: Path) -> None:
        if file.exists():
            kept = torch.load(file, map_location=self._device, weights_only=True)
            try:
                self._head.load_state_dict(kept["head"])
            except RuntimeError as error:
                raise StartupError(f"{file} is of another head; remove it, or name another --work") from error
            for optimizer, state in zip(self._optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step = kept["step"]


def _optimizers(head: Eagle3, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices, whose updates then have the size of AdamW's; AdamW for norms."""
    matrices = [each for each in head.parameters() if each.dim() == 2]
    norms = [each for each in head.parameters() if each.dim() < 2]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(norms, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]


def unrolled(head: Eagle3, one: PackedTexts, teacher: Teacher, num_steps: int) -> Iterator[Tensor]:
    """The head's outputs at each row of a packed sequence, by step.  # [1, S, hidden] each"""
    device = teacher.output.device
    features = one.states[None, :, : -teacher.output.shape[1]].to(device)
    embedded = [teacher.embeddings[torch.roll(one.token_ids, -1 - step)][None].to(device) for step in range(num_steps)]
    with torch.autocast(device.type, torch.bfloat16, enabled=teacher.output.dtype == torch.bfloat16):
        yield from head.unrolled(
            features.to(teacher.output.dtype),
            embedded,
            one.positions[None].to(device),
            one.mask()[None, None].to(device),
        )


def _average_gradients(head: Eagle3) -> None:
    """Over all processes that train."""
    if not distributed.is_initialized():
        return
    gradients = [parameter.grad for parameter in head.parameters() if parameter.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    try:
        distributed.all_reduce(flat)
    except RuntimeError as error:
        raise StartupError(f"another process of the training has ended: {first_line(error)}") from error
    flat /= distributed.get_world_size()
    for each, part in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
        each.copy_(part.view_as(each))
