"""`outrider train-head`: heads for a target, from texts.

Knows options and files; `workers.heads` fits, `workers.training` trains.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from core.ranges import Range
from deploy.cli.options import number
from deploy.cli.terminal import progress
from deploy.cli.training.options import Says, TrainingOptions, check_out, command_of, texts_of

if TYPE_CHECKING:
    from workers.training import TrainingText


@dataclass(frozen=True, kw_only=True)
class TrainHeadOptions(TrainingOptions):
    """Make heads that draft for a target from its hidden states (docs/howto/train-a-head.md).

    Blockwise heads are fitted in closed form: one pass of the target over the texts. Others are trained in
    steps; the same command goes on where it was stopped. Texts should be the target's own outputs.
    """

    out: Annotated[Path, Argument(metavar="OUT", help="Directory to write; must not exist.")]
    kind: Annotated[Literal["blockwise", "eagle3", "medusa"], Option(help="Kind of head.")] = "blockwise"
    heads: Annotated[
        int, number(Range(1, 16, is_whole=True), "Number of Blockwise or Medusa heads: the depth of their guesses")
    ] = 3
    unrolled: Annotated[int, number(Range(1, 16, is_whole=True), "Guesses of a chain in training (eagle3)")] = 3
    learning_rate: Annotated[float, number(Range(1e-7, 1.0), "Highest learning rate", metavar="R")] = 1.5e-3
    vocabulary: Annotated[
        int, number(Range(1, 10**7, is_whole=True), "Tokens that can be guessed: the most frequent ones (eagle3)")
    ] = 8192
    borrow_output: Annotated[
        bool, Option("--borrow-output", help="Write no output layer, since its rows are the target's (eagle3).")
    ] = False


def train_head(options: TrainHeadOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    check_out(options.out)
    import torch

    texts = texts_of(options, _depth_of(options) + 2)
    torch.set_num_threads(options.threads)
    sys.stdout.write(_fit(texts, options) if options.kind == "blockwise" else _train(texts, options))
    sys.stdout.write(f"at the target: outrider serve --target {options.target} --target.engine.head {options.out}\n")
    return 0


def _depth_of(options: TrainHeadOptions) -> int:
    return options.unrolled if options.kind == "eagle3" else options.heads


def _fit(texts: Sequence[TrainingText], options: TrainHeadOptions) -> str:
    from workers.heads import fit_heads

    with progress("reading texts", len(texts)) as step_done:
        found = fit_heads(options.engine(), [text.token_ids for text in texts], options.heads, step_done)
    found.write(options.out)
    agreement = ", ".join(f"{share:.2f}" for share in found.agreement)
    return (
        f"{options.out}: {options.heads} heads fitted on {found.num_tokens} tokens; on held-out text their first "
        f"guesses are the target's own token in {agreement} of all places\n"
    )


def _train(texts: Sequence[TrainingText], options: TrainHeadOptions) -> str:
    from workers.training import HeadJob, HeadPlan, Watcher, make_head

    assert options.kind != "blockwise"
    job = HeadJob(
        target=options.engine(),
        texts=texts,
        plan=HeadPlan(
            num_steps=options.steps,
            batch=options.batch,
            unrolled=_depth_of(options),
            learning_rate=options.learning_rate,
        ),
        num_draft_tokens=options.vocabulary,
        kind=options.kind,
        work=options.work_of(options.out),
        num_processes=options.processes,
        borrows_output=options.borrow_output,
    )
    with progress("reading texts", len(texts)) as step_done:
        watcher = Watcher(step_done, Says(options.steps, "right by depth"))
        found = make_head(job, options.out, _command(options), watcher)
    options.delete_work(job)
    lines = [
        f"{kind}, temperature {temperature:g}: {each.by_depth[0]:.2f} of first guesses right, "
        f"{each.tree:.2f} tokens a round with a tree of 16\n"
        for (kind, temperature), each in found.items()
    ]
    return "".join([f"{options.out}: trained; on held-out text:\n", *lines])


def _command(options: TrainHeadOptions) -> str:
    """The command as the card names it."""
    if options.kind == "medusa":
        own = f"--heads {options.heads}"
    else:
        borrows = " --borrow-output" if options.borrow_output else ""
        own = f"--unrolled {options.unrolled} --vocabulary {options.vocabulary}{borrows}"
    name, own = f"train-head --kind {options.kind}", f"{own} --learning-rate {options.learning_rate:g}"
    return command_of(options, name, own, shlex.quote(options.out.name))
