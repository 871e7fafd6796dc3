"""`outrider simulate --day`: how many replicas autoscaling would run through a day, and whether it would flap.

Knows options and tables. The simulated policies are the code that serves. Imports neither Ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from core.config import DraftScaling, OrchestratorScaling, ServiceConfig, TargetScaling
from core.ranges import Range
from core.results import Result
from deploy.cli.options import number
from deploy.settings import read_config
from simulation.report import (
    NUM_SCALING_AXES,
    REVERSAL_S,
    ROLES,
    TICK_S,
    Day,
    Demand,
    Scaling,
    draw_scaling,
    drawing,
    simulate_day,
)

MAX_REPLICAS = 64
DRAWN_S = 120.0
PANEL = "A day of autoscaling"
SHARE = Range(0, 1, excludes_low=True)
DEFAULT = Demand(0.0)


@dataclass(frozen=True, kw_only=True)
class DayOptions:
    """Options that describe a day of autoscaling."""

    day: Annotated[
        float | None,
        number(
            Range(0, 1e5, excludes_low=True),
            "Simulate a day of autoscaling, with N sessions at its busiest hour, instead of rounds",
            panel=PANEL,
        ),
    ] = None
    config: Annotated[
        Path | None,
        Option(metavar="FILE", help="Settings of the service; their autoscaling is simulated.", rich_help_panel=PANEL),
    ] = None
    night: Annotated[
        float, number(Range(0, 1), "Share of --day at the quietest hour", metavar="SHARE", panel=PANEL)
    ] = DEFAULT.night_share
    crowds: Annotated[int, number(Range(0, 100, is_whole=True), "Sudden crowds of half of --day each", panel=PANEL)] = (
        DEFAULT.num_crowds
    )
    session_kv: Annotated[
        float, number(SHARE, "Share of one target's KV that a session fills", metavar="SHARE", panel=PANEL)
    ] = DEFAULT.session_kv
    session_work: Annotated[
        float, number(SHARE, "Share of one draft's time that a session takes", metavar="SHARE", panel=PANEL)
    ] = DEFAULT.session_work
    seed: Annotated[int, Option(metavar="S", help="The same seed gives the same figures.")] = 0


def run_day(options: DayOptions, num_sessions: float) -> Day:
    """Simulate the day that the options describe. Raises: ConfigError."""
    demand = Demand(
        num_sessions,
        night_share=options.night,
        num_crowds=options.crowds,
        session_kv=options.session_kv,
        session_work=options.session_work,
    )
    config = read_config(options.config) if options.config is not None else None
    return simulate_day(demand, scaling_of(config), seed=options.seed)


def scaling_of(config: ServiceConfig | None) -> Scaling:
    """The configured autoscaling. By default from one replica (drafts: none) to `MAX_REPLICAS`."""
    draft = config.draft.autoscaling if config is not None and config.draft is not None else None
    return Scaling(
        (config and config.orchestrator.autoscaling) or OrchestratorScaling(max_replicas=MAX_REPLICAS),
        draft or DraftScaling(max_replicas=MAX_REPLICAS, min_replicas=0),
        (config and config.target.autoscaling) or TargetScaling(max_replicas=MAX_REPLICAS),
    )


def lines(day: Day) -> Iterator[str]:
    """A line for each deployment."""
    saved = "of all day at the most"
    yield f"{'':14}{'replicas':>12}{'replica-hours':>16}{saved:>24}{'changes':>10}{'taken back':>13}"
    for role in ROLES:
        counts, hours = day.counts(role), day.replica_hours(role)
        share = hours / (max(counts) * len(counts) * TICK_S / 3600) if max(counts) else 0.0
        extent = f"{min(counts)} to {max(counts)}"
        yield f"{role:14}{extent:>12}{hours:>16.1f}{share:>24.0%}{day.num_changes(role):>10}{day.num_flaps(role):>13}"
    yield f"taken back: within {REVERSAL_S / 60:g} min of a change the other way"
    yield f"sessions without a place: {day.short_share():.2%} of their time"


def results(day: Day) -> list[Result]:
    """The same figures, for --json."""
    found = [Result("a day: sessions without a place", round(100 * day.short_share(), 3), "%")]
    for role in ROLES:
        found += [
            Result(f"a day: {role}, replica-hours", round(day.replica_hours(role), 1), "h"),
            Result(f"a day: {role}, changes", day.num_changes(role), "changes"),
            Result(f"a day: {role}, changes taken back", day.num_flaps(role), "changes"),
        ]
    return found


def draw(day: Day, file: Path) -> None:
    """A picture of sessions and replicas over the day."""
    every = round(DRAWN_S / TICK_S)
    with drawing(file, NUM_SCALING_AXES, 1, (8, 6)) as rows:
        draw_scaling([axes for (axes,) in rows], day.moments[::every])
