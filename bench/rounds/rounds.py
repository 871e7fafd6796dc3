"""Pipelined rounds against sequential ones: simulated, by real processes as slow as large models, and by real ones."""

from __future__ import annotations

import argparse

from bench.results import Result
from bench.rounds import paced, real, simulated

PARTS = {"simulated": simulated, "paced": paced, "real": real}
"""In this order: the simulated one needs nothing, and the real one all of the machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings of all parts."""
    parser.add_argument("--only", choices=PARTS, help="one part; all without it")
    for part in PARTS.values():
        part.add_arguments(parser)


def measure(args: argparse.Namespace) -> list[Result]:
    """Each part that is asked for."""
    asked = PARTS.values() if args.only is None else [PARTS[args.only]]
    return [result for part in asked for result in part.measure(args)]
