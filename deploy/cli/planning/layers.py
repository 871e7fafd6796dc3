"""`outrider layers`: which of a target's own layers make the best draft of it, on prompts of one's own.

Knows options and tables; `deploy.measure` searches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from core.config import Dtype, EngineConfig
from core.errors import ConfigError
from core.ranges import Range
from core.results import Result, as_json
from deploy.cli.options import number
from deploy.cli.terminal import progress

if TYPE_CHECKING:
    from deploy.measure.subsets import Candidate  # imports torch

SPARE_KV_TOKENS = 1024
"""Beside a prompt and its output: for the passes that are timed, and for those of the warm-up."""


@dataclass(frozen=True, kw_only=True)
class LayersOptions:
    """Search the layers of a target that make the best draft of it, without training, on prompts of your own.

    Layers are removed one after the other, always the one that is missed least in what the target writes greedily.
    """

    target: Annotated[Path, Option(metavar="DIR", help="Checkpoint of the target.")]
    prompts: Annotated[Path, Option(metavar="FILE", help="One prompt a line, or a .jsonl file of JSON strings.")]
    tokens: Annotated[int, number(Range(2, 4096, is_whole=True), "Length of each output at most, in tokens")] = 64
    gamma: Annotated[int, number(Range(1, 64, is_whole=True), "Draft length at most, in tokens")] = 8
    budget: Annotated[
        int, number(Range(2, 100_000, is_whole=True), "Subsets that are tried at most, two for each layer at least")
    ] = 256
    dtype: Annotated[Dtype, Option(help="Of the model.")] = "float32"
    device: Annotated[str, Option(metavar="DEVICE", help="As torch names it.")] = "cpu"
    threads: Annotated[int, number(Range(1, 1024, is_whole=True), "CPU threads of a pass")] = 1
    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures to FILE.")] = None


def layers(options: LayersOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"{options.json.parent} is no directory to write {options.json.name} to")
    import torch

    from deploy.measure.subsets import SearchPlan, search
    from deploy.prompts import read_prompts
    from orchestrator.text import Tokenizer

    texts = read_prompts(options.prompts)
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_directory(options.target)
    prompts = [tokenizer.encode(text) for text in texts]
    config = EngineConfig(
        str(options.target),
        dtype=options.dtype,
        device=options.device,
        num_threads=options.threads,
        kv_cache_tokens=max(map(len, prompts)) + options.tokens + SPARE_KV_TOKENS,
    )
    with progress("trying layers", options.budget) as step_done:
        found = search(SearchPlan(config, prompts, options.tokens, options.gamma, options.budget), step_done)
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
        yield "none of them pays: as a draft each is slower than plain decoding"
        return
    yield f"best where the draft has a device of its own: {best.pipelined[0]:.2f} times plain decoding, with"
    yield f"  --set draft.engine.model={target} --set 'draft.engine.layers=[{', '.join(map(str, best.layers))}]'"


def results(found: Sequence[Candidate]) -> list[Result]:
    """The same for scripts."""
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
