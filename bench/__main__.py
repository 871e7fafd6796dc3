"""`python -m bench NAME [--json FILE]` runs one benchmark; `python -m bench NAME --help` lists its settings."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from bench.results import Result, report
from core.errors import StartupError


class Benchmark(Protocol):
    """The interface of a benchmark's module."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the benchmark's settings."""
        ...

    def measure(self, args: argparse.Namespace) -> list[Result]:
        """Run the benchmark with these settings."""
        ...


BENCHMARKS: Mapping[str, str] = {
    "ablation": "bench.control.ablation",
    "batches": "bench.service.batches",
    "calls": "bench.service.calls",
    "cluster": "bench.disruption.cluster",
    "control": "bench.control.control",
    "distant": "bench.service.distant",
    "divergence": "bench.engine.divergence",
    "drafts": "bench.rounds.drafts",
    "draws": "bench.rounds.draws",
    "edge": "bench.service.edge",
    "families": "bench.engine.families",
    "gpu": "bench.gpu.report",
    "guessers": "bench.control.guessers",
    "heads": "bench.engine.heads",
    "kills": "bench.disruption.kills",
    "learning": "bench.models.learning",
    "lookahead": "bench.control.lookahead",
    "overhead": "bench.service.overhead",
    "papers": "bench.papers.papers",
    "peers": "bench.peers.peers",
    "ranks": "bench.engine.ranks",
    "rounds": "bench.rounds.rounds",
    "runtime": "bench.engine.runtime",
    "step": "bench.engine.step",
    "storm": "bench.disruption.storm",
}
"""Modules by name. Only the chosen one is imported, so that `gpu` needs no Ray."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a goal was missed, 2 when nothing could be measured here."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = [name for name in BENCHMARKS if name in argv[:1]] or list(BENCHMARKS)
    benchmarks = {name: cast(Benchmark, importlib.import_module(BENCHMARKS[name])) for name in chosen}
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in benchmarks.items():
        summary = (benchmark.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
        benchmark.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        results = benchmarks[args.name].measure(args)
    except StartupError as error:
        sys.stderr.write(f"bench {args.name}: {error}\n")
        return 2
    report(results, args.json)
    return 1 if any(result.met is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
