"""`python -m bench NAME [--json FILE]` runs one benchmark; `python -m bench NAME --help` lists its settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bench.control import ablation, control, guessers, lookahead, workloads
from bench.disruption import cluster, drain, kills, storm
from bench.engine import divergence, families, gpu, runtime, step
from bench.results import Result, report
from bench.rounds import draws, rounds, tree
from bench.service import batches, calls, distant, edge, links, overhead, session_events, streams


class Benchmark(Protocol):
    """What a module offers that is run from here."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Its settings."""
        ...

    def measure(self, args: argparse.Namespace) -> list[Result]:
        """Measure with the settings that were given."""
        ...


BENCHMARKS: Mapping[str, Benchmark] = {
    "ablation": ablation,
    "batches": batches,
    "calls": calls,
    "cluster": cluster,
    "control": control,
    "distant": distant,
    "divergence": divergence,
    "drain": drain,
    "draws": draws,
    "edge": edge,
    "families": families,
    "gpu": gpu,
    "guessers": guessers,
    "kills": kills,
    "links": links,
    "lookahead": lookahead,
    "overhead": overhead,
    "rounds": rounds,
    "runtime": runtime,
    "session": session_events,
    "step": step,
    "storm": storm,
    "streams": streams,
    "tree": tree,
    "workloads": workloads,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        summary = (benchmark.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
        benchmark.add_arguments(command)
    args = parser.parse_args(argv)
    results = BENCHMARKS[args.name].measure(args)
    report(results, args.json)
    return 1 if any(result.met is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
