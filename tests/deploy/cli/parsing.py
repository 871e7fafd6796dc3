"""Command lines as the options that a command is run with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import typer

from deploy.cli.options import add_command

Options = TypeVar("Options")


def parsed(kind: type[Options], argv: Sequence[str]) -> Options:
    """Raises: typer.TyperException."""
    app = typer.Typer()
    add_command(app, "command", kind, lambda options: options)
    found = app(argv, standalone_mode=False)
    assert isinstance(found, kind)
    return found
