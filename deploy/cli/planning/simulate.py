"""`outrider simulate`: how fast a pair would be on hardware that you describe, decoded in three ways.

Knows options and the scenarios that they describe. The simulated orchestrator is the code that serves.
Imports neither Ray nor torch.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.ranges import Range
from core.records import Policy, Verification
from core.results import as_json
from deploy.cli import terminal
from deploy.cli.options import check_folders, number
from deploy.cli.planning import simulate_day
from deploy.cli.planning.simulate_day import DayOptions
from simulation.engines import PRESETS, RECORDED_TEMPERATURES, Hardware, HopLaw, large_target, small_draft, steady_law
from simulation.report import (
    Comparison,
    advice_of,
    check_pictures,
    compare,
    comparison_lines,
    comparison_results,
    draw_speed,
    drawing,
    plain,
    run,
    sequential,
)
from simulation.scenario import Arrivals, Closed, Scenario

MIN_STREAMS = 16
NUM_ARRIVALS = 40
DRAFT_ROWS = 64
PLOT_STREAMS = (1, 2, 4, 8, 16)
PLOT_TOKENS = 64

HARDWARE, TEXTS, LOAD, DRAFTING = "Hardware", "Texts", "Load", "Drafting behind verification"
REPLICAS = Range(1, 64, is_whole=True)
TOKENS = Range(1, 4096, is_whole=True)
DEFAULT = SpeculationConfig()
Preset = Literal["70b+1b", "32b+0.6b", "8b+0.5b", "far-draft", "this-machine"]
PRESETS_HELP = "; ".join(f"{name}: {hardware.about}" for name, hardware in PRESETS.items())


def _hardware_ms(help_text: str) -> Any:
    return number(Range(0, 1e5, excludes_low=True), f"{help_text}, in milliseconds", metavar="MS", panel=HARDWARE)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(DayOptions):
    """Predict the speed of a pair on hardware that you describe, for three ways of decoding.

    The ways are plain decoding, drafting and verification in turn, and drafting during verification.
    """

    preset: Annotated[Preset, Option(help=PRESETS_HELP, rich_help_panel=HARDWARE)] = "70b+1b"
    verify_ms: Annotated[float | None, _hardware_ms("A target pass over a few rows")] = None
    draft_ms: Annotated[float | None, _hardware_ms("A draft pass")] = None
    draft_rows: Annotated[
        int | None,
        number(
            Range(1, 4096, is_whole=True),
            f"Rows up to which a draft pass takes constant time; beyond, in proportion ({DRAFT_ROWS} with --draft-ms)",
            panel=HARDWARE,
        ),
    ] = None
    hop_ms: Annotated[
        float | None,
        number(Range(0, 1e4), "Network round trip to either engine, in milliseconds", metavar="MS", panel=HARDWARE),
    ] = None
    targets: Annotated[int, number(REPLICAS, "Replicas of the target", panel=HARDWARE)] = 1
    drafts: Annotated[int, number(REPLICAS, "Replicas of the draft", panel=HARDWARE)] = 1

    acceptance: Annotated[
        float | None,
        number(
            Range(0, 1),
            "Share of the draft's likeliest tokens that the target accepts; by default as recorded from the demo pair",
            metavar="A",
            panel=TEXTS,
        ),
    ] = None
    temperature: Annotated[
        float, number(Range(0, 2), "Sampling temperature, 0 is greedy", metavar="T", panel=TEXTS)
    ] = 0.0
    verification: Annotated[
        Verification, Option(rich_help_panel=TEXTS, help="Verification rule of pipelined decoding.")
    ] = Verification.COUPLED
    prompt_tokens: Annotated[int, number(TOKENS, "Length of each prompt, in tokens", panel=TEXTS)] = 128
    tokens: Annotated[int, number(Range(2, 4096, is_whole=True), "Length of each output, in tokens", panel=TEXTS)] = 128

    streams: Annotated[
        int | None,
        number(
            Range(1, 256, is_whole=True), "Concurrent streams, 1 by default; when one ends, the next begins", panel=LOAD
        ),
    ] = None
    arrivals: Annotated[
        float | None,
        number(
            Range(0, 1000, excludes_low=True),
            "Streams that arrive in a second, at random times; instead of --streams",
            metavar="RATE",
            panel=LOAD,
        ),
    ] = None

    policy: Annotated[Policy, Option(rich_help_panel=DRAFTING, help="How the draft length is decided.")] = (
        DEFAULT.policy
    )
    gamma: Annotated[int, number(Range(1, 64, is_whole=True), "Draft length at most, in tokens", panel=DRAFTING)] = (
        DEFAULT.max_draft_tokens
    )

    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures to FILE.")] = None
    plot: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Draw speed by draft length and by number of streams, or the day, to FILE: .svg, .png or .pdf.",
        ),
    ] = None


def simulate(options: SimulateOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    check_folders(options.json, options.plot)
    check_pictures(options.plot)
    return _simulate_rounds(options) if options.day is None else _simulate_day(options, options.day)


def _simulate_day(options: SimulateOptions, num_sessions: float) -> int:
    day = simulate_day.run_day(options, num_sessions)
    sys.stdout.write("\n".join([*simulate_day.lines(day), ""]))
    if options.json is not None:
        options.json.write_text(as_json(simulate_day.results(day)))
    if options.plot is not None:
        simulate_day.draw(day, options.plot)
    return 0


def _simulate_rounds(options: SimulateOptions) -> int:
    scenario = scenario_of(options)
    began_s = time.monotonic()
    with terminal.working("simulating the ways of decoding"):
        comparison = compare(scenario)
    results = comparison_results(comparison, _settings(options))
    sys.stdout.write("\n".join([_heading(options, scenario), "", *comparison_lines(comparison), ""]))
    sys.stdout.write(f"\n{advice_of(comparison)}\n")
    if options.json is not None:
        options.json.write_text(as_json(results))
    if options.plot is not None:
        with terminal.working("simulating more streams for the plot"):
            streams = by_streams(scenario, comparison)
        with drawing(options.plot, 1, 2, (11, 4)) as (axes,):
            draw_speed(axes, comparison, streams)
    terminal.say(f"simulated in {time.monotonic() - began_s:.0f} s")
    return 0


# From options to a scenario


def scenario_of(options: SimulateOptions) -> Scenario:
    """The scenario that the options describe. Raises: ConfigError, which names the option."""
    is_recorded = options.acceptance is not None or options.temperature in RECORDED_TEMPERATURES
    recorded = ", ".join(f"{temperature:g}" for temperature in RECORDED_TEMPERATURES)
    given = f"--temperature {options.temperature:g}"
    _require(is_recorded, f"{given} was not recorded ({recorded} were): give --acceptance")
    is_lossless = options.verification.rule.is_lossless
    _require(is_lossless, f"--verification {options.verification}: there is no recording with it")
    _require(options.streams is None or options.arrivals is None, "--streams and --arrivals exclude each other")
    return Scenario(
        hardware=_hardware(options),
        temperature=options.temperature,
        verification=options.verification,
        law=None if options.acceptance is None else steady_law(options.acceptance, options.temperature),
        load=_load(options),
        prompt_tokens=options.prompt_tokens,
        max_tokens=options.tokens,
        num_targets=options.targets,
        num_drafts=options.drafts,
        speculation=SpeculationConfig(policy=options.policy, max_draft_tokens=options.gamma, guessers=("draft",)),
        seed=options.seed,
    )


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(problem)


def _hardware(options: SimulateOptions) -> Hardware:
    """The preset, with the values that other options replace."""
    hardware = PRESETS[options.preset]
    if options.verify_ms is not None:
        hardware = replace(hardware, target=large_target(options.verify_ms / 1e3))
    if options.draft_ms is not None or options.draft_rows is not None:
        pass_s = hardware.draft.pass_s(1) if options.draft_ms is None else options.draft_ms / 1e3
        hardware = replace(hardware, draft=small_draft(pass_s, options.draft_rows or DRAFT_ROWS))
    if options.hop_ms is not None:
        hop = HopLaw(options.hop_ms / 1e3)
        hardware = replace(hardware, target_hop=hop, draft_hop=hop)
    return hardware


def _load(options: SimulateOptions) -> Closed | Arrivals:
    """The load, with enough streams for a steady figure."""
    if options.arrivals is not None:
        return Arrivals(((NUM_ARRIVALS / options.arrivals, options.arrivals),))
    num_at_once = options.streams or 1
    return Closed(num_at_once, max(MIN_STREAMS, 2 * num_at_once))


def _settings(options: SimulateOptions) -> dict[str, Any]:
    """The options that have a value, for the JSON file."""
    left_out = ("json", "plot")
    return {name: value for name, value in vars(options).items() if name not in left_out and value is not None}


def _heading(options: SimulateOptions, scenario: Scenario) -> str:
    hardware = scenario.hardware
    changes = [f"--{name.replace('_', '-')}" for name in ("verify_ms", "draft_ms", "draft_rows", "hop_ms")
               if getattr(options, name) is not None]  # fmt: skip
    about = f"{PRESETS[options.preset].about}{', but for ' + ', '.join(changes) if changes else ''}"
    agreement = "as recorded of the demo pair" if options.acceptance is None else f"acceptance {options.acceptance:g}"
    load = (
        f"{options.arrivals:g} streams a second"
        if options.arrivals is not None
        else f"{options.streams or 1} at a time"
    )
    return (
        f"{about}\n"
        f"target pass {hardware.target.pass_s(1) * 1e3:g} ms, draft pass {hardware.draft.pass_s(1) * 1e3:g} ms, "
        f"hop {hardware.target_hop.round_trip_s * 1e3:g} / {hardware.draft_hop.round_trip_s * 1e3:g} ms; "
        f"{options.targets} target(s), {options.drafts} draft(s)\n"
        f"T = {options.temperature:g}, {agreement}; {load}, {options.prompt_tokens} tokens in, {options.tokens} out"
    )


# For the plot


def by_streams(scenario: Scenario, comparison: Comparison) -> dict[str, list[tuple[int, float]]]:
    """Tokens a second of all streams together, by way of decoding and number of concurrent streams."""
    best = comparison.best_sequential
    in_turn = replace(sequential(scenario, best.gamma or 0), verification=best.verification)
    ways = {"plain": plain(scenario), "sequential": in_turn, "pipelined": scenario}
    found: dict[str, list[tuple[int, float]]] = {}
    for name, way in ways.items():
        for num in PLOT_STREAMS:
            loaded = replace(way, load=Closed(num, max(4, 2 * num)), max_tokens=min(scenario.max_tokens, PLOT_TOKENS))
            found.setdefault(name, []).append((num, run(name, loaded).report.tokens_per_s))
    return found
