"""The compared drafters: networks, and uses of each, with what they cost beside the target's verifying passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.papers.noise.networks import BlockDrafter, LookAhead, OneLayer, Scores, embeddings_of
from bench.papers.noise.rounds import draw
from bench.papers.noise.training import BlockLearner, TrainingSet, train
from bench.results import say
from core.records import Sampling
from workers.sampling import Row
from workers.training import HeadPlan, TrainingText
from workers.training.head.eagle3 import Eagle3
from workers.training.head.medusa import MedusaHeads
from workers.training.head.run import teacher_of
from workers.training.head.starting import first_weights, shape_of
from workers.training.head.teaching import HeadLearner, Steps, Teacher
from workers.training.head.unrolling import unrolled
from workers.training.packing import PackedTexts, pack

RANK = 64
UNROLLED = 3
"""Number of unrolled steps in EAGLE-3's training. Measured chains are longer."""
STEPS_OF_ONE_LAYER = 2
"""Steps of the separate draft's training for each of EAGLE-3's, which is unrolled and takes about as long."""
REPEATS = 40
EAGLE, ONE_LAYER = "EAGLE-3", "one layer"
ROWS = [Row(Sampling(temperature=1.0), place, (), 0) for place in range(64)]


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a network."""

    name: str
    seconds: Callable[[int], float]
    """Seconds that guessing a chain takes, by its length."""
    weights: Callable[[int], int]
    """Number of weights that guessing a chain reads, by its length."""
    reads_noise: bool = True
    num_free: int = 0
    """Tokens of the target's own that its guessing pass gives."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A network and its uses."""

    scores: Scores
    uses: Sequence[Use]
    training_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """The target and what is trained for it."""

    target: Any
    draft: Any
    given: TrainingSet
    plan: HeadPlan

    @property
    def teacher(self) -> Teacher:
        return teacher_of(self.target, range(self.target.config.vocab_size))

    @property
    def output(self) -> Tensor:
        return embeddings_of(self.target)[1]

    def target_s(self, num_rows: int) -> float:
        return fastest_s(partial(_pass, self.target, num_rows))


def _draft(pair: Pair) -> Drafter:
    def scores(one: PackedTexts, anchors: Tensor, num: int) -> Tensor:
        logits: Tensor = pair.draft(input_ids=one.token_ids[None], use_cache=False).logits[0]
        return logits[anchors[:, None] + 1 + torch.arange(num)]

    def seconds(num: int) -> float:
        return num * fastest_s(partial(_pass, pair.draft, 1))

    return Drafter(scores, [Use("the pair's draft", seconds, lambda num: num * size_of(pair.draft))])


def _eagle(pair: Pair) -> Drafter:
    shape, teacher = shape_of(pair.target), pair.teacher
    head = Eagle3(shape, first_weights(pair.target, shape))
    steps = partial(unrolled, head, teacher)
    training_s = _trained(EAGLE, HeadLearner(head, steps, teacher, replace(pair.plan, unrolled=UNROLLED)), pair)
    once = head.tensors()["fc.weight"].numel()
    a_step = size_of(head) - once + teacher.output.numel()
    return _of_steps(EAGLE, steps, lambda num: once + num * a_step, pair, training_s)


def _one_layer(pair: Pair) -> Drafter:
    network = OneLayer(pair.target)
    plan = replace(pair.plan, num_steps=STEPS_OF_ONE_LAYER * pair.plan.num_steps)
    training_s = _trained(ONE_LAYER, BlockLearner(network, pair.output, plan), pair)
    one = two_rows(pair)

    def guess(num: int) -> None:
        for depth in range(num):
            draw(network.scores(one, torch.tensor([-1]), 1)[0], ROWS[depth : depth + 1])

    use = Use(ONE_LAYER, lambda num: fastest_s(partial(guess, num)), lambda num: num * network.weights())
    return Drafter(network.scores, [use], training_s)


def _medusa(pair: Pair) -> Drafter:
    heads = MedusaHeads(pair.output, pair.plan.unrolled)
    training_s = _trained("Medusa", HeadLearner(heads, heads.steps, pair.teacher, pair.plan), pair)
    one = size_of(heads) // pair.plan.unrolled
    return _of_steps("Medusa", heads.steps, lambda num: num * one, pair, training_s)


def _of_steps(name: str, steps: Steps, weights: Callable[[int], int], pair: Pair, training_s: float) -> Drafter:
    def scores(one: PackedTexts, anchors: Tensor, num: int) -> Tensor:
        return torch.stack([states[anchors] @ output.T for states, output in steps(one, num)], 1)

    def guess(num: int) -> None:
        for depth, (states, output) in enumerate(steps(two_rows(pair), num)):
            draw(states[:1] @ output.T, ROWS[depth : depth + 1])

    return Drafter(scores, [Use(name, lambda num: fastest_s(partial(guess, num)), weights)], training_s)


def _look_ahead(pair: Pair) -> Drafter:
    """Guesses come from a pass of their own, which gives one token more (PaSS); or from rows after each node of the
    verified block, so that no other pass is needed, whatever is accepted."""
    network = LookAhead(pair.target, pair.plan.unrolled)
    training_s = _trained("PaSS", BlockLearner(network, pair.output, pair.plan), pair)
    in_turn = Use("PaSS", lambda num: pair.target_s(1 + num), lambda _: size_of(pair.target), num_free=1)
    beside = Use(
        "PaSS, rows after each node",
        lambda num: pair.target_s((1 + num) ** 2) - pair.target_s(1 + num),
        lambda _: 0,
    )
    return Drafter(network.scores, [in_turn, beside], training_s)


def _block(pair: Pair, rank: int) -> Drafter:
    network = BlockDrafter(pair.target, pair.plan.unrolled, rank)
    name = "block with B" if rank else "block"
    training_s = _trained(name, BlockLearner(network, pair.output, pair.plan), pair)

    def seconds(num: int) -> float:
        return fastest_s(lambda: network.guess(two_rows(pair), 0, ROWS[:num]))

    uses = [
        Use(f"{name}, {'noise' if reads_noise else 'no noise'}", seconds, lambda _: network.weights(), reads_noise)
        for reads_noise in (True, False)
    ]
    return Drafter(network.scores, uses, training_s)


DRAFTERS: Mapping[str, Callable[[Pair], Drafter]] = {
    "draft": _draft,
    EAGLE: _eagle,
    ONE_LAYER: _one_layer,
    "Medusa": _medusa,
    "PaSS": _look_ahead,
    "block": partial(_block, rank=0),
    "block with B": partial(_block, rank=RANK),
}
"""Trained when they are called."""


def _trained(name: str, learner: HeadLearner | BlockLearner, pair: Pair) -> float:
    say(f"training {name}, {size_of(learner.module)} weights, {learner.plan.num_steps} steps")
    return train(name, learner, pair.given)


def size_of(module: torch.nn.Module) -> int:
    """Number of weights; a tied output layer counts once."""
    return sum(each.numel() for each in module.parameters())


def two_rows(pair: Pair) -> PackedTexts:
    """A text of an anchor and the token after it: context costs next to nothing here."""
    return pack([TrainingText([1, 2], [(0, 2)])], [0], 2, pair.given.states)


def _pass(model: Any, num_rows: int) -> None:
    logits = model(input_ids=torch.ones(1, num_rows, dtype=torch.long), use_cache=False).logits[0]
    draw(logits.float(), ROWS[:num_rows])


@torch.inference_mode()
def fastest_s(call: Callable[[], Any]) -> float:
    """The shortest time of some calls, which other work of the machine has disturbed least."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
