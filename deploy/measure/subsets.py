"""Finds the layers of a target that make its best draft, by greedy removal, scored on the target's own output.

Knows models and texts; must not know how figures are shown. Subsets are tried in the loaded model, with one pass for
each text, so that nothing is loaded twice. Source of the idea: SWIFT (Xia et al. 2024) and Draft & Verify (Zhang et al.
2023), which search by Bayesian optimisation; greedy removal is simpler and gives a subset of every size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

import torch

from core.config import EngineConfig
from core.errors import ConfigError
from core.records import Sampling
from core.theory import optimal_gamma, pipelined_factor, walltime_factor
from deploy.measure.agreement import Agreement, coupled
from deploy.measure.recording import MeasuredModel, Recording
from workers.model import LayerSubset, num_layers_of, reference_model

Layers = tuple[int, ...]
Score = Callable[[Layers], Agreement]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft made of some of the target's layers."""

    layers: Layers
    agreement: Agreement
    c: float
    """Duration of its pass over that of a pass of the target, on this machine."""
    depth: int

    @property
    def alpha(self) -> float:
        """Acceptance rate of its guesses."""
        return self.agreement.alpha

    @property
    def in_turn(self) -> tuple[float, int]:
        """The speed over plain decoding by Leviathan's Theorem 3.8, and the draft length that gives it."""
        return _best(partial(walltime_factor, self.alpha, c=self.c), self.depth)

    @property
    def pipelined(self) -> tuple[float, int]:
        """Like `in_turn`, for a draft on a device of its own, hidden behind verification."""
        return _best(partial(pipelined_factor, self.alpha, c=self.c), self.depth)


def _best(factor: Callable[[int], float], depth: int) -> tuple[float, int]:
    gamma = optimal_gamma(factor, depth)
    return factor(gamma), gamma


def search(
    target: EngineConfig,
    prompts: Sequence[Sequence[int]],
    progress: Callable[[], None],
    *,
    num_tokens: int,
    depth: int,
    budget: int,
) -> list[Candidate]:
    """The best subset found of each size, the largest first; `progress` is called for each subset that is tried.

    `num_tokens` is the largest length of an output, which is greedy; `depth` the largest number of guesses in a row;
    `budget` the largest number of subsets. Raises: ConfigError if the budget is too small; StartupError if the model
    cannot be served.
    """
    num_layers = num_layers_of(target)
    check_budget(num_layers, budget)
    texts, cost = _texts_and_cost(target, prompts, num_tokens)
    model = reference_model(target)

    def score(layers: Layers) -> Agreement:
        progress()
        return reduce(add, [_judge(model, layers, text, depth) for text in texts])

    found = removal(num_layers, budget, score)
    return [Candidate(layers, agreement, cost(len(layers)), depth) for layers, agreement in found]


def removal(num_layers: int, budget: int, score: Score) -> list[tuple[Layers, Agreement]]:
    """Subsets of falling size, each a part of the one before.

    Each step scores the subset without each of its layers, and removes the layer whose removal lowers acceptance
    least; or several such layers, if the budget is too small for one at a time.
    """
    at_once = next(each for each in range(1, num_layers + 1) if num_tried(num_layers, each) <= budget)
    kept, found = tuple(range(num_layers)), list[tuple[Layers, Agreement]]()
    while len(kept) > 1:
        without = {layer: score(_less(kept, layer)) for layer in kept}
        order = sorted(kept, key=lambda layer: (-without[layer].alpha, -layer))
        for number, layer in enumerate(order[: min(at_once, len(kept) - 1)]):
            kept = _less(kept, layer)
            found.append((kept, without[layer] if number == 0 else score(kept)))
    return found


def check_budget(num_layers: int, budget: int) -> None:
    """Raises: ConfigError if the budget is too small for a search, or the model has only one layer."""
    if num_layers < 2:
        raise ConfigError("--target has one layer: give a model of two or more, so that some of them can be the draft")
    if budget < (least := num_tried(num_layers, num_layers)):
        raise ConfigError(f"--budget {budget} is too small for a model of {num_layers} layers: give {least} or more")


def num_tried(num_layers: int, at_once: int) -> int:
    """The number of subsets that a search tries if it removes up to `at_once` of `num_layers` layers in each step."""
    tried, left = 0, num_layers
    while left > 1:
        removed = min(at_once, left - 1)
        tried, left = tried + left + removed - 1, left - removed
    return tried


def _less(layers: Layers, layer: int) -> Layers:
    return tuple([each for each in layers if each != layer])


def _texts_and_cost(
    target: EngineConfig, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[Recording], Callable[[int], float]]:
    """The target's outputs, and the cost of a pass by its number of layers, over that of a whole pass.

    Assumes that all layers take the same time.
    """
    sampling = Sampling(temperature=0.0)
    whole = MeasuredModel(target)
    texts = [whole.write(prompt, sampling, num_tokens) for prompt in prompts]
    whole_s, num_layers = whole.pass_law()(1), whole.num_layers
    del whole
    one_s = MeasuredModel(replace(target, layers=(0,))).pass_law()(1)
    layer_s = max(0.0, whole_s - one_s) / max(1, num_layers - 1)
    return texts, lambda num: min(1.0, (one_s + (num - 1) * layer_s) / whole_s)


@torch.inference_mode()
def _judge(model: torch.nn.Module, layers: Layers, text: Recording, depth: int) -> Agreement:
    """The agreement of a draft made of these layers with this text."""
    ids = torch.tensor([[*text.prompt, *text.output[:-1]]], device=next(model.parameters()).device)
    with LayerSubset(layers).of(model):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(text.output)).logits[0]
    return coupled(logits.argmax(dim=-1).tolist(), text.output, depth)
