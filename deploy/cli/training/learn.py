"""`outrider learn`: trains a served draft on what targets keep of their traffic.

Knows options and the clock; `workers.live` reads, trains and judges. It needs two directories and no access to the
service: if it dies, the served draft stays.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from core.errors import ConfigError
from core.ranges import Range
from deploy.cli.options import number
from deploy.cli.terminal import say

PERIOD_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """Train a draft on live traffic, and take it back where acceptance falls (docs/howto/learn-from-traffic.md).

    Reads the buffer that targets with the setting target.engine.learning_buffer write, until it is stopped. The
    buffer holds parts of prompts and outputs.
    """

    buffer: Annotated[Path, Option(metavar="DIR", help="Directory of target.engine.learning_buffer.")]
    draft: Annotated[
        Path,
        Option(
            metavar="LINK",
            help="Symbolic link to the draft's checkpoint, which draft.engine.model names; draft.follows_link is true.",
        ),
    ]
    versions: Annotated[Path, Option(metavar="DIR", help="Directory for the checkpoints that are made.")]
    after: Annotated[
        list[Path] | None,
        Option(
            metavar="DIR",
            help="Draft that guesses beside this one, whose hits are left out (boosting); may be repeated.",
        ),
    ] = None
    every_tokens: Annotated[int, number(Range(100, 10**9, is_whole=True), "New tokens of the target for a round")] = (
        4000
    )
    steps: Annotated[int, number(Range(1, 10**6, is_whole=True), "Steps of training in a round")] = 100
    batch: Annotated[int, number(Range(1, 4096, is_whole=True), "Texts of a step")] = 16
    learning_rate: Annotated[float, number(Range(1e-7, 1.0), "Highest learning rate", metavar="R")] = 1e-4
    judge_guesses: Annotated[
        int, number(Range(1, 10**9, is_whole=True), "Guesses of the new draft in service after which it is judged")
    ] = 5000
    tolerance: Annotated[
        float, number(Range(0.0, 1.0), "Acceptance that it may lose before it is taken back", metavar="X")
    ] = 0.05
    settle_s: Annotated[
        float,
        number(Range(0.0, 86_400.0), "Seconds until replicas serve a new draft and older streams end", metavar="S"),
    ] = 60.0
    rounds: Annotated[int | None, number(Range(1, 10**9, is_whole=True), "End after N rounds")] = None
    device: Annotated[str, Option(metavar="DEVICE", help="Device, as torch names it: cpu, cuda, cuda:0.")] = "cpu"
    threads: Annotated[int, number(Range(1, 1024, is_whole=True), "CPU threads")] = 1


def learn(options: LearnOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    if not options.buffer.is_dir():
        raise ConfigError(f"--buffer: {options.buffer} is not a directory: set target.engine.learning_buffer to it")
    import torch

    from workers.live import LearningPlan, LearningRounds, RoundTerms, Versions
    from workers.training import check_device

    check_device(options.device)
    torch.set_num_threads(options.threads)
    rounds = LearningRounds(
        options.buffer,
        Versions(options.draft, options.versions),
        LearningPlan(num_steps=options.steps, batch=options.batch, learning_rate=options.learning_rate),
        RoundTerms(
            every_tokens=options.every_tokens,
            judge_guesses=options.judge_guesses,
            tolerance=options.tolerance,
            settle_s=options.settle_s,
        ),
        options.after or (),
        options.device,
    )
    say(f"a round begins with {options.every_tokens} new tokens in {options.buffer}")
    while options.rounds is None or rounds.num_rounds < options.rounds:
        said = rounds.tick(time.monotonic())
        if said is not None:
            say(said)
        else:
            time.sleep(PERIOD_S)
    return 0
