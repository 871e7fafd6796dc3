"""Makes an EAGLE-3 head: passes of the target, training in one or several processes, held-out figures, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from core.config import EngineConfig
from core.errors import ConfigError, StartupError
from workers.model import check_checkpoint, digest_of, reference_model
from workers.training.acceptance import Acceptance, measured, ranks_of
from workers.training.eagle3 import Eagle3
from workers.training.features import check_logits, digest, read_states, tapped
from workers.training.packing import packed
from workers.training.starting import first_weights, shape_of
from workers.training.texts import TrainingText, choose_vocabulary, held_out, trained
from workers.training.trainer import Progress, Teacher, Trainer, TrainingPlan
from workers.training.writer import write_card, write_head

MEASURED_DEPTH = 5
"""Guesses of a chain in the card's figures, at least."""
MEETING = "processes"
"""File in the work directory by which processes find each other."""
LAST_WORDS_S = 5.0
"""How long another process may take to end."""
TIMEOUT = timedelta(hours=12)
"""One process may still run the target over its texts while another is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadJob:
    """One head to be made."""

    target: EngineConfig
    texts: Sequence[TrainingText] = field(repr=False)
    plan: TrainingPlan
    num_draft_tokens: int
    work: Path
    """Folder of the target's states and of the training's checkpoint; a second run goes on from there if it has the
    same target, texts and vocabulary."""
    num_processes: int = 1
    borrows_output: bool = False
    """Whether the head's file has no output layer, because its rows are the target's own."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Calls of the first process about what is done."""

    read: Callable[[], None] = lambda: None
    """One text was read by the target."""
    trained: Callable[[Progress], None] = lambda _: None
    """One step of training."""


def make_head(job: HeadJob, out: Path, command: str, watcher: Watcher) -> dict[tuple[str, float], Acceptance]:
    """Train the head of `job` and write its directory. Returns its figures by kind of text and temperature.

    Raises: StartupError.
    """
    if not all(any(text.spans for text in part(job.texts)) for part in (trained, held_out)):
        raise ConfigError("--data: too few texts: some must be held out, and the others have no token to be guessed")
    check_checkpoint(job.target)
    job = replace(job, work=job.work / digest(digest_of(job.target), job.target.dtype))
    job.work.mkdir(parents=True, exist_ok=True)
    (job.work / MEETING).unlink(missing_ok=True)
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=_other, args=(job, rank), daemon=True) for rank in range(1, job.num_processes)]
    for each in others:
        each.start()
    try:
        model, head, teacher, vocabulary = _trained(job, 0, watcher)
    finally:
        for each in others:
            each.join(LAST_WORDS_S)
            each.terminate()
    found = _held_out(job, model, head, teacher)
    output = None if job.borrows_output else teacher.output
    write_head(out, head.shape, model.config, head.tensors(), vocabulary, output)
    write_card(out, found, **_facts(job, model, vocabulary, command))
    return found


def _other(job: HeadJob, rank: int) -> None:
    with suppress(StartupError):  # the first process says it
        _trained(job, rank, Watcher())


def _trained(job: HeadJob, rank: int, watcher: Watcher) -> tuple[Any, Eagle3, Teacher, list[int]]:
    """This process's part of the training."""
    config = job.target
    if config.device == "cuda" and job.num_processes > 1:
        config = replace(config, device=f"cuda:{rank}")
    torch.set_num_threads(config.num_threads)
    with _met(job, rank, torch.device(config.device)):
        model = reference_model(config)
        model.requires_grad_(False)
        check_logits(model)
        own = trained(job.texts)[rank :: job.num_processes]
        states = read_states(model, own, job.work, watcher.read)
        vocabulary = choose_vocabulary(trained(job.texts), min(job.num_draft_tokens, model.config.vocab_size))
        teacher, shape = teacher_of(model, vocabulary), shape_of(model)
        head = Eagle3(shape, first_weights(model, shape)).to(model.device)
        saved = job.work / f"checkpoint-{digest([text.token_ids for text in trained(job.texts)], vocabulary)}.pt"
        Trainer(head, teacher, job.plan, model.device).train(own, states, watcher.trained, saved)
    return model, head, teacher, vocabulary


@contextmanager
def _met(job: HeadJob, rank: int, device: torch.device) -> Iterator[None]:
    """Connect the processes within the `with` block. They meet before any has much to do, since the end of one is
    noticed only by those that it has met."""
    if job.num_processes == 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    place = f"file://{(job.work / MEETING).resolve()}"
    distributed.init_process_group(backend, init_method=place, rank=rank, world_size=job.num_processes, timeout=TIMEOUT)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def teacher_of(model: Any, vocabulary: Sequence[int]) -> Teacher:
    """The target's embeddings, and the rows of its output layer for these tokens."""
    embeddings, output = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    chosen = torch.tensor(vocabulary)
    draft_ids = torch.full((len(embeddings),), -1)
    draft_ids[chosen] = torch.arange(len(chosen))
    return Teacher(embeddings, output[chosen.to(output.device)].clone(), draft_ids)


def _held_out(job: HeadJob, model: Any, head: Eagle3, teacher: Teacher) -> dict[tuple[str, float], Acceptance]:
    output, generator = model.get_output_embeddings().weight.detach(), torch.Generator().manual_seed(job.plan.seed)
    groups: dict[tuple[str, float], list[TrainingText]] = {}
    for text in held_out(job.texts):
        groups.setdefault((text.kind, text.temperature), []).append(text)
    found = {}
    for (kind, temperature), texts in sorted(groups.items()):
        parts = list(packed(texts, read_states(model, texts, job.work), job.plan.length))
        depth = max(job.plan.unrolled, MEASURED_DEPTH)
        ranks = [ranks_of(head, one, teacher, output, temperature, depth, generator) for one in parts]
        found[kind, temperature] = measured(zip(parts, ranks, strict=True), depth)
    return found


def _facts(job: HeadJob, model: Any, vocabulary: Sequence[int], command: str) -> dict[str, Any]:
    own = trained(job.texts)
    return {
        "target": Path(job.target.model).name,
        "layers": ", ".join(map(str, tapped(model.config.num_hidden_layers))),
        "borrowed": ", and so is the output layer" if job.borrows_output else "",
        "num_draft": len(vocabulary),
        "num_vocab": model.config.vocab_size,
        "command": command,
        "num_texts": len(own),
        "num_tokens": sum(int(text.guessed().sum()) for text in own),
        "steps": job.plan.num_steps,
        "unrolled": job.plan.unrolled,
    }
