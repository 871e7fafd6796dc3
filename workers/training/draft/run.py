"""Makes a draft by distillation from its target: from a checkpoint or a size, with held-out figures and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.config import EngineConfig
from core.errors import UnsupportedModel, VocabularyMismatch
from workers.model import check_checkpoint, copy_settings, digest_of, quiet_transformers, reference_model
from workers.training.draft.card import write_card
from workers.training.draft.distillation import (
    DraftAgreement,
    DraftLearner,
    DraftPlan,
    check_packing,
    measure_agreement,
)
from workers.training.job import TrainingJob, Watcher, digest, met, prepared, spread
from workers.training.license import license_of
from workers.training.texts import by_kind, held_out, trained
from workers.training.trainer import Trainer
from workers.vocabulary import check_same_vocabulary, num_rows, read_vocabulary

HEAD_DIM, SMALL_HEAD_DIM = 64, 32
"""Width of an attention head of a new draft; the second one below a width of `WIDE`."""
WIDE = 512
INNER_RATIO = 3
"""Inner width of a new draft's layers over their width."""

Found = Mapping[tuple[str, float], DraftAgreement]
"""Agreement by kind of text and the temperature at which the target drew it."""


@dataclass(frozen=True, slots=True)
class DraftSize:
    """A new draft: a Llama of this size, with random weights."""

    num_layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.num_layers}x{self.width}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftJob(TrainingJob):
    """One draft to be made."""

    plan: DraftPlan
    draft: Path | DraftSize
    """The checkpoint that training starts from, or the size of a model with new weights."""


def make_draft(job: DraftJob, out: Path, command: str, watcher: Watcher) -> tuple[Found, Found]:
    """Train the draft of `job` and write its checkpoint. Returns its figures before and after.

    Raises: StartupError.
    """
    job = prepared(job)
    _check_draft(job)
    draft, before, after = spread(_trained, job, watcher)
    _write(out, draft, job)
    own = trained(job.texts)
    write_card(
        out,
        before,
        after,
        **_licenses(job),
        target=Path(job.target.model).name,
        start=_start_of(job),
        command=command,
        num_texts=len(own),
        num_tokens=sum(min(len(text.token_ids), job.plan.length) for text in own),
        steps=job.plan.num_steps,
        objective=job.plan.objective,
        temperature=job.plan.temperature,
    )
    return before, after


def _check_draft(job: DraftJob) -> None:
    """Raises: StartupError for a draft that cannot be trained, or has other tokens than the target."""
    if isinstance(job.draft, DraftSize):
        return
    check_checkpoint(EngineConfig(str(job.draft)))
    target = Path(job.target.model)
    check_same_vocabulary(target, job.draft)
    num_tokens = 1 + max(read_vocabulary(target))
    if min(num_tokens, num_rows(target)) > num_rows(job.draft):
        raise VocabularyMismatch(
            f"draft and target do not share a vocabulary: vocab_size is {num_rows(job.draft)} in {job.draft}, "
            f"but {target} has {num_tokens} tokens"
        )


def _trained(job: DraftJob, rank: int, watcher: Watcher) -> tuple[Any, Found, Found]:
    """This process's part of the training."""
    with met(job, rank) as config:
        target = reference_model(config).requires_grad_(False)
        draft = _first(job, config.device, target.config)
        check_packing(target, "--target")
        check_packing(draft, "--draft")
        before = {} if rank else _measured(job, target, draft)
        own = trained(job.texts)
        Trainer(DraftLearner(draft, target, job.plan)).train(
            own[rank :: job.num_processes], None, watcher.trained, job.work / f"checkpoint-{_digest(job)}.pt"
        )
    for each in draft.parameters():
        each.data = each.data.bfloat16().float()  # as the file has it
    return draft, before, {} if rank else _measured(job, target, draft)


def _digest(job: DraftJob) -> str:
    start = job.draft if isinstance(job.draft, DraftSize) else digest_of(EngineConfig(str(job.draft)))
    texts = [text.token_ids for text in trained(job.texts)]
    return digest(texts, str(start), job.plan.objective, job.plan.temperature)


def _first(job: DraftJob, device: str, target: Any) -> Any:
    """The draft in float32, with the weights that the training starts from. `target`: the target's configuration."""
    if isinstance(job.draft, DraftSize):
        torch.manual_seed(job.plan.seed)
        return LlamaForCausalLM(_config_of(job.draft, target)).to(device).eval()
    draft = reference_model(EngineConfig(str(job.draft), device=device))
    if draft.config.is_encoder_decoder:
        raise UnsupportedModel(f"--draft: {type(draft).__name__} has an encoder; only decoders are trained")
    for each in draft.parameters():
        each.data = each.data.clone()  # they may lie in the checkpoint's file
    return draft.requires_grad_(True)


def _config_of(size: DraftSize, target: Any) -> LlamaConfig:
    head_dim = HEAD_DIM if size.width >= WIDE else SMALL_HEAD_DIM
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=size.width,
        intermediate_size=INNER_RATIO * size.width,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.width // head_dim,
        num_key_value_heads=size.width // head_dim,
        max_position_embeddings=getattr(target, "max_position_embeddings", 2048),
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=None,
        tie_word_embeddings=True,
    )


def _measured(job: DraftJob, target: Any, draft: Any) -> Found:
    groups = by_kind(held_out(job.texts)).items()
    return {group: measure_agreement(target, draft, texts, job.plan.length) for group, texts in groups}


def _write(out: Path, draft: Any, job: DraftJob) -> None:
    """Write a checkpoint in bfloat16, with the tokenizer and settings of the draft's own, or else of the target's."""
    with quiet_transformers():
        draft.to(torch.bfloat16).save_pretrained(out)
    copy_settings(Path(job.target.model) if isinstance(job.draft, DraftSize) else job.draft, out)


def _licenses(job: DraftJob) -> dict[str, str]:
    """The card's licence fields. The draft's own licence is that of the checkpoint it starts from, or else the
    target's."""
    made_from = [Path(job.target.model), *([job.draft] if isinstance(job.draft, Path) else [])]
    found = [(path.resolve().name, license_of(path)) for path in made_from]
    return {"license": found[-1][1], "licenses": ", ".join(f"{name}: {each}" for name, each in found)}


def _start_of(job: DraftJob) -> str:
    if isinstance(job.draft, DraftSize):
        return f"a new Llama of {job.draft.num_layers} layers, {job.draft.width} wide"
    return job.draft.resolve().name
