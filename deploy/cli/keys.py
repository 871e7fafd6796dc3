"""`outrider keys new`: make a key for a caller, and the line of the keys file that accepts it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from deploy.cli.terminal import say


@dataclass(frozen=True)
class NewKeyOptions:
    """Make a key for a caller of a service whose setting `orchestrator.tokens_file` names a file.

    The key is printed to standard output, for the caller, and stored nowhere. The line with its digest is printed to
    standard error, for the file. A caller may have several keys, so that a key can be replaced without a pause.
    """

    name: Annotated[str, Argument(metavar="NAME", help="Name of the caller, for quotas and logs.")]
    max_priority: Annotated[
        int | None, Option(metavar="N", help="Most urgent priority that the key allows; overrides limits.max_priority.")
    ] = None
    max_requests_per_minute: Annotated[
        int | None,
        Option(metavar="N", help="Completions a minute; overrides limits.max_requests_per_minute. 0 sets no limit."),
    ] = None
    max_tokens_per_minute: Annotated[
        int | None,
        Option(metavar="N", help="Tokens a minute; overrides limits.max_tokens_per_minute. 0 sets no limit."),
    ] = None
    max_sessions: Annotated[
        int | None,
        Option(metavar="N", help="Concurrent completions; overrides limits.max_sessions_per_caller. 0 sets no limit."),
    ] = None
    tenant: Annotated[
        str,
        Option(
            metavar="NAME", help="Tenant of the caller. Callers of one tenant share their recent outputs as guesses."
        ),
    ] = ""
    no_learning: Annotated[
        bool, Option("--no-learning", help="Never keep anything of the caller's requests for training drafts.")
    ] = False


def new(options: NewKeyOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    from deploy.api import KeyLimits, new_key  # imports Ray

    limits = KeyLimits(
        options.max_priority, options.max_requests_per_minute, options.max_tokens_per_minute, options.max_sessions
    )
    key, line = new_key(options.name, limits, options.tenant, learning=not options.no_learning)
    sys.stdout.write(f"{key}\n")
    say(f"the line for orchestrator.tokens_file; it contains only the key's digest:\n{line}")
    return 0
