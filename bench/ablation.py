"""What each part of adaptive control is worth, simulated: the same loads with it and without.

A part is taken out by putting the simplest thing in its place. The loads are like those of `python -m bench control`,
and smaller; with and without run the same streams from the same seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final
from unittest.mock import patch

from bench.control import EASY, HARD, MODES, Alternating, Case, adaptive
from bench.results import Result
from core import costs, curve, economy, estimators
from core.speculation import chances, grower
from core.trees import Floats
from orchestrator import knowledge, marginal, watching
from simulation.hardware import HopLaw
from simulation.presets import PRESETS
from simulation.scenario import Arrivals, Change, Closed, Scenario

HARDWARE: Final = ("70b+1b", "8b+0.5b", "this-machine")
Patch = tuple[Any, str, Any]
"""Of what, its name, and what stands in its place."""


def _constant(value: Any) -> Any:
    return lambda *_args, **_settings: value


PARTS: Final[Mapping[str, tuple[Patch, ...]]] = {
    "a session's own level": ((estimators.Level, "estimate", _constant(0.0)),),
    "how sure the draft is": (
        (estimators.ConfidenceFit, "line", lambda _, expected: (estimators.logit(expected), 0.0)),
    ),
    "what sureness is worth, learned": ((estimators.ConfidenceFit, "line", _constant((0.0, 1.0))),),
    "acceptance by depth": ((estimators.RankProfile, "heads", lambda self, level=0.0: _flat_heads(self, level)),),
    "ranks, learned": ((estimators.RankProfile, "_see_hazards", staticmethod(_constant(None))),),
    "ranks by their shares": ((chances, "_tails", lambda _said, usual, _total: usual),),
    "pace": ((costs.PassCost, "_take_pace", _constant(None)),),
    "outliers count for less": ((costs, "OUTLIER", 1e9),),
    "hope between widths": ((curve.Curve, "_between", lambda self, left, rows: self._line(left, left + 1, rows)),),
    "hope beyond what was seen": ((curve, "HOPE", 1.0),),
    "the hop apart from the wire": ((costs.EngineCost, "hop_s", property(lambda self: self.wire_s)),),
    "halves of sessions in turn": (
        (
            economy.Economy,
            "in_turn_s",
            lambda self, nodes, rows, branches=0.0: self.verify_s(nodes, branches) + self.draft_s(rows),
        ),
    ),
    "rows by what a pass costs": ((economy.Economy, "rows_worth", _constant(8)),),
    "plain decoding as the least rate": (
        (marginal.MarginalPilot, "rate", property(lambda self: self._round_tokens / self._round_s)),
    ),
    "the rate of the last rounds alone": ((marginal, "RATE_ROUNDS", 256.0),),
    "a first rate that holds a while": ((marginal, "FIRST_ROUNDS", 0.0),),
    "the rate of those before": (
        (knowledge.Knowledge, "usual_round", lambda self, _kind, prior: (prior, self.lately.verify_s(0.0))),
    ),
    "waiting for a pass": ((marginal.MarginalPilot, "adds_enough", _constant(False)),),
    "no waiting where passes are shared": (
        (marginal.MarginalPilot, "adds_enough", lambda *seen: _adds_enough_alone(*seen)),
    ),
    "rest": ((marginal.MarginalPilot, "wants_rest", False),),
    "three rounds against drafting": ((marginal, "MAX_AGAINST", 1),),
    "the price of a pass in turn": ((economy.Economy, "pass_price", _constant(0.0)),),
    "passes by forecast": ((marginal, "passes_worth", lambda _law, _economy, most, *_: most),),
    "offers": ((marginal.MarginalPilot, "num_outcomes", 0),),
    "offers beyond the first": ((marginal, "OFFERED_OUTCOMES", 1),),
    "a least chance": ((grower, "MIN_REACH", 1e-9),),
    "costs that hold a while": ((knowledge, "GRAIN", 0.0), (knowledge, "LOAD_CHANGE", 1.0)),
    "a law that holds a while": ((watching, "LAW_ROUNDS", 1), (estimators, "TOLERANCE", 0.0)),
}
"""Each part, and what stands in its place without it."""


def _flat_heads(profile: estimators.RankProfile, level: float) -> tuple[float, ...]:
    chance = min(estimators.logistic(estimators.logit(profile._heads[0].mean()) + level), estimators.MAX_CHANCE)
    return (chance,) * len(profile._heads)


def _adds_enough_alone(pilot: marginal.MarginalPilot, reach: Floats, open_reach: Floats, next_s: float) -> bool:
    """As if nobody else had a part in the target's passes."""
    with patch.object(economy.Economy, "is_shared", False):
        return ADDS_ENOUGH(pilot, reach, open_reach, next_s)


ADDS_ENOUGH = marginal.MarginalPilot.adds_enough


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of this benchmark."""
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the work (default: 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose name contains this")
    parser.add_argument("--loads", default="", metavar="TEXT", help="loads whose name contains this")


def measure(args: argparse.Namespace) -> list[Result]:
    """Of each part its worth: the mean over all loads, the most and the least of one load."""
    loads = [case for case in cases() if args.loads in case.name]
    parts = [part for part in PARTS if args.only in part]
    with ProcessPoolExecutor(args.jobs) as pool:
        rates = pool.map(partial(_rates, loads), ["", *parts])
        whole = next(rates)
        return [_said(_worth(part, loads, whole, without)) for part, without in zip(parts, rates, strict=True)]


def _said(result: Result) -> Result:
    print(f"{result.name}: {result.value}", file=sys.stderr, flush=True)
    return result


def _rates(loads: list[Case], part: str) -> list[float]:
    with ExitStack() as stack:
        for where, name, other in PARTS.get(part, ()):
            stack.enter_context(patch.object(where, name, other))
        marginal.passes_worth.cache_clear() if hasattr(marginal.passes_worth, "cache_clear") else None
        return [adaptive(case)[0] for case in loads]


def _worth(part: str, loads: list[Case], whole: list[float], without: list[float]) -> Result:
    ratios = {case.name: with_it / rate for case, with_it, rate in zip(loads, whole, without, strict=True)}
    most, least = max(ratios, key=lambda name: ratios[name]), min(ratios, key=lambda name: ratios[name])
    settings = {
        "median": round(statistics.median(ratios.values()), 3),
        "most": f"{ratios[most]:.3f} ({most})",
        "least": f"{ratios[least]:.3f} ({least})",
    }
    return Result(f"ablation/{part}", round(statistics.geometric_mean(ratios.values()), 3), "x", settings=settings)


def cases() -> Iterator[Case]:
    """Steady loads, changing ones, and hard text where rows cost."""
    for hardware, mode, num, is_pipelined in product(HARDWARE, ("greedy", "coupled"), (1, 4, 16), (True, False)):
        if (mode == "greedy") == (num == 4) and not is_pipelined:
            continue
        temperature, verification = MODES[mode]
        scenario = Scenario(
            hardware=PRESETS[hardware],
            temperature=temperature,
            verification=verification,
            load=Closed(num, max(5, num)),
            max_tokens=80,
        )
        yield _case(f"{hardware} {mode} {num}", scenario, is_pipelined=is_pipelined)
    for is_pipelined in (True, False):
        yield _case("hard text 16", _hard(16), is_pipelined=is_pipelined)
        yield _case("texts change", _texts(), is_pipelined=is_pipelined)
    yield _case("draft slows down", Scenario(load=Closed(4, 8), changes=(Change(4.0, "draft", 8.0),)))
    far = replace(PRESETS["70b+1b"], target_hop=HopLaw(0.01))
    yield _case("target far away", Scenario(hardware=far, load=Closed(1, 4), max_tokens=160))
    waves = ((8.0, 0.4), (4.0, 2.5), (8.0, 0.4))
    load = Scenario(hardware=PRESETS["this-machine"], load=Arrivals(waves), max_tokens=80, prompt_tokens=24)
    yield _case("load rises and falls", load)


def _case(name: str, scenario: Scenario, *, is_pipelined: bool = True) -> Case:
    return Case("ablation", name if is_pipelined else f"{name} in turn", scenario, is_pipelined)


def _hard(num: int) -> Scenario:
    return Scenario(hardware=PRESETS["this-machine"], law=HARD, load=Closed(num, num), prompt_tokens=24)


def _texts() -> Scenario:
    return Scenario(law=Alternating(EASY, HARD, 90), load=Closed(1, 2), max_tokens=360)
