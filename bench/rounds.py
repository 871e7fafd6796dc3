"""Pipelined rounds against sequential ones: on simulated hardware, and by real processes on this machine."""

from __future__ import annotations

import argparse

from bench import real_rounds, simulated_rounds
from bench.results import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings of both halves."""
    parser.add_argument("--only", choices=("simulated", "real"), help="one half; both without it")
    simulated_rounds.add_arguments(parser)
    real_rounds.add_arguments(parser)


def measure(args: argparse.Namespace) -> list[Result]:
    """The simulated half first: it takes a few minutes and needs nothing."""
    results = simulated_rounds.measure(args) if args.only != "real" else []
    return [*results, *(real_rounds.measure(args) if args.only != "simulated" else [])]
