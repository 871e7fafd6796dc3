"""`python -m simulation --seed N` replays one chaotic run; `--seeds A:B` runs many; with `--heads` drafts are heads."""

# ruff: noqa: T201  this program prints its result

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter

from simulation.chaos import RunReport, run_seed


def main() -> int:
    """Return the exit status: 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="print the events of one seed")
    which.add_argument("--seeds", type=_range, metavar="A:B", help="run seeds A to B - 1, and sum up")
    parser.add_argument("--heads", action="store_true", help="make drafts heads, which read the target's features")
    args = parser.parse_args()
    if args.seed is not None:
        return _print_events(run_seed(args.seed, has_heads=args.heads))
    return _sum_up([run_seed(seed, has_heads=args.heads) for seed in args.seeds])


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def _print_events(report: RunReport) -> int:
    for at_s, line in report.lines:
        print(f"{at_s:9.4f}  {line}")
    _print_counts(report.counts)
    if report.error is None:
        print("every invariant held")
        return 0
    traceback.print_exception(report.error)
    return 1


def _sum_up(reports: list[RunReport]) -> int:
    _print_counts(sum((report.counts for report in reports), Counter()))
    broken = [report for report in reports if report.error is not None]
    print(f"{len(reports)} seeds, {len(broken)} broken")
    for report in broken:
        print(f"  {report.command}: {report.error}")
    return 1 if broken else 0


def _print_counts(counts: Counter[str]) -> None:
    for kind, number in sorted(counts.items()):
        print(f"{number:9}  {kind}")


if __name__ == "__main__":
    sys.exit(main())
