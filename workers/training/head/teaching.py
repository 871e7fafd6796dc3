"""Teaches heads what the target says some tokens later, whatever network guesses it.

Knows packed texts with the target's states, and the target's embeddings and output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.training.head.objective import TEMPERATURE, AcceptedMass, SoftCrossEntropy
from workers.training.packing import PackedTexts
from workers.training.trainer import TrainingPlan

STEP_WEIGHT = 0.8
"""Weight of each unrolled step's loss in that of the one before; SpecForge's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPlan(TrainingPlan):
    """How a head is trained."""

    unrolled: int = 3
    """Guesses of a chain."""
    mass_from: float = 0.65
    """Part of the steps after which the loss is accepted mass, not cross entropy."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's layers around the head, for the draft's vocabulary."""

    embeddings: Tensor  # [V, hidden]
    output: Tensor
    """Rows of the draft's vocabulary.  # [D, hidden]"""
    draft_ids: Tensor
    """Index of each of the target's tokens in the draft's vocabulary; -1 for tokens outside.  # [V]"""


Steps = Callable[[PackedTexts, int], Iterator[tuple[Tensor, Tensor]]]
"""A head's guesses over a sequence, by depth: states [S, hidden], and the output layer [D, hidden] that reads them."""


class HeadLearner:
    """A head in training."""

    def __init__(self, head: nn.Module, steps: Steps, teacher: Teacher, plan: HeadPlan) -> None:
        self.module, self.plan, self.num_guesses = head, plan, plan.unrolled
        self._steps, self._teacher = steps, teacher

    def num_rows(self, one: PackedTexts) -> int:
        return int(one.taught(2).sum())

    def loss(self, one: PackedTexts, step: int, hits: Tensor, tried: Tensor) -> Tensor:
        """Sum over rows and steps of the chain. A guess is right if it is the text's token, and all before are.

        The target's distribution teaches at prompts' tokens, too; only those to be guessed are counted as right.
        """
        teacher, plan = self._teacher, self.plan
        device, is_mass = teacher.output.device, step >= plan.mass_from * plan.num_steps
        objective = AcceptedMass if is_mass else SoftCrossEntropy
        probs = self._probs(one, TEMPERATURE if is_mass else 1.0)
        total = torch.zeros((), device=device)
        stands = torch.ones(len(one.token_ids), dtype=torch.bool)
        for depth, (states, output) in enumerate(self._steps(one, plan.unrolled)):
            token_ids = torch.roll(teacher.draft_ids[one.token_ids], -2 - depth)
            rows = (one.taught(2 + depth) & (token_ids >= 0)).nonzero().flatten()
            taught = probs[rows.to(device) + 1 + depth]
            loss, guesses = objective.apply(states[rows.to(device)], output, taught)  # type: ignore[no-untyped-call]
            total = total + STEP_WEIGHT**depth * loss
            is_right = torch.zeros_like(stands)
            is_right[rows] = guesses.cpu() == token_ids[rows]
            counted = one.ahead(2 + depth)
            tried[depth] += int((stands & counted).sum())
            stands &= is_right
            hits[depth] += int((stands & counted).sum())
        return total

    def _probs(self, one: PackedTexts, temperature: float) -> Tensor:
        """The target's distribution after each row, over the draft's vocabulary.  # [S, D]"""
        output = self._teacher.output
        last = one.states[:, -output.shape[1] :].to(output.device, output.dtype)
        with torch.no_grad():
            return ((last @ output.T).float() / temperature).softmax(-1)
