"""The papers' tables for our pairs: acceptance, speed by batch, merged drafts, cascades, beams, one-pass drafters.

docs/papers.md has ours beside theirs.
"""

from __future__ import annotations

import argparse

from bench.papers import acceptance, batches, beams, cascades, merged, noise
from bench.results import Result

PARTS = {
    "acceptance": acceptance,
    "batches": batches,
    "merged": merged,
    "cascades": cascades,
    "beams": beams,
    "noise": noise,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of all parts."""
    parser.add_argument("--only", choices=PARTS, help="one part; all without it")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    acceptance.add_arguments(parser)
    noise.add_arguments(parser)


def measure(args: argparse.Namespace) -> list[Result]:
    """Run the chosen parts."""
    asked = PARTS.values() if args.only is None else [PARTS[args.only]]
    return [result for part in asked for result in part.measure(args)]
