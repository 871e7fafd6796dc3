"""`outrider distill`: a draft that agrees with a target, from texts.

Knows options and files; `workers.training` trains.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from core.errors import ConfigError
from core.ranges import Range
from deploy.cli.options import number
from deploy.cli.training.options import Says, TrainingOptions, check_out, command_of, texts_of

if TYPE_CHECKING:
    from workers.training import DraftAgreement, DraftSize

SIZE = re.compile(r"(\d{1,3})x(\d{2,5})")
WIDTH_UNIT = 64
"""A new draft's width is a multiple of this, so that it divides into attention heads."""
FINE_RATE, NEW_RATE = 3e-4, 2e-3
"""Learning rates of a checkpoint that goes on, and of a new draft."""


@dataclass(frozen=True, kw_only=True)
class DistillOptions(TrainingOptions):
    """Train a draft to agree with a target (docs/howto/distill-a-draft.md).

    The draft starts as a checkpoint with the target's tokenizer, or as a new one of a size, and becomes a checkpoint of
    its own. The same command goes on where it was stopped. Texts should be the target's own outputs.
    """

    draft: Annotated[str, Option(metavar="DIR|SIZE", help="Checkpoint, or LAYERSxWIDTH of a new Llama, as in 2x128.")]
    out: Annotated[Path, Option(metavar="OUT", help="Directory to write; must not exist.")]
    objective: Annotated[
        Literal["kl", "reverse_kl", "tv", "accepted", "coupled", "coupled_sampled"],
        Option(
            help="What is minimised. Keep kl: coupled takes 1.6 times as long for as many accepted guesses, "
            "coupled_sampled gains half as much, and the others are for comparison."
        ),
    ] = "kl"
    temperature: Annotated[
        float, number(Range(0.05, 10.0), "Temperature at which draft and target are compared", metavar="T")
    ] = 1.0
    learning_rate: Annotated[
        float | None,
        number(
            Range(1e-7, 1.0),
            f"Highest learning rate, {FINE_RATE:g} unless given, and {NEW_RATE:g} for a new draft",
            metavar="R",
        ),
    ] = None


def distill(options: DistillOptions) -> int:
    """Returns the exit status. Raises: StartupError."""
    check_out(options.out)
    draft = _draft_of(options.draft)
    texts = texts_of(options, 2)
    from workers.training import DraftJob, DraftPlan, Watcher, make_draft

    rate = options.learning_rate or (FINE_RATE if isinstance(draft, Path) else NEW_RATE)
    job = DraftJob(
        target=options.engine(),
        draft=draft,
        texts=texts,
        plan=DraftPlan(
            num_steps=options.steps,
            batch=options.batch,
            learning_rate=rate,
            objective=options.objective,
            temperature=options.temperature,
        ),
        work=options.work_of(options.out),
        num_processes=options.processes,
    )
    watcher = Watcher(trained=Says(options.steps, "as the target's likeliest"))
    before, after = make_draft(job, options.out, _command(options, rate), watcher)
    options.delete_work(job)
    sys.stdout.write(f"{options.out}: distilled; acceptance on held-out texts, before and after:\n")
    for (kind, temperature), found in after.items():
        figures = _figures(before[kind, temperature], found)
        sys.stdout.write(f"{kind}, temperature {temperature:g}: {figures}\n")
    sys.stdout.write(f"outrider serve --target {options.target} --draft {options.out}\n")
    return 0


def _draft_of(given: str) -> Path | DraftSize:
    """Raises: ConfigError for neither a directory nor a size."""
    path, size = Path(given), SIZE.fullmatch(given)
    if path.exists() or size is None:
        from deploy.checkpoints import check_directory

        check_directory("--draft", path)
        return path
    from workers.training import DraftSize

    num_layers, width = int(size[1]), int(size[2])
    if num_layers < 1 or width % WIDTH_UNIT:
        raise ConfigError(f"--draft: the width of a new draft must be a multiple of {WIDTH_UNIT}, got {given}")
    return DraftSize(num_layers, width)


def _figures(before: DraftAgreement, after: DraftAgreement) -> str:
    changes = [(*key, before.by_rule[key], share) for key, share in after.by_rule.items()]
    return ", ".join(f"{rule} (T = {temperature:g}) {was:.3f}, {now:.3f}" for temperature, rule, was, now in changes)


def _command(options: DistillOptions, rate: float) -> str:
    """The command as the card names it."""
    draft = options.draft if SIZE.fullmatch(options.draft) else shlex.quote(Path(options.draft).resolve().name)
    own = (
        f"--draft {draft} --objective {options.objective} --temperature {options.temperature:g} "
        f"--learning-rate {rate:g}"
    )
    return command_of(options, "distill", own, f"--out {shlex.quote(options.out.name)}")
