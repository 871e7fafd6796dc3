"""Trains a copy of a draft on kept texts, and measures it.

Knows one model and texts; must not know where either is served.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import StartupError, first_line
from workers.live.buffer import KeptText
from workers.live.loss import missed_loss

MAX_NORM = 1.0
"""Gradients are cut to this norm."""
MAX_ROWS = 2048
"""Most tokens of a pass: the logits of a large vocabulary are 1.2 GB."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningPlan:
    """How a draft is trained in one round."""

    num_steps: int = 100
    batch: int = 16
    """Texts of a step."""
    learning_rate: float = 1e-4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often a draft guesses the target's token, by passes over whole texts."""

    share: float
    """Share of all tokens that the target chose."""
    missed_share: float
    """Share of the places where no guess was right."""
    loss: float
    """The divergence from the target at missed places, in nats a token, which training minimizes."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Texts side by side, and what they are learnt from. Rows count all tokens of the batch."""

    token_ids: Tensor  # [B, S]
    mask: Tensor  # [B, S]
    missed: Tensor
    """Rows before the missed places.  # [N]"""
    top_ids: Tensor  # [N, K]
    top_logprobs: Tensor  # [N, K]
    right: Tensor
    """Rows before the other tokens that the target chose.  # [M]"""

    @classmethod
    def of(cls, texts: Sequence[KeptText], device: torch.device) -> _Batch:
        length = max(len(text.token_ids) for text in texts)
        padded = torch.tensor([text.token_ids + [0] * (length - len(text.token_ids)) for text in texts])
        sizes = torch.tensor([len(text.token_ids) for text in texts])
        missed = [index * length + each - 1 for index, text in enumerate(texts) for each in text.missed]
        chosen = [
            index * length + each - 1
            for index, text in enumerate(texts)
            for each in range(text.first, len(text.token_ids))
        ]
        tops = [top for text in texts for top in text.top_ids], [top for text in texts for top in text.top_logprobs]
        rows = (torch.tensor(each, dtype=torch.long) for each in (missed, sorted(set(chosen) - set(missed))))
        missed_rows, right_rows = rows
        mask = torch.arange(length) < sizes[:, None]
        tensors = padded, mask, missed_rows, *map(torch.tensor, tops), right_rows
        return cls(*(each.to(device) for each in tensors))

    def scores(self, model: Any) -> Tensor:
        """Logits of each row.  # [B * S, V]"""
        logits: Tensor = model(input_ids=self.token_ids, attention_mask=self.mask.long(), use_cache=False).logits
        return logits.flatten(0, 1).float()

    def loss(self, logits: Tensor) -> Tensor:
        """Sum over the missed places."""
        if not len(self.missed):
            return logits.sum() * 0.0
        return missed_loss(logits[self.missed], self.top_ids, self.top_logprobs)

    def following(self, rows: Tensor) -> Tensor:
        """The text's token after each of these rows."""
        return self.token_ids.flatten()[rows + 1]


class Learner:
    """A draft in training, in float32."""

    def __init__(self, checkpoint: Path, device: str = "cpu") -> None:
        """Raises: StartupError."""
        self.checkpoint = checkpoint
        self._device = torch.device(device)
        self._model = load_draft(checkpoint).to(self._device)
        self._stored = stored_type(checkpoint)

    def train(self, texts: Sequence[KeptText], plan: LearningPlan) -> float:
        """Train on these texts. Returns the mean loss a token of the last step.

        Raises: StartupError if the loss or its gradient is not a number.
        """
        order = random.Random(plan.seed)  # noqa: S311  the order of texts is no secret
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=plan.learning_rate, weight_decay=0.0)
        self._model.train()
        loss = 0.0
        for step in range(plan.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * (1 - step / plan.num_steps)
            loss = self._one_step(order.choices(texts, k=min(plan.batch, len(texts))), optimizer, step)
        self._model.eval()
        return loss

    def _one_step(self, texts: Sequence[KeptText], optimizer: torch.optim.Optimizer, step: int) -> float:
        num_tokens, total = sum(text.num_chosen for text in texts), 0.0
        for batch in _batches(texts, self._device):
            loss = batch.loss(batch.scores(self._model))
            (loss / num_tokens).backward()  # type: ignore[no-untyped-call]  # torch's types
            total += float(loss.detach()) / num_tokens
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        if not bool(norm.isfinite()):
            raise StartupError(f"step {step}: the loss or its gradient is not a number; lower --learning-rate")
        optimizer.step()
        optimizer.zero_grad()
        return total

    def known(self, texts: Sequence[KeptText]) -> list[KeptText]:
        """The texts without what the draft has no row for: a target's vocabulary may be padded further."""
        rows = self._model.get_input_embeddings().num_embeddings
        texts = [text for text in texts if max(text.token_ids) < rows]
        return [text.only([index for index, ids in enumerate(text.top_ids) if max(ids) < rows]) for text in texts]

    def write(self, folder: Path) -> None:
        """Write the draft as a checkpoint, with the type of weights and the other files of the one it began with.

        No training may follow: the weights are rounded.
        """
        self._model.to(self._stored).save_pretrained(folder)
        shutil.copytree(self.checkpoint, folder, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)


def load_draft(checkpoint: Path) -> Any:
    """The model of a checkpoint, in float32. Raises: StartupError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"{checkpoint} cannot be trained: {first_line(error)}") from error


def stored_type(checkpoint: Path) -> torch.dtype:
    """The type of a checkpoint's weights, by its configuration."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(checkpoint).dtype or torch.float32


@torch.inference_mode()
def agreement(model: Any, texts: Sequence[KeptText]) -> Agreement:
    """Measure a draft on texts."""
    hits = missed_hits = num_tokens = num_missed = 0
    loss = 0.0
    for batch in _batches(texts, next(model.parameters()).device):
        logits = batch.scores(model)
        guesses = logits.argmax(-1)
        loss += float(batch.loss(logits))
        for rows in (batch.missed, batch.right):
            hits += int((guesses[rows] == batch.following(rows)).sum())
            num_tokens += len(rows)
        missed_hits += int((guesses[batch.missed] == batch.following(batch.missed)).sum())
        num_missed += len(batch.missed)
    num = max(1, num_tokens)
    return Agreement(hits / num, missed_hits / max(1, num_missed), loss / num, num_tokens)


@torch.inference_mode()
def without_hits(model: Any, texts: Sequence[KeptText]) -> list[KeptText]:
    """The texts, without the missed places where this model's first guess is the target's likeliest token (boosting).

    Those places count as right: another draft has them.
    """
    found: list[KeptText] = []
    for text in texts:
        batch = _Batch.of([text], next(model.parameters()).device)
        guesses = batch.scores(model).argmax(-1)[batch.missed].tolist()
        found.append(text.only([index for index, guess in enumerate(guesses) if guess != text.top_ids[index][0]]))
    return found


def _batches(texts: Sequence[KeptText], device: torch.device) -> Iterator[_Batch]:
    """All texts, some at a time, those of like length together."""
    by_length = sorted(texts, key=lambda text: len(text.token_ids))
    while by_length:
        size = max(1, MAX_ROWS // len(by_length[-1].token_ids))
        by_length, part = by_length[:-size], by_length[-size:]
        yield _Batch.of(part, device)
