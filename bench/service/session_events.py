"""The cost of each event for a session of the orchestrator: processor time of its handler, on a virtual clock.

Real sessions run against simulated engines, so only handlers are measured: no sockets, no serving. The cost of a round
is the sum over its events. The cost of a verdict delays the next verification.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from bench.results import Result, at_most
from core.config import SpeculationConfig
from core.records import Verdict
from deploy.ingress import YOUNG_OBJECTS
from orchestrator.session import Session
from orchestrator.session import messages as m
from simulation.engines import PRESETS
from simulation.scenario import Closed, Scenario, simulate

HARDWARE = ("8b+0.5b", "70b+1b")
TEMPERATURES = (0.0, 1.0)
VERDICT_GOAL_MS = 0.5
SPECULATION = SpeculationConfig(guessers=("draft",), max_draft_tokens=8, max_block_tokens=32)

Times = Mapping[str, Sequence[float]]
"""Milliseconds of processor time of each event, by kind."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=12, help="one after the other, on each hardware")
    parser.add_argument("--tokens", type=int, default=160, help="of each stream")


def measure(args: argparse.Namespace) -> list[Result]:
    """Measure at each hardware and temperature."""
    results = []
    for hardware in HARDWARE:
        for temperature in TEMPERATURES:
            scenario = Scenario(
                hardware=PRESETS[hardware],
                temperature=temperature,
                load=Closed(num_streams=args.streams),
                max_tokens=args.tokens,
                speculation=SPECULATION,
            )
            with _timed() as times:
                simulate(scenario)
            results += _results(f"{hardware}, T = {temperature:g}", times)
    return results


@contextmanager
def _timed() -> Iterator[Times]:
    """Time every event of every session inside the block. Garbage is collected as rarely as in a served
    orchestrator."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        with patch.object(Session, "handle", _timing(Session.handle, times)):
            yield times
    finally:
        gc.set_threshold(*thresholds)


def _timing(
    handle: Callable[[Session, m.Event], list[m.Command]], times: defaultdict[str, list[float]]
) -> Callable[[Session, m.Event], Any]:
    def timed(self: Session, event: m.Event) -> list[m.Command]:
        began_ns = time.thread_time_ns()
        commands = handle(self, event)
        times[_kind(event)].append((time.thread_time_ns() - began_ns) / 1e6)
        return commands

    return timed


def _kind(event: m.Event) -> str:
    is_verdict = isinstance(event, m.TargetReplied) and isinstance(event.reply, Verdict)
    return "verdict" if is_verdict else "growth" if isinstance(event, m.DraftGrew) else "others"


def _results(title: str, times: Times) -> list[Result]:
    num_rounds = len(times["verdict"])
    total_ms = sum(map(sum, times.values())) / num_rounds
    verdict_ms = round(statistics.median(times["verdict"]), 3)
    results = [
        at_most(VERDICT_GOAL_MS, Result(f"{title}: a verdict, median", verdict_ms, "ms")),
        Result(f"{title}: all events of a round", round(total_ms, 3), "ms", settings={"rounds": num_rounds}),
    ]
    if growth := times.get("growth"):
        settings = {"messages_a_round": round(len(growth) / num_rounds, 2)}
        results.append(
            Result(
                f"{title}: a message of growth, median", round(statistics.median(growth), 3), "ms", settings=settings
            )
        )
    return results
