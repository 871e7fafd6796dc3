"""`outrider check`: whether a pair of models can be served, and why not."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from core.config import EngineConfig
from core.errors import StartupError
from deploy.cli.generate import EXIT_FAILED


@dataclass(frozen=True)
class CheckOptions:
    """Say whether a pair of models can be served, and if not, why; the exit status is 1 then."""

    target: Annotated[Path, Option(metavar="DIR", help="Checkpoint of the target.")]
    draft: Annotated[Path | None, Option(metavar="DIR", help="Checkpoint of the draft.")] = None
    no_weights: Annotated[
        bool,
        Option(
            "--no-weights",
            help="Read configuration, vocabulary and the headers of the weights alone, which takes little memory.",
        ),
    ] = False


def check(options: CheckOptions) -> int:
    """Load both as the engines would, unless told otherwise: nothing less says for sure that they can be served."""
    try:
        for directory in filter(None, (options.target, options.draft)):
            sys.stdout.write(f"{directory}: {_described(directory, options.no_weights)}\n")
        if options.draft is not None:
            from workers.vocabulary import check_same_vocabulary

            check_same_vocabulary(options.target, options.draft)
    except StartupError as error:
        sys.stdout.write(f"not servable: {error}\n")
        return EXIT_FAILED
    verdict = "servable, as far as can be told without the weights" if options.no_weights else "servable"
    shared = ": draft and target share their vocabulary" if options.draft is not None else ""
    sys.stdout.write(f"{verdict}{shared}\n")
    return 0


def _described(directory: Path, no_weights: bool) -> str:
    """Raises: StartupError."""
    from workers.model import load, survey  # imports torch

    config = EngineConfig(str(directory))
    info = survey(config) if no_weights else load(config, lambda _: None).info
    return (
        f"{info.architecture}, {info.num_parameters:,} parameters, {info.vocab_size} tokens, "
        f"context {info.max_context_tokens}"
    )
