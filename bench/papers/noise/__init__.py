"""Drafters of one pass, which read the noise of coupled mode or do not, against drafts and heads at equal time.

All verify by the real coupled rule. Tokens a round do not depend on the speed of the machine; times of passes do.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bench.papers.acceptance import demo_model, prompt_tokens
from bench.papers.noise.drafters import DRAFTERS, EAGLE, ONE_LAYER, Drafter, Pair, Use, size_of
from bench.papers.noise.networks import Scores
from bench.papers.noise.rounds import TargetText, accepted_lengths, draw_texts, guesses_of, tokens_a_round
from bench.papers.noise.training import BATCH, LENGTH, training_set
from bench.results import Result, say
from deploy.settings import DEMO_DIRECTORY
from workers.training import HeadPlan, TrainingText
from workers.training.head.features import TargetStates, read_states
from workers.training.packing import pack

__all__ = ["EAGLE", "ONE_LAYER", "TEMPERATURES", "add_arguments", "measure", "title"]

NUM_GUESSES = 6
LENGTHS = range(1, NUM_GUESSES + 1)
"""Lengths of the measured chains."""
TEMPERATURES = (0.0, 0.7, 1.0)
Texts = Mapping[float, tuple[Sequence[TargetText], TargetStates]]
"""Held-out texts by temperature, with the target's states of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100, help="of training each one-pass drafter")
    parser.add_argument("--drafters", choices=DRAFTERS, nargs="+", default=[*DRAFTERS], metavar="NAME")
    parser.add_argument("--work", type=Path, help="folder of the trained drafters, from which a later run goes on")


def measure(args: argparse.Namespace) -> list[Result]:
    torch.set_num_threads(1)
    target, draft = (demo_model(role).requires_grad_(False) for role in ("target", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_DIRECTORY / "target")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        say("texts of the target")
        texts = {each: _held_out(target, tokenizer, args, each, folder) for each in TEMPERATURES}
        plan = HeadPlan(num_steps=args.steps, length=LENGTH, batch=BATCH, unrolled=NUM_GUESSES)
        pair = Pair(target, draft, training_set(target, tokenizer, folder), plan)
        return [each for name in args.drafters for each in _of(DRAFTERS[name](pair), texts, pair)]


def title(temperature: float, name: str) -> str:
    """Name of the result of a drafter's use."""
    return f"T = {temperature:g}, {name}: tokens a round"


def _held_out(
    target: Any, tokenizer: Any, args: argparse.Namespace, temperature: float, folder: Path
) -> tuple[Sequence[TargetText], TargetStates]:
    texts = draw_texts(target, prompt_tokens(tokenizer, args.prompts), args.tokens, temperature)
    return texts, read_states(target, [_training_text(each) for each in texts], folder)


def _training_text(text: TargetText) -> TrainingText:
    return TrainingText(text.token_ids, [(text.num_prompt, len(text.token_ids))])


def _of(drafter: Drafter, texts: Texts, pair: Pair) -> Iterator[Result]:
    """One result for each use and temperature."""
    for use in drafter.uses:
        passes_s = [pair.target_s(num_rows) for num_rows in range(1, NUM_GUESSES + 2)]  # near in time to what follows
        costs = Costs(passes_s, [use.seconds(num) for num in LENGTHS], size_of(pair.target))
        for temperature, (drawn, states) in texts.items():
            if temperature == 0 and not use.reads_noise:
                continue  # there is no noise
            say(f"{use.name} at T = {temperature:g}")
            accepted = _accepted(drafter.scores, use, drawn, states)
            settings = {**_figures(use, accepted, costs), "training_s": round(drafter.training_s)}
            tokens = round(tokens_a_round(accepted, NUM_GUESSES, use.num_free), 3)
            yield Result(title(temperature, use.name), tokens, "tokens", settings=settings)


@torch.inference_mode()
def _accepted(scores: Scores, use: Use, texts: Sequence[TargetText], states: TargetStates) -> list[list[int]]:
    """Numbers of accepted guesses, by text and anchor."""
    found = []
    packs = [_training_text(each) for each in texts]
    for index, text in enumerate(texts):
        one = pack(packs, [index], len(text.token_ids), states)
        guesses = guesses_of(text, scores(one, text.anchors(NUM_GUESSES), NUM_GUESSES), reads_noise=use.reads_noise)
        found.append(accepted_lengths(text, guesses))
    return found


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the target's passes by rows and of chains by guesses, both from 1, and the target's weights."""

    passes_s: Sequence[float]
    chains_s: Sequence[float]
    num_weights: int


def _figures(use: Use, accepted: Sequence[Sequence[int]], costs: Costs) -> dict[str, float | str]:
    """Right first guesses; tokens in time over plain decoding, by this machine's times and by weights that are read."""
    tokens = {num: tokens_a_round(accepted, num, use.num_free) for num in LENGTHS}
    plain_s = costs.passes_s[0]
    by_time = {num: each * plain_s / (costs.passes_s[num] + costs.chains_s[num - 1]) for num, each in tokens.items()}
    by_weights = {num: each / (1 + use.weights(num) / costs.num_weights) for num, each in tokens.items()}
    lengths = [length for of_text in accepted for length in of_text]
    return {
        "first": round(sum(length > 0 for length in lengths) / len(lengths), 3),
        "over_plain": _best(by_time),
        "by_weights": _best(by_weights),
        "chain_of_6_costs": round(costs.chains_s[-1] / plain_s, 3),
    }


def _best(factors: Mapping[int, float]) -> str:
    """The largest factor, and its chain's length."""
    num = max(factors, key=factors.__getitem__)
    return f"{factors[num]:.2f} ({num})"
