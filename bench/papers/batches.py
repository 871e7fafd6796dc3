"""Speed by batch: where drafting stops to pay, and where the controller stops.

The orchestrator is real; engines are simulated by laws of time, and agree as the demo pair does at T = 0. The paper's
way is a chain of fixed length, drafted and verified in turn. Source: Leviathan et al. 2023, sections 3.4 and 6.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from bench.results import Result, say
from core.config import SpeculationConfig
from simulation.engines import PRESETS
from simulation.report import Run, plain, run, sequential
from simulation.scenario import Closed, Scenario

BATCHES = {"8b+0.5b": (1, 4, 16, 64, 128, 256, 512), "this-machine": (1, 2, 4, 8, 16, 32)}
"""Numbers of streams at once, by preset. The last ones are beyond where fixed chains lose."""
GAMMA = 4
ADAPTIVE = SpeculationConfig(guessers=("draft",))
NUM_TOKENS = 64


def measure(args: argparse.Namespace) -> list[Result]:  # noqa: ARG001  nothing of it is a setting
    return [result for preset, batches in BATCHES.items() for batch in batches for result in _of(preset, batch)]


def _of(preset: str, batch: int) -> Iterator[Result]:
    say(f"{preset}, {batch} streams")
    load = Closed(batch, max(8, batch * 3 // 2))
    scenario = Scenario(PRESETS[preset], load=load, max_tokens=NUM_TOKENS, prompt_tokens=24, speculation=ADAPTIVE)
    without = run("plain", plain(scenario))
    in_turn = replace(ADAPTIVE, pipelining=False)
    ways = (
        run(f"chains of {GAMMA} in turn", sequential(scenario, GAMMA)),
        run("adaptive, in turn", replace(scenario, speculation=in_turn)),
        run("adaptive", scenario),
    )
    for each in ways:
        guesses = {
            "guesses_a_round": round(_guesses(each), 2),
            "tokens_a_round": round(each.report.tokens_per_round, 2),
        }
        name = f"{preset}, {batch} streams: {each.name} over plain"
        yield Result(name, round(each.rate / without.rate, 3), "x", settings=guesses)


def _guesses(each: Run) -> float:
    """Verified guesses a round."""
    rate = each.report.acceptance_rate
    return (each.report.tokens_per_round - 1.0) / rate if rate else 0.0
