"""Trains the compared networks alike: the same texts, steps and sequences, beside the frozen target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.papers.noise.networks import BlockDrafter, LookAhead, OneLayer
from models.train.corpus import load_split
from models.train.sampling import continue_prompts
from models.train.steps import SAMPLED_TEMPERATURES
from models.train.stream import token_stream, training_windows
from workers.training import OBJECTIVES, HeadPlan, Progress, TrainingText
from workers.training.head.features import TargetStates, read_states
from workers.training.head.objective import TEMPERATURE
from workers.training.head.teaching import STEP_WEIGHT
from workers.training.packing import PackedTexts
from workers.training.trainer import Trainable, Trainer

LENGTH, BATCH = 256, 2
NUM_FILE_TEXTS, NUM_DRAWN_TEXTS, DRAWN_FROM = 384, 96, 32
"""Number of pieces of files, of texts that the target draws at each temperature, of tokens of a piece before a draw."""
NUM_ANCHORS = 48
"""Blocks of a sequence in a step: rows of blocks cost more than those of the text."""


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Texts, and the target's states of them."""

    texts: Sequence[TrainingText]
    states: TargetStates
    folder: Path


def training_set(target: Any, tokenizer: Any, folder: Path) -> TrainingSet:
    """Pieces of the files that the pair was trained on, and texts of the target's own that begin like others."""
    stream = token_stream(tokenizer, (document.text for document in load_split().training))
    drawn_from = len(SAMPLED_TEMPERATURES) * NUM_DRAWN_TEXTS
    pieces = training_windows(stream, LENGTH, NUM_FILE_TEXTS + drawn_from, step=0, seed=0)
    texts = [TrainingText(each, [(0, LENGTH)]) for each in pieces[drawn_from:].tolist()]
    generator = torch.Generator().manual_seed(0)
    for part, temperature in zip(
        pieces[:drawn_from].chunk(len(SAMPLED_TEMPERATURES)), SAMPLED_TEMPERATURES, strict=True
    ):
        outputs = continue_prompts(target, part[:, :DRAWN_FROM], LENGTH - DRAWN_FROM, temperature, generator)
        texts += [TrainingText(each, [(0, LENGTH)]) for each in outputs.tolist()]
    return TrainingSet(texts, read_states(target, texts, folder), folder)


class BlockLearner:
    """A network in training that guesses blocks: first by KL, then by the chance that it draws the target's token with
    the target's noise."""

    def __init__(self, network: BlockDrafter | LookAhead | OneLayer, output: Tensor, plan: HeadPlan) -> None:
        """`output`: the target's output layer [V, hidden]."""
        self.module, self.plan, self.num_guesses = network, plan, plan.unrolled
        self._scores, self._output = network.scores, output

    def num_rows(self, one: PackedTexts) -> int:
        return min(NUM_ANCHORS, int(one.taught(self.num_guesses + 1).sum()))

    def loss(self, one: PackedTexts, step: int, hits: Tensor, tried: Tensor) -> Tensor:
        """Sum over guesses of some anchors, after the text's own tokens. The first guesses count most."""
        anchors = one.taught(self.num_guesses + 1).nonzero().flatten()
        anchors = anchors[torch.randperm(len(anchors))[:NUM_ANCHORS]]
        depths = torch.arange(self.num_guesses)
        rows = anchors[:, None] + 1 + depths
        is_late = step >= self.plan.mass_from * self.plan.num_steps
        temperature = TEMPERATURE if is_late else 1.0
        scores = self._scores(one, anchors, self.num_guesses)
        p = one.states[rows][..., -self._output.shape[1] :].float() @ self._output.T
        log_p, log_q = ((each / temperature).log_softmax(-1) for each in (p, scores))
        right = (scores.argmax(-1) == one.token_ids[rows + 1]).int().cumprod(1).sum(0)
        hits += right
        tried += torch.cat([torch.tensor([len(anchors)]), right[:-1]])
        return (OBJECTIVES["coupled_sampled" if is_late else "kl"](log_p, log_q) * STEP_WEIGHT**depths).sum()


def train(name: str, learner: Trainable, given: TrainingSet) -> float:
    """Train to the plan's last step, or take what an earlier run has left. Returns the seconds that it took."""
    began = time.perf_counter()
    saved = given.folder / f"{name}-{learner.plan.num_steps}.pt".replace(" ", "-")
    Trainer(learner).train(given.texts, given.states, _ignored, saved)
    return time.perf_counter() - began


def _ignored(_: Progress) -> None: ...
