"""`outrider keys new`: a key for a caller, printed once, and the line of the file that lets it in."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from deploy.cli.terminal import say


@dataclass(frozen=True)
class NewKeyOptions:
    """Make a key for a caller of a service whose setting `orchestrator.tokens_file` names a file.

    The key goes to standard output, for the caller, and is kept nowhere; the line with its digest goes to standard
    error, for the file. A caller may have several keys: add one, let the caller change to it, remove the other.
    """

    name: Annotated[str, Argument(metavar="NAME", help="The caller, as quotas and logs know it.")]
    max_priority: Annotated[
        int | None,
        Option(metavar="N", help="Most urgent priority that the key allows, in place of limits.max_priority."),
    ] = None


def new(options: NewKeyOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    from deploy.api import new_key  # imports Ray

    key, line = new_key(options.name, options.max_priority)
    sys.stdout.write(f"{key}\n")
    say(f"the line for orchestrator.tokens_file, which has only the key's digest:\n{line}")
    return 0
