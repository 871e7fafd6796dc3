"""Pipelined rounds against sequential ones on simulated 70B/1B hardware, with the demo pair's recorded agreement.

The orchestrator is real; engines and wires are simulated by laws of time (preset "70b+1b"). Pipelining is compared with
the best static draft length in turn, found by a sweep under all three verifications, with one stream at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.results import Result, at_least, say
from core.config import SpeculationConfig
from core.records import Verification
from simulation.report import Run, plain, run, sweep
from simulation.scenario import Closed, Scenario

TEMPERATURES = (0.0, 1.0)
NUM_TEXTS = 40
NUM_TOKENS = 160
DEPTH = 8
TREE_TOKENS = 32
CHAIN_GOALS = {0.0: 1.7, 1.0: 1.45}
TREE_GOALS = {0.0: 2.0, 1.0: 1.75}
FORMULA_GOAL = 0.95

BASE = SpeculationConfig(guessers=("draft",), max_draft_tokens=DEPTH)
CHAINS = replace(BASE, max_block_tokens=DEPTH)
TREES = replace(BASE, max_block_tokens=TREE_TOKENS)
STATIC = replace(CHAINS, policy="static")


@dataclass(frozen=True, slots=True)
class Compared:
    """All runs at one temperature."""

    plain: Run
    sequential: Run
    """The best static draft length and verification in turn."""
    chains: Run
    trees: Run
    chains_in_turn: Run
    trees_in_turn: Run
    """The policy of `trees`, but in turn."""
    static: Run
    without_noise: tuple[Run, ...]
    """Rejection in place of coupled verification: the draft samples, and drafting is in turn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=NUM_TEXTS, help="simulated streams of each system")
    parser.add_argument("--text-tokens", type=int, default=NUM_TOKENS, help="of each simulated stream")


def measure(args: argparse.Namespace) -> list[Result]:
    """Simulate every way on the same texts."""
    load = Closed(num_streams=args.texts)
    results: list[Result] = []
    for temperature in TEMPERATURES:
        say(f"simulated, T = {temperature:g}")
        scenario = Scenario(temperature=temperature, load=load, max_tokens=args.text_tokens, speculation=BASE)
        results += _results(temperature, _compared(scenario))
    return results


def _compared(scenario: Scenario) -> Compared:
    def pipelined(name: str, speculation: SpeculationConfig, verification: Verification = Verification.COUPLED) -> Run:
        return run(name, replace(scenario, speculation=speculation, verification=verification))

    rejection = Verification.REJECTION
    return Compared(
        plain=run("plain", plain(scenario)),
        sequential=max(sweep(scenario), key=lambda each: each.rate),
        chains=pipelined("blocks of 8", CHAINS),
        trees=pipelined("blocks of 32", TREES),
        chains_in_turn=pipelined("blocks of 8 in turn", replace(CHAINS, pipelining=False)),
        trees_in_turn=pipelined("blocks of 32 in turn", replace(TREES, pipelining=False)),
        static=pipelined("static chains of 8", STATIC),
        without_noise=(
            pipelined("rejection, in turn", CHAINS, rejection),
            pipelined("rejection, static chains of 8 in turn", STATIC, rejection),
        )
        if scenario.temperature > 0  # greedy decoding has neither noise nor rejection
        else (),
    )


def _results(temperature: float, compared: Compared) -> Iterator[Result]:
    title, best = f"simulated T = {temperature:g}", compared.sequential
    against = {
        "against": f"{best.verification.value}, gamma {best.gamma}",
        "sequential_tokens_per_s": _round(best.rate),
    }
    goals = ((compared.chains, CHAIN_GOALS[temperature]), (compared.trees, TREE_GOALS[temperature]))
    for pipelined, goal in goals:
        yield at_least(goal, _ratio(f"{title}: {pipelined.name} over sequential", pipelined, best, against))
        yield at_least(FORMULA_GOAL, _of_formula(f"{title}: {pipelined.name}, share of the formula", pipelined))
    for fast, slow in ((compared.chains, compared.chains_in_turn), (compared.trees, compared.trees_in_turn)):
        yield _ratio(
            f"{title}: {fast.name} over the same in turn", fast, slow, {"sequential_tokens_per_s": _round(slow.rate)}
        )
    yield _ratio(f"{title}: {compared.static.name} over sequential", compared.static, best, against)
    yield _ratio(f"{title}: {compared.trees.name} over plain", compared.trees, compared.plain, {})
    yield _ratio(f"{title}: sequential over plain", best, compared.plain, against)
    for each in compared.without_noise:
        yield _ratio(f"{title}: {each.name} over sequential", each, best, against)
    for each in (compared.chains, compared.trees, compared.static):
        yield from _anatomy(f"{title}: {each.name}", each)
    for each in (compared.chains_in_turn, compared.trees_in_turn, *compared.without_noise):
        yield _tokens_a_round(f"{title}: {each.name}", each)


def _ratio(name: str, fast: Run, slow: Run, settings: Mapping[str, Any]) -> Result:
    """Tokens per second of `fast` over those of `slow`."""
    return Result(name, _round(fast.rate / slow.rate), "x", settings={"tokens_per_s": _round(fast.rate), **settings})


def _of_formula(name: str, pipelined: Run) -> Result:
    allowed = pipelined.report.formula_tokens_per_s
    return Result(name, _round(pipelined.rate / allowed), "share", settings={"formula_tokens_per_s": _round(allowed)})


def _anatomy(name: str, each: Run) -> Iterator[Result]:
    """Parts of the time of a round."""
    report = each.report
    times_ms = {
        "verify_ms": _round(1e3 * report.verify_s),
        "pass_ms": _round(1e3 * report.pass_s),
        "just_in_time_ms": _round(1e3 * report.block_s),
    }
    yield Result(f"{name}, hit rate", _round(report.hit_rate), "share", settings=times_ms)
    yield Result(f"{name}, draft time hidden", _round(report.time_hidden), "share")
    yield _tokens_a_round(name, each)


def _tokens_a_round(name: str, each: Run) -> Result:
    report = each.report
    settings = {"acceptance_rate": _round(report.acceptance_rate), "failed_streams": report.num_failed}
    return Result(f"{name}, tokens a round", _round(report.tokens_per_round), "tokens", settings=settings)


def _round(value: float) -> float:
    return round(value, 3)
