"""`outrider simulate`: how fast a pair would be on hardware that you describe, decoded in three ways.

Knows arguments and what they stand for in a scenario; the orchestrator that is simulated is the one that serves.
Imports neither Ray nor torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.records import Policy, Verification
from core.results import as_json
from deploy.cli import simulate_day, terminal
from deploy.settings import read_config
from simulation.engines import PRESETS, RECORDED_TEMPERATURES, Hardware, HopLaw, large_target, small_draft, steady_law
from simulation.report import (
    Comparison,
    advice_of,
    compare,
    comparison_lines,
    comparison_results,
    plain,
    run,
    sequential,
    speed_picture,
)
from simulation.scenario import Arrivals, Closed, Scenario

MIN_STREAMS = 16
NUM_ARRIVALS = 40
DRAFT_ROWS = 64
PLOT_STREAMS = (1, 2, 4, 8, 16)
PLOT_TOKENS = 64

Check = Callable[[Any], bool]


def add_simulate(commands: Any) -> None:
    """Add the command to those of `outrider` (an argparse action of subparsers)."""
    parser = commands.add_parser("simulate", help="how fast a pair would be on hardware that you describe")
    parser.set_defaults(command=_simulate)
    presets = "; ".join(f"{name}: {hardware.about}" for name, hardware in PRESETS.items())
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument("--preset", choices=PRESETS, default="70b+1b", help=presets)
    hardware.add_argument("--verify-ms", type=float, metavar="MS", help="of a target pass over a few rows")
    hardware.add_argument("--draft-ms", type=float, metavar="MS", help="of a draft pass")
    hardware.add_argument(
        "--draft-rows", type=int, metavar="N",
        help=f"up to which a draft pass takes the same time, in proportion beyond; {DRAFT_ROWS} without it",
    )  # fmt: skip
    hardware.add_argument("--hop-ms", type=float, metavar="MS", help="to either engine and back")
    hardware.add_argument("--targets", type=int, default=1, metavar="N", help="replicas of the target")
    hardware.add_argument("--drafts", type=int, default=1, metavar="N", help="replicas of the draft")
    _add_texts(parser.add_argument_group("texts"))
    _add_load(parser.add_argument_group("load"))
    _add_drafting(parser.add_argument_group("drafting behind verification"))
    simulate_day.add_day(parser.add_argument_group("instead of rounds, a day of autoscaling"))
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed by draft length and by streams, as SVG")


def _add_texts(group: Any) -> None:
    group.add_argument(
        "--acceptance", type=float, metavar="A",
        help="share of the draft's likeliest tokens that the target accepts; without it, what was recorded of the demo "
        "pair is replayed",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, and the default")
    group.add_argument("--verification", choices=[each.value for each in Verification], default="coupled")
    group.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    group.add_argument("--tokens", type=int, default=128, metavar="N", help="of each stream's output")


def _add_load(group: Any) -> None:
    load = group.add_mutually_exclusive_group()
    load.add_argument("--streams", type=int, metavar="N", help="at any time: one ends, the next begins; 1 without it")
    load.add_argument("--arrivals", type=float, metavar="RATE", help="streams a second that come when they come")


def _add_drafting(group: Any) -> None:
    default = SpeculationConfig()
    group.add_argument("--policy", choices=get_args(Policy), default=default.policy)
    group.add_argument(
        "--gamma", type=int, default=default.max_draft_tokens, metavar="N", help="guesses in a row at most"
    )


def _simulate(args: argparse.Namespace) -> int:
    """Raises: ConfigError."""
    for path in filter(None, (args.json, args.plot)):
        _require(path.parent.is_dir(), f"{path.parent} is no directory to write {path.name} to")
    return _simulate_rounds(args) if args.day is None else _simulate_day(args)


def _simulate_day(args: argparse.Namespace) -> int:
    _check(args)
    day = simulate_day.run_day(args, read_config(args.config) if args.config is not None else None)
    sys.stdout.write("\n".join([*simulate_day.lines(day), ""]))
    if args.json is not None:
        args.json.write_text(as_json(simulate_day.results(day)))
    if args.plot is not None:
        args.plot.write_text(simulate_day.draw(day))
    return 0


def _simulate_rounds(args: argparse.Namespace) -> int:
    scenario = scenario_of(args)
    began_s = time.monotonic()
    comparison = compare(scenario)
    results = comparison_results(comparison, _settings(args))
    sys.stdout.write("\n".join([_heading(args, scenario), "", *comparison_lines(comparison), ""]))
    sys.stdout.write(f"\n{advice_of(comparison)}\n")
    if args.json is not None:
        args.json.write_text(as_json(results))
    if args.plot is not None:
        args.plot.write_text(speed_picture(comparison, by_streams(scenario, comparison)))
    terminal.say(f"simulated in {time.monotonic() - began_s:.0f} s")
    return 0


# From arguments to a scenario


def scenario_of(args: argparse.Namespace) -> Scenario:
    """What was described. Raises: ConfigError, which names the option."""
    _check(args)
    return Scenario(
        hardware=_hardware(args),
        temperature=args.temperature,
        verification=Verification(args.verification),
        law=None if args.acceptance is None else steady_law(args.acceptance, args.temperature),
        load=_load(args),
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.tokens,
        num_targets=args.targets,
        num_drafts=args.drafts,
        speculation=SpeculationConfig(policy=args.policy, max_draft_tokens=args.gamma, lookup=False),
        seed=args.seed,
    )


def _check(args: argparse.Namespace) -> None:
    """Raises: ConfigError."""
    rules: Sequence[tuple[str, Any, Check, str]] = (
        ("--verify-ms", args.verify_ms, lambda x: 0 < x <= 1e5, "above 0, and at most 100000"),
        ("--draft-ms", args.draft_ms, lambda x: 0 < x <= 1e5, "above 0, and at most 100000"),
        ("--draft-rows", args.draft_rows, lambda x: 1 <= x <= 4096, "in [1, 4096]"),
        ("--hop-ms", args.hop_ms, lambda x: 0 <= x <= 1e4, "in [0, 10000]"),
        ("--targets", args.targets, lambda x: 1 <= x <= 64, "in [1, 64]"),
        ("--drafts", args.drafts, lambda x: 1 <= x <= 64, "in [1, 64]"),
        ("--acceptance", args.acceptance, lambda x: 0 <= x <= 1, "in [0, 1]"),
        ("--temperature", args.temperature, lambda x: 0 <= x <= 2, "in [0, 2]"),
        ("--prompt-tokens", args.prompt_tokens, lambda x: 1 <= x <= 4096, "in [1, 4096]"),
        ("--tokens", args.tokens, lambda x: 2 <= x <= 4096, "in [2, 4096]"),
        ("--streams", args.streams, lambda x: 1 <= x <= 256, "in [1, 256]"),
        ("--arrivals", args.arrivals, lambda x: 0 < x <= 1000, "above 0, and at most 1000"),
        ("--gamma", args.gamma, lambda x: 1 <= x <= 64, "in [1, 64]"),
        ("--day", args.day, lambda x: 0 < x <= 1e5, "above 0, and at most 100000"),
        ("--night", args.night, lambda x: 0 <= x <= 1, "in [0, 1]"),
        ("--crowds", args.crowds, lambda x: 0 <= x <= 100, "in [0, 100]"),
        ("--session-kv", args.session_kv, lambda x: 0 < x <= 1, "above 0, and at most 1"),
        ("--session-work", args.session_work, lambda x: 0 < x <= 1, "above 0, and at most 1"),
    )
    for option, value, is_allowed, allowed in rules:
        _require(value is None or is_allowed(value), f"{option} must be {allowed}, got {value!r}")
    is_recorded = args.acceptance is not None or args.temperature in RECORDED_TEMPERATURES
    recorded = ", ".join(f"{temperature:g}" for temperature in RECORDED_TEMPERATURES)
    _require(is_recorded, f"--temperature {args.temperature:g} was not recorded ({recorded} were): give --acceptance")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(problem)


def _hardware(args: argparse.Namespace) -> Hardware:
    """The preset, but for what is said otherwise."""
    hardware = PRESETS[args.preset]
    if args.verify_ms is not None:
        hardware = replace(hardware, target=large_target(args.verify_ms / 1e3))
    if args.draft_ms is not None or args.draft_rows is not None:
        pass_s = hardware.draft.pass_s(1) if args.draft_ms is None else args.draft_ms / 1e3
        hardware = replace(hardware, draft=small_draft(pass_s, args.draft_rows or DRAFT_ROWS))
    if args.hop_ms is not None:
        hop = HopLaw(args.hop_ms / 1e3)
        hardware = replace(hardware, target_hop=hop, draft_hop=hop)
    return hardware


def _load(args: argparse.Namespace) -> Closed | Arrivals:
    """As many streams as a steady figure takes."""
    if args.arrivals is not None:
        return Arrivals(((NUM_ARRIVALS / args.arrivals, args.arrivals),))
    num_at_once = args.streams or 1
    return Closed(num_at_once, max(MIN_STREAMS, 2 * num_at_once))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, for the file."""
    left_out = ("command", "json", "plot")
    return {name: value for name, value in vars(args).items() if name not in left_out and value is not None}


def _heading(args: argparse.Namespace, scenario: Scenario) -> str:
    hardware = scenario.hardware
    changes = [f"--{name.replace('_', '-')}" for name in ("verify_ms", "draft_ms", "draft_rows", "hop_ms")
               if getattr(args, name) is not None]  # fmt: skip
    about = f"{PRESETS[args.preset].about}{', but for ' + ', '.join(changes) if changes else ''}"
    agreement = "as recorded of the demo pair" if args.acceptance is None else f"acceptance {args.acceptance:g}"
    load = f"{args.arrivals:g} streams a second" if args.arrivals is not None else f"{args.streams or 1} at a time"
    return (
        f"{about}\n"
        f"target pass {hardware.target.pass_s(1) * 1e3:g} ms, draft pass {hardware.draft.pass_s(1) * 1e3:g} ms, "
        f"hop {hardware.target_hop.round_trip_s * 1e3:g} / {hardware.draft_hop.round_trip_s * 1e3:g} ms; "
        f"{args.targets} target(s), {args.drafts} draft(s)\n"
        f"T = {args.temperature:g}, {agreement}; {load}, {args.prompt_tokens} tokens in, {args.tokens} out"
    )


# For the plot


def by_streams(scenario: Scenario, comparison: Comparison) -> dict[str, list[tuple[int, float]]]:
    """Tokens a second of all streams together, each way, by how many there are at a time."""
    best = comparison.best_sequential
    in_turn = replace(sequential(scenario, best.gamma or 0), verification=best.verification)
    ways = {"plain": plain(scenario), "sequential": in_turn, "pipelined": scenario}
    found: dict[str, list[tuple[int, float]]] = {}
    for name, way in ways.items():
        for num in PLOT_STREAMS:
            loaded = replace(way, load=Closed(num, max(4, 2 * num)), max_tokens=min(scenario.max_tokens, PLOT_TOKENS))
            found.setdefault(name, []).append((num, run(name, loaded).report.tokens_per_s))
    return found
