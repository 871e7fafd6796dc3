"""Adaptive control against fixed draft lengths, simulated: on steady loads, on loads that change, and where plain wins.

What is compared runs the same streams with the same seeds. A rate is tokens over the time that streams were open, so
it is what a client sees, and the load's last streams, which have the engines to themselves, count no more than others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from bench.results import Result, at_least, at_most
from core.config import SpeculationConfig
from core.records import Verification
from orchestrator.simulation.presets import PRESETS
from orchestrator.simulation.scenario import Arrivals, Change, Closed, Scenario, simulate
from orchestrator.simulation.text import Agreement, Law, SteadyLaw

GAMMAS: Final = (0, 1, 2, 3, 4, 6, 8)
NO_USE: Final = 0.85
"""A sweep ends where a longer draft yields less than this share of the best: what is longer still yields less."""
STATIONARY_GOAL: Final = 0.97
CHANGING_GOAL: Final = 1.08
LOADED_GOAL: Final = 0.98
LOADED_STATIC: Final = 0.9
LOADED_GAMMA: Final = 4

GREEDY, COUPLED, REJECTION = (0.0, Verification.COUPLED), (1.0, Verification.COUPLED), (1.0, Verification.REJECTION)
MODES: Final = {"greedy": GREEDY, "coupled": COUPLED, "rejection": REJECTION}
NUM_AT_ONCE: Final = (1, 4, 16, 64)

EASY: Final = SteadyLaw((0.88, 0.06, 0.02, 0.01), alpha=0.9)
HARD: Final = SteadyLaw((0.30, 0.15, 0.10, 0.06, 0.04, 0.03), (0.25, 0.12, 0.08, 0.05), alpha=0.35)


@dataclass(frozen=True, slots=True)
class Alternating:
    """A text that is easy to guess and hard to guess in turns."""

    easy: Law
    hard: Law
    num_tokens: int

    def at(self, seed: int, index: int) -> Agreement:
        return self._now(index).at(seed, index)

    def num_accepted_of_block(self, seed: int, index: int, num_guesses: int) -> int | None:
        return self._now(index).num_accepted_of_block(seed, index, num_guesses)

    def _now(self, index: int) -> Law:
        return self.hard if index // self.num_tokens % 2 else self.easy


@dataclass(frozen=True)
class Case:
    """A scenario, whose policy is still open."""

    kind: str
    name: str
    scenario: Scenario
    is_pipelined: bool

    @property
    def settings(self) -> dict[str, object]:
        return {"pipelining": "on" if self.is_pipelined else "off"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of this benchmark."""
    parser.add_argument(
        "--full", action="store_true", help="every combination of the steady loads, which takes an hour"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the work (default: 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")


def measure(args: argparse.Namespace) -> list[Result]:
    """All cases, each against every fixed draft length."""
    cases = [case for case in (*stationary(full=args.full), *changing(), *loaded()) if args.only in case.name]
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs) as pool:
            return [result for results in pool.map(judged, cases) for result in results]
    return [result for case in cases for result in judged(case)]


# Cases


def stationary(*, full: bool) -> Iterator[Case]:
    """Loads that stay as they are: texts of the demo pair, on each hardware, with each number of streams.

    Not in `full`, the ways to verify and to pipeline take turns instead of being crossed with all that.
    """
    turns = enumerate(product(PRESETS, NUM_AT_ONCE))
    for number, (hardware, num_at_once) in turns:
        turn = number + number // len(NUM_AT_ONCE)
        modes = list(MODES) if full else [list(MODES)[turn % len(MODES)]]
        ways = (True, False) if full else ((turn % 2 == 0),)
        for mode, is_pipelined in product(modes, ways):
            temperature, verification = MODES[mode]
            scenario = Scenario(
                hardware=PRESETS[hardware],
                temperature=temperature,
                verification=verification,
                load=Closed(num_at_once, max(16, num_at_once * 3 // 2)),
                max_tokens=160 if num_at_once < NUM_AT_ONCE[-1] else 96,
            )
            name = f"{hardware} {mode} {num_at_once} streams {'pipelined' if is_pipelined else 'in turn'}"
            yield Case("stationary", name, scenario, is_pipelined)


def changing() -> Iterator[Case]:
    """Loads that ask for one draft length now and for another later."""
    texts = Scenario(law=Alternating(EASY, HARD, 160), load=Closed(1, 4), max_tokens=960)
    waves = ((50.0, 0.4), (8.0, 2.5), (50.0, 0.4), (8.0, 2.5), (30.0, 0.4))
    load = Scenario(
        hardware=PRESETS["this-machine"], temperature=1.0, load=Arrivals(waves), max_tokens=120, prompt_tokens=24
    )
    slow = Scenario(load=Closed(4, 20), changes=(Change(8.0, "draft", 8.0),))
    for name, scenario in (("easy and hard text", texts), ("load rises and falls", load), ("draft slows down", slow)):
        for is_pipelined in (True, False):
            way = "pipelined" if is_pipelined else "in turn"
            yield Case("changing", f"{name} {way}", scenario, is_pipelined)


def loaded() -> Iterator[Case]:
    """Many streams of hard text where rows cost: plain decoding is hard to beat."""
    for num_at_once, is_pipelined in product((16, 32), (True, False)):
        scenario = Scenario(
            hardware=PRESETS["this-machine"],
            law=HARD,
            load=Closed(num_at_once, 2 * num_at_once),
            prompt_tokens=24,
        )
        name = f"hard text {num_at_once} streams {'pipelined' if is_pipelined else 'in turn'}"
        yield Case("loaded", name, scenario, is_pipelined)


# Judgement


def judged(case: Case) -> list[Result]:
    """What adaptive control yields there, against the goal of its kind."""
    if case.kind == "loaded":
        return _against_plain(case)
    rates = sweep(case)
    best = max(rates, key=lambda gamma: rates[gamma])
    rate, reason = adaptive(case)
    goal = STATIONARY_GOAL if case.kind == "stationary" else CHANGING_GOAL
    settings = {
        **case.settings,
        "adaptive_tokens_per_s": round(rate, 2),
        "static_tokens_per_s": {gamma: round(static, 2) for gamma, static in rates.items()},
        "best_gamma": best,
        "last_change": reason,
    }
    name = f"control/{case.kind}/{case.name}: adaptive over best static"
    return [at_least(goal, Result(name, round(rate / rates[best], 3), "x", settings=settings))]


def _against_plain(case: Case) -> list[Result]:
    plain, fixed = static(case, 0), static(case, LOADED_GAMMA)
    rate, reason = adaptive(case)
    settings = {**case.settings, "plain_tokens_per_s": round(plain, 2)}
    name = f"control/loaded/{case.name}"
    steady = Result(f"{name}: adaptive over plain", round(rate / plain, 3), "x", settings={**settings, "last": reason})
    falls = Result(f"{name}: static gamma {LOADED_GAMMA} over plain", round(fixed / plain, 3), "x", settings=settings)
    return [at_least(LOADED_GOAL, steady), at_most(LOADED_STATIC, falls)]


def sweep(case: Case) -> dict[int, float]:
    """Tokens per second of a stream by draft length, as far as longer ones can be of use."""
    rates: dict[int, float] = {}
    for gamma in GAMMAS:
        rates[gamma] = static(case, gamma)
        if gamma > 1 and rates[gamma] < NO_USE * max(rates.values()):
            break
    return rates


def static(case: Case, gamma: int) -> float:
    """Tokens per second of a stream with blocks of always `gamma` guesses."""
    return _run(case, SpeculationConfig(policy="static", max_draft_tokens=gamma, pipelining=case.is_pipelined))[0]


def adaptive(case: Case) -> tuple[float, str]:
    """Tokens per second of a stream under adaptive control, and why it last changed its mind."""
    return _run(case, SpeculationConfig(max_draft_tokens=GAMMAS[-1], pipelining=case.is_pipelined))


def _run(case: Case, speculation: SpeculationConfig) -> tuple[float, str]:
    """Only the draft model guesses: lookups would help all alike."""
    report = simulate(replace(case.scenario, speculation=replace(speculation, lookup=False)))
    if report.num_failed:
        raise RuntimeError(f"{report.num_failed} streams failed in {case.name}")
    open_s = report.end_to_end_s.mean * report.num_streams
    return report.num_tokens / open_s, report.control.reason
