"""Adaptive control against fixed chains and trees, simulated: on steady loads, changing ones, and where plain wins.

All policies run the same streams with the same seeds. A rate is tokens divided by the total time that streams are open,
as a client sees it. The last streams of a load, which have the engines to themselves, thus do not distort it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from bench.results import Result, at_least, at_most, named
from core.config import SpeculationConfig
from core.records import Verification
from simulation.engines import PRESETS, Agreement, Law, SteadyLaw
from simulation.scenario import Arrivals, Change, Closed, Scenario, simulate

GAMMAS: Final = (0, 1, 2, 3, 4, 6, 8)
TREE_NODES: Final = (4, 8, 16, 32)
TREE_DEPTHS: Final = (4, 8)
"""Depths of static trees. No tree is larger or deeper than adaptive control may make it."""
PATH_FLOORS: Final = (0.3, 0.1, 0.03, 0.01)
STOP_SHARE: Final = 0.85
"""A sweep ends when a larger draft yields less than this share of the best; still larger ones would yield even less."""
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

Size = int | str
Rates = dict[Size, float]
"""Tokens per second of a stream, by the policy's size."""
NAMES: Final = {
    "static": "static chain",
    "path_probability": "chain by the draft's chances",
    "static_tree": "static tree",
}


@dataclass(frozen=True, slots=True)
class Alternating:
    """A text that is alternately easy and hard to guess."""

    easy: Law
    hard: Law
    num_tokens: int

    def at(self, seed: int, index: int, depth: int = 0) -> Agreement:
        return self._now(index).at(seed, index, depth)

    def num_accepted_of_block(self, seed: int, index: int, num_guesses: int) -> int | None:
        return self._now(index).num_accepted_of_block(seed, index, num_guesses)

    def _now(self, index: int) -> Law:
        return self.hard if index // self.num_tokens % 2 else self.easy


@dataclass(frozen=True)
class ControlCase:
    """A scenario without a policy."""

    kind: str
    name: str
    scenario: Scenario
    is_pipelined: bool

    @property
    def settings(self) -> dict[str, object]:
        return {"pipelining": "on" if self.is_pipelined else "off"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--full", action="store_true", help="every combination of the steady loads, which takes an hour"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the work (default: 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")


def measure(args: argparse.Namespace) -> list[Result]:
    """Run all cases, each against every fixed policy."""
    every = (*stationary(full=args.full), *fleets(), *changing(), *loaded())
    cases = named(args.only, every, lambda case: case.name)
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs) as pool:
            return [result for results in pool.map(judged, cases) for result in results]
    return [result for case in cases for result in judged(case)]


# Cases


def stationary(*, full: bool) -> Iterator[ControlCase]:
    """Steady loads: texts of the demo pair, on each hardware, with each number of streams.

    With `full`, each load runs with every verification, pipelined and in turn. Otherwise these alternate over the
    loads.
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
            yield ControlCase("stationary", name, scenario, is_pipelined)


def fleets() -> Iterator[ControlCase]:
    """Steady loads where orchestrators have several engines of each kind, or share one."""
    for hardware, mode, num_at_once, num_engines, num_orchestrators in (
        ("this-machine", "greedy", 16, 8, 1),
        ("70b+1b", "coupled", 8, 8, 1),
        ("this-machine", "greedy", 16, 1, 4),
        ("70b+1b", "coupled", 16, 1, 4),
    ):
        temperature, verification = MODES[mode]
        for is_pipelined in (True, False):
            scenario = Scenario(
                hardware=PRESETS[hardware],
                temperature=temperature,
                verification=verification,
                load=Closed(num_at_once, 2 * num_at_once),
                num_targets=num_engines,
                num_drafts=num_engines,
                num_orchestrators=num_orchestrators,
            )
            way = "pipelined" if is_pipelined else "in turn"
            where = f"{num_engines} engines" if num_engines > 1 else f"{num_orchestrators} orchestrators"
            name = f"{hardware} {mode} {num_at_once} streams on {where} {way}"
            yield ControlCase("stationary", name, scenario, is_pipelined)


def changing() -> Iterator[ControlCase]:
    """Loads whose best draft length changes over time."""
    texts = Scenario(law=Alternating(EASY, HARD, 160), load=Closed(1, 4), max_tokens=960)
    waves = ((50.0, 0.4), (8.0, 2.5), (50.0, 0.4), (8.0, 2.5), (30.0, 0.4))
    load = Scenario(
        hardware=PRESETS["this-machine"], temperature=1.0, load=Arrivals(waves), max_tokens=120, prompt_tokens=24
    )
    slow = Scenario(load=Closed(4, 20), changes=(Change(2.0, "draft", 8.0),))
    for name, scenario in (("easy and hard text", texts), ("load rises and falls", load), ("draft slows down", slow)):
        for is_pipelined in (True, False):
            way = "pipelined" if is_pipelined else "in turn"
            yield ControlCase("changing", f"{name} {way}", scenario, is_pipelined)


def loaded() -> Iterator[ControlCase]:
    """Many streams of hard text where rows cost time, so that plain decoding is hard to beat."""
    for num_at_once, is_pipelined in product((16, 32), (True, False)):
        scenario = Scenario(
            hardware=PRESETS["this-machine"],
            law=HARD,
            load=Closed(num_at_once, 2 * num_at_once),
            prompt_tokens=24,
        )
        name = f"hard text {num_at_once} streams {'pipelined' if is_pipelined else 'in turn'}"
        yield ControlCase("loaded", name, scenario, is_pipelined)


# Results


def judged(case: ControlCase) -> list[Result]:
    """Results of a case: adaptive control against its goal, and against each fixed policy."""
    if case.kind == "loaded":
        return _against_plain(case)
    swept = sweep(case)
    tops = {policy: max(rates.values()) for policy, rates in swept.items()}
    rate, reason = adaptive(case)
    settings = {
        **case.settings,
        "adaptive_tokens_per_s": round(rate, 2),
        **{f"{policy}_tokens_per_s": _rounded(rates) for policy, rates in swept.items()},
        "best_gamma": _best(swept["static"]),
        "best_static": max(tops, key=lambda policy: tops[policy]),
        "last_change": reason,
    }
    name = f"control/{case.kind}/{case.name}: adaptive over best"
    goal = STATIONARY_GOAL if case.kind == "stationary" else CHANGING_GOAL
    of_all = at_least(goal, Result(f"{name} static", round(rate / max(tops.values()), 3), "x", settings=settings))
    apart = [_over(f"{name} {NAMES[policy]}", rate, rates, case) for policy, rates in swept.items()]
    return [of_all, *apart]


def _over(name: str, rate: float, rates: Rates, case: ControlCase) -> Result:
    best = _best(rates)
    return Result(name, round(rate / rates[best], 3), "x", settings={**case.settings, "best": best})


def _best(rates: Rates) -> Size:
    return max(rates, key=lambda size: rates[size])


def _rounded(rates: Rates) -> Rates:
    return {size: round(rate, 2) for size, rate in rates.items()}


def _against_plain(case: ControlCase) -> list[Result]:
    plain, fixed = static(case, 0), static(case, LOADED_GAMMA)
    rate, reason = adaptive(case)
    settings = {**case.settings, "plain_tokens_per_s": round(plain, 2)}
    name = f"control/loaded/{case.name}"
    steady = Result(f"{name}: adaptive over plain", round(rate / plain, 3), "x", settings={**settings, "last": reason})
    falls = Result(f"{name}: static gamma {LOADED_GAMMA} over plain", round(fixed / plain, 3), "x", settings=settings)
    return [at_least(LOADED_GOAL, steady), at_most(LOADED_STATIC, falls)]


def sweep(case: ControlCase) -> dict[str, Rates]:
    """Tokens per second of a stream under each fixed policy, by size. Rejection has no trees."""
    swept = {"static": chains(case), "path_probability": paths(case)}
    if case.scenario.verification is Verification.COUPLED:
        swept["static_tree"] = trees(case)
    return swept


def chains(case: ControlCase) -> Rates:
    """Rates by draft length, until longer drafts stop paying."""
    rates: Rates = {}
    for gamma in GAMMAS:
        rates[gamma] = static(case, gamma)
        if gamma > 1 and rates[gamma] < STOP_SHARE * max(rates.values()):
            break
    return rates


def paths(case: ControlCase) -> Rates:
    """Rates by smallest path probability."""
    return {f"{floor:g}": path(case, floor) for floor in PATH_FLOORS}


def trees(case: ControlCase) -> Rates:
    """Rates by number of nodes and depth, until more nodes stop paying."""
    rates: Rates = {}
    for nodes in TREE_NODES:
        depths = [depth for depth in TREE_DEPTHS if depth <= nodes]
        found = [tree(case, nodes, depth) for depth in depths]
        rates |= {f"{nodes} nodes, {depth} deep": rate for depth, rate in zip(depths, found, strict=True)}
        if max(found) < STOP_SHARE * max(rates.values()):
            break
    return rates


def static(case: ControlCase, gamma: int) -> float:
    """Tokens per second of a stream with blocks of exactly `gamma` guesses."""
    return _fixed(case, policy="static", max_draft_tokens=gamma)


def path(case: ControlCase, floor: float) -> float:
    """Tokens per second with chains that end where the draft's path probability falls below `floor`."""
    return _fixed(case, policy="path_probability", min_path_probability=floor, max_draft_tokens=GAMMAS[-1])


def tree(case: ControlCase, nodes: int, depth: int) -> float:
    """Tokens per second with trees of the `nodes` nodes that are likeliest by the draft's probabilities."""
    return _fixed(case, policy="static_tree", max_block_tokens=nodes, max_draft_tokens=depth)


def adaptive(case: ControlCase) -> tuple[float, str]:
    """Tokens per second of a stream under adaptive control, and the reason of its last change."""
    return _run(case, SpeculationConfig(max_draft_tokens=GAMMAS[-1], pipelining=case.is_pipelined))


def _fixed(case: ControlCase, **settings: Any) -> float:
    return _run(case, SpeculationConfig(**settings, pipelining=case.is_pipelined))[0]


def _run(case: ControlCase, speculation: SpeculationConfig) -> tuple[float, str]:
    """Run a case with the draft model as the only source, because other guessers would help all policies alike."""
    report = simulate(replace(case.scenario, speculation=replace(speculation, guessers=("draft",))))
    if report.num_failed:
        raise RuntimeError(f"{report.num_failed} streams failed in {case.name}")
    if any(change.at_s >= report.elapsed_s for change in case.scenario.changes):
        raise RuntimeError(f"{case.name} was over after {report.elapsed_s:.1f} s, before it had changed")
    open_s = report.end_to_end_s.mean * report.num_streams
    return report.num_tokens / open_s, report.control.reason
