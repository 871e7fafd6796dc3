"""`outrider train-head`: heads for a target, from texts.

Knows options and files; `workers.heads` fits, `workers.training` trains.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from core.config import Dtype, EngineConfig
from core.errors import ConfigError
from core.ranges import Range
from deploy.cli.options import check_folders, number
from deploy.cli.terminal import progress, say
from deploy.cli.training.training_texts import TEXT_TOKENS, read_texts

if TYPE_CHECKING:
    from workers.training import Progress, TrainingText

SAY_EVERY = 10
"""Steps of training for which one line is written."""


@dataclass(frozen=True, kw_only=True)
class TrainHeadOptions:
    """Make heads that draft for a target from its hidden states (docs/howto/train-a-head.md).

    Blockwise heads are fitted in closed form: one pass of the target over the texts. An EAGLE-3 head is trained in
    steps; the same command goes on where it was stopped. Texts should be the target's own outputs.
    """

    target: Annotated[Path, Option(metavar="DIR", help="Checkpoint of the target.")]
    data: Annotated[
        list[Path],
        Option(
            metavar="FILE",
            help="Texts; several times for several files. A .jsonl file has one a line: "
            "messages, prompt and answer, or text.",
        ),
    ]
    out: Annotated[Path, Argument(metavar="OUT", help="Directory to write; must not exist.")]
    kind: Annotated[Literal["blockwise", "eagle3"], Option(help="Kind of head.")] = "blockwise"
    heads: Annotated[
        int, number(Range(1, 16, is_whole=True), "Number of Blockwise heads: the depth of their guesses")
    ] = 3
    tokens: Annotated[int, number(Range(TEXT_TOKENS, 10**9, is_whole=True), "Tokens of the texts to use at most")] = (
        2_000_000
    )
    dtype: Annotated[Dtype, Option(help="Type of weights and arithmetic of the target.")] = "float32"
    device: Annotated[str, Option(metavar="DEVICE", help="Device, as torch names it: cpu, cuda, cuda:0.")] = "cpu"
    threads: Annotated[int, number(Range(1, 1024, is_whole=True), "CPU threads of a process")] = 1
    steps: Annotated[int, number(Range(1, 10**7, is_whole=True), "Steps of training (eagle3)")] = 2000
    batch: Annotated[int, number(Range(1, 4096, is_whole=True), "Sequences of 512 tokens a step and process")] = 4
    unrolled: Annotated[int, number(Range(1, 16, is_whole=True), "Guesses of a chain in training")] = 3
    learning_rate: Annotated[float, number(Range(1e-7, 1.0), "Highest learning rate", metavar="R")] = 1.5e-3
    vocabulary: Annotated[
        int, number(Range(1, 10**7, is_whole=True), "Tokens that can be guessed: the most frequent ones")
    ] = 8192
    processes: Annotated[int, number(Range(1, 64, is_whole=True), "Processes that train, one for each GPU")] = 1
    borrow_output: Annotated[
        bool, Option("--borrow-output", help="Write no output layer, since its rows are the target's.")
    ] = False
    work: Annotated[Path | None, Option(metavar="DIR", help="Directory of the unfinished training; OUT.work.")] = None


def train_head(options: TrainHeadOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    check_folders(options.out)
    if options.out.exists():
        raise ConfigError(f"{options.out} exists; give a directory that does not")
    import torch

    from deploy.checkpoints import check_directory
    from orchestrator.text import Tokenizer

    check_directory("--target", options.target)
    texts = _within(read_texts(options.data, Tokenizer.from_directory(options.target)), options)
    torch.set_num_threads(options.threads)
    sys.stdout.write(_fit(texts, options) if options.kind == "blockwise" else _train(texts, options))
    sys.stdout.write(f"at the target: outrider serve --target {options.target} --target.engine.head {options.out}\n")
    return 0


def _within(texts: Sequence[TrainingText], options: TrainHeadOptions) -> list[TrainingText]:
    """The first texts, up to the limit. Raises: ConfigError if they are too few."""
    least = options.heads + 1 if options.kind == "blockwise" else options.unrolled + 2
    chosen: list[TrainingText] = []
    size = 0
    for text in texts:
        if len(text.token_ids) >= least and size + len(text.token_ids) <= options.tokens:
            chosen.append(text)
            size += len(text.token_ids)
    if len(chosen) < 2 * options.processes:
        raise ConfigError(
            f"--data: the texts have too few tokens; at least {2 * options.processes} texts "
            f"of {least} tokens are needed"
        )
    return chosen


def _engine(options: TrainHeadOptions) -> EngineConfig:
    return EngineConfig(str(options.target), dtype=options.dtype, device=options.device, num_threads=options.threads)


def _fit(texts: Sequence[TrainingText], options: TrainHeadOptions) -> str:
    from workers.heads import fit_heads

    with progress("reading texts", len(texts)) as step_done:
        found = fit_heads(_engine(options), [text.token_ids for text in texts], options.heads, step_done)
    found.write(options.out)
    agreement = ", ".join(f"{share:.2f}" for share in found.agreement)
    return (
        f"{options.out}: {options.heads} heads fitted on {found.num_tokens} tokens; on held-out text their first "
        f"guesses are the target's own token in {agreement} of all places\n"
    )


def _train(texts: Sequence[TrainingText], options: TrainHeadOptions) -> str:
    from workers.training import HeadJob, TrainingPlan, Watcher, make_head

    job = HeadJob(
        target=_engine(options),
        texts=texts,
        plan=TrainingPlan(
            num_steps=options.steps,
            batch=options.batch,
            unrolled=options.unrolled,
            learning_rate=options.learning_rate,
        ),
        num_draft_tokens=options.vocabulary,
        work=options.work or options.out.with_name(f"{options.out.name}.work"),
        num_processes=options.processes,
        borrows_output=options.borrow_output,
    )
    with progress("reading texts", len(texts)) as step_done:
        found = make_head(job, options.out, _command(options), Watcher(step_done, _Says(options.steps)))
    lines = [
        f"{kind}, temperature {temperature:g}: {each.by_depth[0]:.2f} of first guesses right, "
        f"{each.tree:.2f} tokens a round with a tree of 16\n"
        for (kind, temperature), each in found.items()
    ]
    return "".join([f"{options.out}: trained; on held-out text:\n", *lines])


def _command(options: TrainHeadOptions) -> str:
    """What the card says of how the head was made, without folders."""
    data = "".join(f" --data {shlex.quote(path.name)}" for path in options.data)
    return (
        f"outrider train-head --kind eagle3 --target {shlex.quote(options.target.resolve().name)}{data}"
        f" --dtype {options.dtype} --steps {options.steps} --batch {options.batch} --unrolled {options.unrolled}"
        f" --learning-rate {options.learning_rate:g} --vocabulary {options.vocabulary} --processes {options.processes}"
        f"{' --borrow-output' if options.borrow_output else ''} {shlex.quote(options.out.name)}"
    )


class _Says:
    """Writes a line about each few steps to standard error."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._began_s, self._first = num_steps, monotonic(), -1

    def __call__(self, done: Progress) -> None:
        if self._first < 0:
            self._first, self._began_s = done.step, monotonic()
        if done.step % SAY_EVERY and done.step != self._num_steps:
            return
        each_s = (monotonic() - self._began_s) / max(1, done.step - self._first)
        right = ", ".join(f"{share:.2f}" for share in done.right)
        say(f"step {done.step} of {self._num_steps}: loss {done.loss:.3f}, right by depth {right}; {each_s:.2f} s each")
