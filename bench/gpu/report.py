"""Benchmarks on a GPU: kernels against references, steps against the roofline, exactness, text against transformers.

A part that fails is reported, and the other parts still run. `--device cpu --only pair` or `--only served` with a small
`--size` runs the last parts on any machine.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping

from bench.engine.devices import device_name, open_device
from bench.gpu import text
from bench.gpu.kernels import kernel_results
from bench.gpu.step import deterministic_results, step_results, with_card
from bench.results import Result, at_most, say
from core.errors import first_line


def _served(args: argparse.Namespace) -> list[Result]:
    """Draft and target as processes of a service, which needs Ray."""
    from bench.gpu import served

    return served.measure(args)


PARTS: Mapping[str, Callable[[argparse.Namespace], list[Result]]] = {
    "kernels": lambda _: kernel_results(),
    "step": lambda _: step_results(),
    "deterministic": lambda _: deterministic_results(),
    "pair": text.measure,
    "served": _served,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    text.add_arguments(parser)


def measure(args: argparse.Namespace) -> list[Result]:
    """Run the parts in order. Raises: StartupError if there is no such device."""
    logging.basicConfig(level=logging.WARNING)  # self-tests log why a kernel is not used
    card = device_name(open_device(args.device))
    results: list[Result] = []
    for name in [args.only] if args.only else PARTS:
        say(f"part: {name}")
        try:
            found = with_card(PARTS[name](args), card)
            for each in found:  # printed now: the next part may take long, or end this process
                say(f"{each.name}: {each.value:g} {each.unit}")
            results += found
        except Exception as error:  # noqa: BLE001  whatever a part raises, the others still run
            say(f"{name} failed: {type(error).__name__}: {first_line(error)}")
            results.append(at_most(0.0, Result(f"{name}: failures", 1.0, "failures")))
    return results
