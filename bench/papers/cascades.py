"""A cascade against none: a lookup in the text guesses for the draft, as the draft guesses for the target.

Real engines, chains of fixed length in turn, one stream at a time. Passes of the draft are counted, so that no figure
depends on the speed of the machine. Source: Chen et al. 2023 (Cascade Speculative Drafting, arXiv 2312.11462); the idea
is in section 6 of Leviathan et al. 2023.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.harness.in_process import DRAFT, in_process
from bench.results import Result, say
from bench.rounds.draws import COMMON, requests_of, stats_of
from core.records import Verification

GAMMA = 8
NUM_AHEAD = 4
TEMPERATURES = (0.0, 1.0)
COSTS = (0.12, 0.2, 0.5)
"""Time of a draft's pass over a target's: of presets 70b+1b and 8b+0.5b, and of a draft that is half as slow as its
target."""


def measure(args: argparse.Namespace) -> list[Result]:
    torch.set_num_threads(1)
    return [result for temperature in TEMPERATURES for result in _of(temperature, args)]


def _of(temperature: float, args: argparse.Namespace) -> Iterator[Result]:
    say(f"cascades at T = {temperature:g}")
    run = argparse.Namespace(temperature=temperature, prompts=max(2, args.prompts // 4), tokens=args.tokens)
    found = {num_ahead: asyncio.run(_counted(run, num_ahead)) for num_ahead in (0, NUM_AHEAD)}
    for num_ahead, (tokens, passes) in found.items():
        name = f"T = {temperature:g}, " + (f"{num_ahead} tokens ahead" if num_ahead else "no cascade")
        yield Result(
            f"{name}, passes of the draft a round", round(passes, 3), "passes", settings={"tokens": round(tokens, 3)}
        )
    for cost in COSTS:
        none, cascade = (tokens / (passes * cost + 1.0) for tokens, passes in found.values())
        name = f"T = {temperature:g}, c = {cost:g}: cascade over none"
        yield Result(name, round(cascade / none, 3), "x", settings={"none_over_plain": round(none, 3)})


async def _counted(run: argparse.Namespace, num_ahead: int) -> tuple[float, float]:
    """Tokens and passes of the draft, both by round."""
    speculation = replace(COMMON, policy="static", max_draft_tokens=GAMMA)
    async with in_process(speculation, draft=replace(DRAFT, cascade_tokens=num_ahead)) as pair:
        requests = requests_of(run, Verification.COUPLED, pair.tokenizer)
        stats = [await stats_of(pair.service, request) for request in requests]
        num_passes = pair.draft.stats().num_steps
    num_rounds = sum(each.num_draft_rounds for each in stats)
    num_accepted = sum(each.num_accepted_tokens for each in stats)
    return 1.0 + num_accepted / num_rounds, num_passes / num_rounds
