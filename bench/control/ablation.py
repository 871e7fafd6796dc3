"""The worth of each part of adaptive control, simulated: the same loads with and without it.

A part is removed by replacing it with the simplest alternative. The loads resemble those of `python -m bench control`
but are smaller. Both runs use the same streams and seeds.
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

from bench.control.control import EASY, HARD, MODES, Alternating, ControlCase
from bench.control.control import adaptive as run_adaptive
from bench.results import Result, named
from core.costs import engine_cost, pass_cost
from core.speculation import PRIOR, calibration, chances, logit, tree_builder
from orchestrator.policy import adaptive, depth_acceptance, mode_choice, offers, shared_estimates, tree_policy
from simulation.engines import PRESETS, HopLaw
from simulation.scenario import Arrivals, Change, Closed, Scenario

HARDWARE: Final = ("70b+1b", "8b+0.5b", "this-machine")
Patch = tuple[Any, str, Any]
"""(object, attribute, replacement)."""


def _constant(value: Any) -> Any:
    return lambda *_args, **_settings: value


def _one_after_the_other(costs: engine_cost.CostModel, nodes: float, rows: float, num_passes: int) -> float:
    return costs.verify_s(nodes) + costs.draft_s(rows, num_passes)


PARTS: Final[Mapping[str, tuple[Patch, ...]]] = {
    "how sure the draft is": ((tree_policy.TreePolicy, "_calibration", (logit(PRIOR), 0.0)),),
    "calibration": ((calibration, "STEP", 0.0),),
    "averages over fewer": ((calibration, "WINDOW", 16.0),),
    "averages over more": ((calibration, "WINDOW", 256.0),),
    "plain decoding as the least rate": ((engine_cost.CostModel, "plain_rate", 0.0),),
    "passes by forecast": ((adaptive.AdaptivePolicy, "_forecast", lambda self: self.max_depth),),
    "acceptance by depth": ((depth_acceptance.DepthAcceptance, "observe", _constant(None)),),
    "groups that take turns": ((engine_cost.CostModel, "turn_s", _one_after_the_other),),
    "a pass costs more beyond what was seen": ((pass_cost.Curve, "_slope", _constant(0.0)),),
    "costs looked at always": ((shared_estimates, "REFRESH_ROUNDS", 1),),
    "costs of one pass": ((pass_cost, "NUM_RECENT", 1),),
    "costs by every width": ((pass_cost, "FEW_ROWS", 1),),
    "what branches cost": ((pass_cost.PassCost, "branch_s", 0.0),),
    "ranks by their shares": ((chances, "_tails", lambda _said, usual, _total: usual),),
    "waits by what came late": ((adaptive.AdaptivePolicy, "_late_chance", property(lambda self: self._first_chance)),),
    "waiting for a first guess": ((adaptive.AdaptivePolicy, "is_worth_waiting", _constant(False)),),
    "plain steps while nothing is worth its row": ((adaptive.AdaptivePolicy, "goes_on_plainly", _constant(False)),),
    "extrapolation beyond what was seen": ((pass_cost, "EXTRAPOLATION", 1.0),),
    "rows by what a pass costs": ((engine_cost.CostModel, "rows_worth", 8),),
    "trials by what they cost": ((adaptive.AdaptivePolicy, "_may_try", _constant(True)),),
    "rest": ((adaptive.AdaptivePolicy, "wants_rest", False),),
    "rest soon": ((adaptive, "REST_ROUNDS", 8), (offers, "REST_ROUNDS", 8)),
    "pause": ((mode_choice.ModeChoice, "observe_round", _constant("")),),
    "who shares engines": ((shared_estimates.Sharing, "observe", _constant(None)),),
    "offers": ((adaptive.AdaptivePolicy, "num_outcomes", 0),),
    "offers beyond the first": ((offers, "OFFERED_OUTCOMES", 1),),
    "offers beyond the fourth": ((offers, "OFFERED_OUTCOMES", 4),),
    "a least chance": ((tree_builder, "MIN_PATH_PROB", 1e-9),),
}
"""Each part, and the patches that replace it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share the work (default: 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose name contains this")
    parser.add_argument("--loads", default="", metavar="TEXT", help="loads whose name contains this")


def measure(args: argparse.Namespace) -> list[Result]:
    """The worth of each part: the mean over all loads, with the largest and the smallest."""
    loads, parts = named(args.loads, cases(), lambda case: case.name), named(args.only, PARTS)
    with ProcessPoolExecutor(args.jobs) as pool:
        rates = pool.map(partial(_rates, loads), ["", *parts])
        whole = next(rates)
        return [_said(_worth(part, loads, whole, without)) for part, without in zip(parts, rates, strict=True)]


def _said(result: Result) -> Result:
    print(f"{result.name}: {result.value}", file=sys.stderr, flush=True)
    return result


def _rates(loads: list[ControlCase], part: str) -> list[float]:
    with ExitStack() as stack:
        for where, name, other in PARTS.get(part, ()):
            stack.enter_context(patch.object(where, name, other))
        return [run_adaptive(case)[0] for case in loads]


def _worth(part: str, loads: list[ControlCase], whole: list[float], without: list[float]) -> Result:
    ratios = {case.name: with_it / rate for case, with_it, rate in zip(loads, whole, without, strict=True)}
    most, least = max(ratios, key=lambda name: ratios[name]), min(ratios, key=lambda name: ratios[name])
    settings = {
        "median": round(statistics.median(ratios.values()), 3),
        "most": f"{ratios[most]:.3f} ({most})",
        "least": f"{ratios[least]:.3f} ({least})",
    }
    return Result(f"ablation/{part}", round(statistics.geometric_mean(ratios.values()), 3), "x", settings=settings)


def cases() -> Iterator[ControlCase]:
    """Steady loads, changing ones, and hard text where rows cost time."""
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
    yield _case("draft slows down", Scenario(load=Closed(4, 8), changes=(Change(1.0, "draft", 8.0),)))
    far = replace(PRESETS["70b+1b"], target_hop=HopLaw(0.01))
    yield _case("target far away", Scenario(hardware=far, load=Closed(1, 4), max_tokens=160))
    waves = ((8.0, 0.4), (4.0, 2.5), (8.0, 0.4))
    load = Scenario(hardware=PRESETS["this-machine"], load=Arrivals(waves), max_tokens=80, prompt_tokens=24)
    yield _case("load rises and falls", load)


def _case(name: str, scenario: Scenario, *, is_pipelined: bool = True) -> ControlCase:
    return ControlCase("ablation", name if is_pipelined else f"{name} in turn", scenario, is_pipelined)


def _hard(num: int) -> Scenario:
    return Scenario(hardware=PRESETS["this-machine"], law=HARD, load=Closed(num, num), prompt_tokens=24)


def _texts() -> Scenario:
    return Scenario(law=Alternating(EASY, HARD, 90), load=Closed(1, 2), max_tokens=360)
