"""Options of all commands that train, their texts within a limit, and their lines about progress.

Knows options and files; must not know what is trained.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

from typer import Option

from core.config import Dtype, EngineConfig
from core.errors import ConfigError
from core.ranges import Range
from deploy.cli.options import check_folders, number
from deploy.cli.terminal import say
from deploy.cli.training.training_texts import TEXT_TOKENS, read_texts

if TYPE_CHECKING:
    from workers.training import Progress, TrainingJob, TrainingText

SAY_EVERY = 10
"""Steps of training for which one line is written."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of every training."""

    target: Annotated[Path, Option(metavar="DIR", help="Checkpoint of the target.")]
    data: Annotated[
        list[Path],
        Option(
            metavar="FILE",
            help="Texts; several times for several files. A .jsonl file has one a line: "
            "messages, prompt and answer, or text.",
        ),
    ]
    tokens: Annotated[int, number(Range(TEXT_TOKENS, 10**9, is_whole=True), "Tokens of the texts to use at most")] = (
        2_000_000
    )
    dtype: Annotated[Dtype, Option(help="Type of weights and arithmetic of the target.")] = "float32"
    device: Annotated[str, Option(metavar="DEVICE", help="Device, as torch names it: cpu, cuda, cuda:0.")] = "cpu"
    threads: Annotated[int, number(Range(1, 1024, is_whole=True), "CPU threads of a process")] = 1
    steps: Annotated[int, number(Range(1, 10**7, is_whole=True), "Steps of training")] = 2000
    batch: Annotated[int, number(Range(1, 4096, is_whole=True), "Sequences of 512 tokens a step and process")] = 4
    processes: Annotated[int, number(Range(1, 64, is_whole=True), "Processes that train, one for each GPU")] = 1
    work: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Directory of the unfinished training, kept for more --steps; else OUT.work, deleted at the end.",
        ),
    ] = None

    def work_of(self, out: Path) -> Path:
        return self.work or out.with_name(f"{out.name}.work")

    def delete_work(self, job: TrainingJob) -> None:
        """Delete what the training has kept, unless the user has named its place."""
        from workers.training import delete_work

        if self.work is None:
            delete_work(job)

    def engine(self) -> EngineConfig:
        return EngineConfig(str(self.target), dtype=self.dtype, device=self.device, num_threads=self.threads)


def check_out(out: Path) -> None:
    """Raises: ConfigError if the directory exists, or cannot be made."""
    check_folders(out)
    if out.exists():
        raise ConfigError(
            f"{out} exists; give a directory that does not. A training that --work has kept goes on with more --steps"
        )


def texts_of(options: TrainingOptions, least: int) -> list[TrainingText]:
    """The first texts of at least this number of tokens, up to the limit; after the target is known to be there.

    Raises: ConfigError if they are too few.
    """
    from deploy.checkpoints import check_directory
    from orchestrator.text import Tokenizer
    from workers.vocabulary import num_rows

    check_directory("--target", options.target)
    chosen: list[TrainingText] = []
    size = 0
    for text in read_texts(options.data, Tokenizer.from_directory(options.target), num_rows(options.target)):
        if len(text.token_ids) >= least and size + len(text.token_ids) <= options.tokens:
            chosen.append(text)
            size += len(text.token_ids)
    if len(chosen) < 2 * options.processes:
        raise ConfigError(
            f"--data: the texts have too few tokens; at least {2 * options.processes} texts "
            f"of {least} tokens are needed"
        )
    return chosen


def command_of(options: TrainingOptions, name: str, own: str, out: str) -> str:
    """The command as a card names it, without folders. `own`: options that only this command has."""
    data = "".join(f" --data {shlex.quote(path.name)}" for path in options.data)
    return (
        f"outrider {name} --target {shlex.quote(options.target.resolve().name)}{data} {own} --dtype {options.dtype} "
        f"--steps {options.steps} --batch {options.batch} --processes {options.processes} {out}"
    )


class Says:
    """Writes a line about each few steps to standard error."""

    def __init__(self, num_steps: int, right: str) -> None:
        """`right`: what the guesses of `Progress` are called."""
        self._num_steps, self._right, self._began_s, self._first = num_steps, right, monotonic(), -1

    def __call__(self, done: Progress) -> None:
        if self._first < 0:
            self._first, self._began_s = done.step, monotonic()
        if done.step % SAY_EVERY and done.step != self._num_steps:
            return
        each_s = (monotonic() - self._began_s) / max(1, done.step - self._first)
        right = ", ".join(f"{share:.2f}" for share in done.right)
        say(f"step {done.step} of {self._num_steps}: loss {done.loss:.3f}, {self._right} {right}; {each_s:.2f} s each")
