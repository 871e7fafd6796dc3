"""`outrider layers`: which of a target's own layers make its best draft, on your own prompts.

Knows options and tables; `deploy.measure` searches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from core.ranges import Range
from core.results import Result, as_json
from deploy.cli.options import check_folders, number, read_prompts
from deploy.cli.planning.measuring import MeasuringOptions, prepare
from deploy.cli.terminal import progress

if TYPE_CHECKING:
    from deploy.measure.subsets import Candidate  # imports torch


@dataclass(frozen=True, kw_only=True)
class LayersOptions(MeasuringOptions):
    """Search for the layers of a target that make its best draft, without training, on prompts of your own.

    Layers are removed one by one: each time the layer whose removal changes the target's greedy output least.
    """

    target: Annotated[Path, Option(metavar="DIR", help="Checkpoint of the target.")]
    prompts: Annotated[Path, Option(metavar="FILE", help="One prompt a line, or a .jsonl file of JSON strings.")]
    budget: Annotated[
        int, number(Range(2, 100_000, is_whole=True), "Subsets to try at most; at least two for each layer")
    ] = 256


def layers(options: LayersOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    check_folders(options.json)
    from deploy.measure.subsets import search  # imports torch

    prompts, config = prepare(options, options.target, read_prompts(options.prompts))
    with progress("trying layers", options.budget) as step_done:
        sizes = {"num_tokens": options.tokens, "depth": options.gamma, "budget": options.budget}
        found = search(config, prompts, step_done, **sizes)
    sys.stdout.write("\n".join([*lines(found, options.target), ""]))
    if options.json is not None:
        options.json.write_text(as_json(results(found)))
    return 0


def lines(found: Sequence[Candidate], target: Path) -> Iterator[str]:
    """A line for each size, and the settings of the best."""
    yield f"{'layers':>6}{'alpha':>8}{'c':>7}{'in turn':>12}{'pipelined':>12}   which"
    for each in found:
        turn, hidden = (f"{factor:.2f}x /{gamma:>2}" for factor, gamma in (each.in_turn, each.pipelined))
        which = ",".join(map(str, each.layers))
        yield f"{len(each.layers):>6}{each.alpha:>8.3f}{each.c:>7.2f}{turn:>12}{hidden:>12}   {which}"
    best = max(found, key=lambda each: each.pipelined)
    if best.pipelined[0] <= 1.0:
        yield "no subset pays: with each of them as the draft, decoding is slower than without a draft"
        return
    yield f"best with the draft on its own device: {best.pipelined[0]:.2f} times plain decoding, with"
    yield f"  --draft {target} --set 'draft.engine.layers=[{', '.join(map(str, best.layers))}]'"


def results(found: Sequence[Candidate]) -> list[Result]:
    """The same figures, for --json."""
    figures = []
    for each in found:
        settings = {"layers": list(each.layers)}
        (turn, turn_gamma), (hidden, hidden_gamma) = each.in_turn, each.pipelined
        figures += [
            Result("acceptance", round(each.alpha, 6), "", settings=settings),
            Result("c", round(each.c, 6), "", settings=settings),
            Result("factor in turn", round(turn, 6), "x", settings={**settings, "gamma": turn_gamma}),
            Result("factor pipelined", round(hidden, 6), "x", settings={**settings, "gamma": hidden_gamma}),
        ]
    return figures
