"""`outrider simulate --day`: how many replicas autoscaling would run through a day, and whether it would flap.

Knows arguments and tables; the policies that are simulated are those that serve. Imports neither Ray nor torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.config import DraftScaling, OrchestratorScaling, ServiceConfig, TargetScaling
from core.results import Result
from simulation.report import REVERSAL_S, ROLES, TICK_S, Day, Demand, Sample, Scaling, scaling_picture, simulate_day

MAX_REPLICAS = 64
DRAWN_S = 120.0


def add_day(group: Any) -> None:
    """Add the options to those of `outrider simulate` (an argparse group)."""
    default = Demand(0.0)
    group.add_argument("--day", type=float, metavar="N", help="simulate a day with N sessions at its busiest hour")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="settings of the service, of which the autoscaling is taken"
    )
    group.add_argument("--night", type=float, default=default.night_share, metavar="SHARE", help="of N, at night")
    group.add_argument("--crowds", type=int, default=default.num_crowds, metavar="N", help="sudden ones, of N / 2 each")
    group.add_argument(
        "--session-kv", type=float, default=default.session_kv, metavar="SHARE", help="of a target's KV, by a session"
    )
    group.add_argument(
        "--session-work", type=float, default=default.session_work, metavar="SHARE", help="of a draft's time"
    )


def run_day(args: argparse.Namespace, config: ServiceConfig | None) -> Day:
    """The day that was described."""
    demand = Demand(
        args.day,
        night_share=args.night,
        num_crowds=args.crowds,
        session_kv=args.session_kv,
        session_work=args.session_work,
    )
    return simulate_day(demand, scaling_of(config), seed=args.seed)


def scaling_of(config: ServiceConfig | None) -> Scaling:
    """What is configured; the defaults, from one replica (of drafts: none) to many, for what is not."""
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
    """The same as results."""
    found = [Result("a day: sessions without a place", round(100 * day.short_share(), 3), "%")]
    for role in ROLES:
        found += [
            Result(f"a day: {role}, replica-hours", round(day.replica_hours(role), 1), "h"),
            Result(f"a day: {role}, changes", day.num_changes(role), "changes"),
            Result(f"a day: {role}, changes taken back", day.num_flaps(role), "changes"),
        ]
    return found


def draw(day: Day) -> str:
    """An SVG of sessions and replicas over the day."""
    every = round(DRAWN_S / TICK_S)
    return scaling_picture(
        [Sample(moment.at_s, moment.num_sessions, moment.num_replicas) for moment in day.moments[::every]]
    )
