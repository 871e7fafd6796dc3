"""`python -m bench NAME [--json FILE]` runs one benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from bench import overhead
from bench.results import Result, report

BENCHMARKS: dict[str, Callable[[], list[Result]]] = {"overhead": overhead.measure}


def main() -> int:
    """Returns the exit status: 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    args = parser.parse_args()
    results = BENCHMARKS[args.name]()
    report(results, args.json)
    return 1 if any(result.met is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
