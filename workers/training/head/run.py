"""Makes an EAGLE-3 head, or Medusa's: target passes, training in one or several processes, held-out figures, files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from workers.model import reference_model
from workers.training.head.acceptance import Acceptance, measured, ranks_of
from workers.training.head.eagle3 import Eagle3
from workers.training.head.features import check_logits, read_states, tapped
from workers.training.head.medusa import MedusaHeads
from workers.training.head.starting import first_weights, shape_of
from workers.training.head.teaching import HeadLearner, HeadPlan, Steps, Teacher
from workers.training.head.unrolling import unrolled
from workers.training.head.writer import write_card, write_head, write_medusa
from workers.training.job import TrainingJob, Watcher, digest, met, prepared, spread
from workers.training.license import license_of
from workers.training.packing import packed
from workers.training.texts import by_kind, choose_vocabulary, held_out, trained
from workers.training.trainer import Trainer

MEASURED_DEPTH = 5
"""Guesses of an EAGLE-3 head's chain in the card's figures, at least."""
Kind = Literal["eagle3", "medusa"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadJob(TrainingJob):
    """One head to be made."""

    plan: HeadPlan
    num_draft_tokens: int
    """Tokens that can be guessed; Medusa's heads guess all."""
    kind: Kind = "eagle3"
    """Medusa has a head for each guess of a chain."""
    borrows_output: bool = False
    """Whether the head's file has no output layer, because its rows are the target's own."""


def make_head(job: HeadJob, out: Path, command: str, watcher: Watcher) -> dict[tuple[str, float], Acceptance]:
    """Train the head of `job` and write its directory. Returns its figures by kind of text and temperature.

    Raises: StartupError.
    """
    job = prepared(job)
    model, head, steps, teacher, vocabulary = spread(_trained, job, watcher)
    found = _held_out(job, model, steps, teacher)
    if isinstance(head, Eagle3):
        output = None if job.borrows_output else teacher.output
        write_head(out, head.shape, model.config, head.tensors(), vocabulary, output)
    else:
        write_medusa(out, head.tensors(), job.plan.unrolled, Path(job.target.model).name)
    write_card(out, found, isinstance(head, Eagle3), **_facts(job, model, vocabulary, command))
    return found


def _trained(job: HeadJob, rank: int, watcher: Watcher) -> tuple[Any, Eagle3 | MedusaHeads, Steps, Teacher, list[int]]:
    """This process's part of the training."""
    with met(job, rank) as config:
        model = reference_model(config)
        model.requires_grad_(False)
        check_logits(model)
        own = trained(job.texts)[rank :: job.num_processes]
        states = read_states(model, own, job.work, watcher.read)
        vocabulary = _vocabulary_of(job, model.config.vocab_size)
        teacher = teacher_of(model, vocabulary)
        head, steps = _head_of(job, model, teacher)
        made_of = [text.token_ids for text in trained(job.texts)], vocabulary, *_named(job)
        saved = job.work / f"checkpoint-{digest(*made_of)}.pt"
        Trainer(HeadLearner(head, steps, teacher, job.plan)).train(own, states, watcher.trained, saved)
    return model, head, steps, teacher, vocabulary


def _vocabulary_of(job: HeadJob, vocab_size: int) -> list[int]:
    if job.kind == "medusa":
        return list(range(vocab_size))
    return choose_vocabulary(trained(job.texts), min(job.num_draft_tokens, vocab_size))


def _named(job: HeadJob) -> tuple[object, ...]:
    """Sizes of a head that its vocabulary does not say."""
    return () if job.kind == "eagle3" else (job.kind, job.plan.unrolled)


def _head_of(job: HeadJob, model: Any, teacher: Teacher) -> tuple[Eagle3 | MedusaHeads, Steps]:
    """The head with its first weights, and how it guesses."""
    if job.kind == "medusa":
        heads = MedusaHeads(teacher.output, job.plan.unrolled).to(model.device)
        return heads, heads.steps
    shape = shape_of(model)
    head = Eagle3(shape, first_weights(model, shape)).to(model.device)
    return head, partial(unrolled, head, teacher)


def teacher_of(model: Any, vocabulary: Sequence[int]) -> Teacher:
    """The target's embeddings, and the rows of its output layer for these tokens."""
    embeddings, output = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    chosen = torch.tensor(vocabulary)
    draft_ids = torch.full((len(embeddings),), -1)
    draft_ids[chosen] = torch.arange(len(chosen))
    return Teacher(embeddings, output[chosen.to(output.device)].clone(), draft_ids)


def _held_out(job: HeadJob, model: Any, steps: Steps, teacher: Teacher) -> dict[tuple[str, float], Acceptance]:
    output, generator = model.get_output_embeddings().weight.detach(), torch.Generator().manual_seed(job.plan.seed)
    found = {}
    for (kind, temperature), texts in by_kind(held_out(job.texts)).items():
        parts = list(packed(texts, read_states(model, texts, job.work), job.plan.length))
        depth = job.plan.unrolled if job.kind == "medusa" else max(job.plan.unrolled, MEASURED_DEPTH)
        ranks = [ranks_of(steps, one, teacher, output, temperature, depth, generator) for one in parts]
        found[kind, temperature] = measured(zip(parts, ranks, strict=True), depth)
    return found


def _facts(job: HeadJob, model: Any, vocabulary: Sequence[int], command: str) -> dict[str, Any]:
    own = trained(job.texts)
    return {
        "target": Path(job.target.model).name,
        "license": license_of(Path(job.target.model)),
        "layers": ", ".join(map(str, tapped(model.config.num_hidden_layers))),
        "borrowed": ", and so is the output layer" if job.borrows_output else "",
        "num_draft": len(vocabulary),
        "num_vocab": model.config.vocab_size,
        "command": command,
        "num_texts": len(own),
        "num_tokens": sum(int(text.guessed()[: job.plan.length].sum()) for text in own),
        "steps": job.plan.num_steps,
        "unrolled": job.plan.unrolled,
    }
