"""Pipelined rounds against sequential ones: simulated, by real processes as slow as large models, and by real ones."""

from __future__ import annotations

import argparse

from bench.results import Result
from bench.rounds import paced, real, simulated

PARTS = {"simulated": simulated, "paced": paced, "real": real}
"""Parts by name, in the order of the resources that they need: from none to the whole machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of all parts."""
    parser.add_argument("--only", choices=PARTS, help="one part; all without it")
    for part in PARTS.values():
        part.add_arguments(parser)


def measure(args: argparse.Namespace) -> list[Result]:
    """Run the chosen parts."""
    asked = PARTS.values() if args.only is None else [PARTS[args.only]]
    return [result for part in asked for result in part.measure(args)]
