"""A training and its work directory; processes that share it start, meet and end together."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, multiprocessing

from core.config import EngineConfig
from core.errors import ConfigError, StartupError, first_line
from workers.model import check_checkpoint, digest_of
from workers.training.texts import TrainingText, held_out, trained
from workers.training.trainer import Progress, TrainingPlan

MEETING = "processes"
"""File in the work directory by which processes find each other."""
LAST_WORDS_S = 5.0
"""How long another process may take to end."""
TIMEOUT = timedelta(hours=12)
"""One process may still run the target over its texts while another is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A training for one target."""

    target: EngineConfig
    texts: Sequence[TrainingText] = field(repr=False)
    plan: TrainingPlan
    work: Path
    """Folder of what the training keeps; a second run goes on from there if it is of the same target, texts and
    settings."""
    num_processes: int = 1


@dataclass(frozen=True, slots=True)
class Watcher:
    """Calls of the first process about what is done."""

    read: Callable[[], None] = lambda: None
    """One text was read by the target."""
    trained: Callable[[Progress], None] = lambda _: None
    """One step of training."""


AnyJob = TypeVar("AnyJob", bound=TrainingJob)
Trained = TypeVar("Trained")


def digest(*values: object) -> str:
    """Part of the name of a file that is made of these values alone."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def prepared(job: AnyJob) -> AnyJob:
    """Check the job, and make the folder of its target in the work directory. Raises: StartupError."""
    if not all(any(text.spans for text in part(job.texts)) for part in (trained, held_out)):
        raise ConfigError("--data: too few texts: some must be held out, and the others have no token to be guessed")
    check_device(job.target.device, job.num_processes)
    check_checkpoint(job.target)
    job = replace(job, work=_folder_of(job))
    try:
        job.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--work: {job.work} cannot be made: {error.strerror}") from error
    return job


def delete_work(job: TrainingJob) -> None:
    """Delete what trainings of this target keep in the work directory, and the directory if nothing else is in it."""
    shutil.rmtree(_folder_of(job), ignore_errors=True)
    with suppress(OSError):
        job.work.rmdir()


def _folder_of(job: TrainingJob) -> Path:
    return job.work / digest(digest_of(job.target), job.target.dtype)


def check_device(device: str, num_processes: int = 1) -> None:
    """Raises: ConfigError unless torch knows the device, and each process has a GPU of its own if it is one."""
    try:
        given = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device: {first_line(error)}") from error
    if given.type != "cuda":
        return
    if given.index is not None and num_processes > 1:
        raise ConfigError(
            f"--device {device} is one GPU for {num_processes} processes; --device cuda takes one for each"
        )
    if num_processes > torch.cuda.device_count():
        raise ConfigError(
            f"--device {device}: --processes {num_processes}, but torch finds {torch.cuda.device_count()} GPUs"
        )


def spread(part: Callable[[AnyJob, int, Watcher], Trained], job: AnyJob, watcher: Watcher) -> Trained:
    """Run `part` with each rank in a process of its own, the first in this one, and return its result."""
    (job.work / MEETING).unlink(missing_ok=True)
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=_other, args=(part, job, rank), daemon=True) for rank in range(1, job.num_processes)]
    for each in others:
        each.start()
    try:
        return part(job, 0, watcher)
    finally:
        for each in others:
            each.join(LAST_WORDS_S)
            each.terminate()


def _other(part: Callable[[AnyJob, int, Watcher], Any], job: AnyJob, rank: int) -> None:
    with suppress(StartupError):  # the first process says it
        part(job, rank, Watcher())


@contextmanager
def met(job: TrainingJob, rank: int) -> Iterator[EngineConfig]:
    """Connect the processes within the `with` block; yields the target's settings for this one. They meet before any
    has much to do, since the end of one is noticed only by those that it has met."""
    config = job.target
    torch.set_num_threads(config.num_threads)
    if job.num_processes == 1:
        yield config
        return
    is_gpu = torch.device(config.device).type == "cuda"
    place = f"file://{(job.work / MEETING).resolve()}"
    distributed.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=place,
        rank=rank,
        world_size=job.num_processes,
        timeout=TIMEOUT,
    )
    try:
        yield replace(config, device=f"cuda:{rank}") if is_gpu else config
    finally:
        distributed.destroy_process_group()
