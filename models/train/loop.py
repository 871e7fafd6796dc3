"""The training loop: steps until the time is spent, with a checkpoint every two minutes."""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from models.train.checkpoints import Progress, resume, save_checkpoint
from models.train.objectives import Objective
from models.train.schedule import Schedule
from models.train.stream import training_windows
from workers.training import optimizers_of

logger = logging.getLogger(__name__)

CHECKPOINT_EVERY_S: Final = 120.0
REPORT_EVERY_STEPS: Final = 25
GRADIENT_NORM: Final = 1.0
WEIGHT_DECAY: Final = 0.1
LOSS_MEMORY: Final = 0.95


@dataclass(frozen=True)
class Run:
    """The constant inputs of one model's training."""

    model: Any
    objective: Objective
    stream: Tensor  # [N]
    schedule: Schedule
    checkpoint: Path
    seed: int
    device: torch.device
    is_bf16: bool
    clock: Callable[[], float] = time.monotonic  # s; the schedule is a duration, so the clock limits the steps


def train(run: Run) -> Progress:
    """Train until the schedule's time is spent, resuming from the checkpoint if there is one."""
    run.model.to(run.device).train()
    optimizers = optimizers_of(run.model, WEIGHT_DECAY)
    progress = resume(run.checkpoint, run.model, optimizers)
    saved_s = progress.elapsed_s
    while run.schedule.share(progress.elapsed_s) < 1:
        take_step(run, optimizers, progress)
        if progress.step % REPORT_EVERY_STEPS == 0:
            report(run, progress)
        if progress.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
            save_checkpoint(run.checkpoint, run.model, optimizers, progress)
            saved_s = progress.elapsed_s
    save_checkpoint(run.checkpoint, run.model, optimizers, progress)
    return progress


def take_step(run: Run, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Make one update, and add its time, tokens and loss to `progress`."""
    started = run.clock()
    length, rows = run.schedule.window(progress.elapsed_s)
    windows = training_windows(run.stream, length, rows, progress.step, run.seed).to(run.device)
    loss = update(run, optimizers, windows, run.schedule.learning_rate(progress.elapsed_s))
    progress.step += 1
    progress.tokens += windows.numel()
    progress.loss = loss if progress.step == 1 else LOSS_MEMORY * progress.loss + (1 - LOSS_MEMORY) * loss
    progress.elapsed_s += run.clock() - started


def update(run: Run, optimizers: list[torch.optim.Optimizer], windows: Tensor, learning_rate: float) -> float:
    """Update the weights once. Return the loss before the update."""
    for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        group["lr"] = learning_rate
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.is_bf16):
        loss = run.objective(run.model, windows)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), GRADIENT_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def report(run: Run, progress: Progress) -> None:
    """Log the state of the run and its remaining time."""
    remaining_min = run.schedule.minutes - progress.elapsed_s / 60
    logger.info(
        "step %d  loss %.3f  lr %.2e  epoch %.2f  %.0f tokens/s  %.1f min to go",
        progress.step,
        progress.loss,
        run.schedule.learning_rate(progress.elapsed_s),
        progress.tokens / len(run.stream),
        progress.tokens / progress.elapsed_s,
        remaining_min,
    )
