"""How commands state their options: as the fields of a frozen dataclass, so that what runs is given one typed value.

Knows typer; nothing of what the options mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

from core.ranges import Range

Options = TypeVar("Options")


def number(allowed: Range, help_text: str, *, metavar: str = "N", panel: str | None = None) -> Any:
    """An option whose value must lie in a range, which its help states."""

    def check(value: float | None) -> float | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"must be {allowed}, got {value!r}")
        return value

    return typer.Option(help=f"{help_text}; {allowed}.", metavar=metavar, callback=check, rich_help_panel=panel)


def add_command(app: typer.Typer, name: str, options: type[Options], run: Callable[[Options], Any]) -> None:
    """Add `run` to `app`. Each field of `options` is an option; its docstring is the help of the command."""

    def command(**values: Any) -> Any:
        return run(options(**values))

    # Typer reads options from a function's parameters; the constructor of a dataclass has the same.
    hints, signature = get_type_hints(options, include_extras=True), inspect.signature(options)
    parameters = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    app.command(name, help=inspect.getdoc(options))(command)
