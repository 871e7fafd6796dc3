"""How commands state their options: as the fields of a frozen dataclass, so that what runs is given one typed value.

Knows typer; nothing of what the options mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Numbers:
    """The value of an option that takes several numbers, separated by commas."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        return ",".join(f"{value:g}" for value in self.values)


def numbers(allowed: Range, help_text: str, *, metavar: str, panel: str | None = None) -> Any:
    """An option of type `Numbers`, each of which must lie in a range."""

    def parse(text: str | Numbers) -> Numbers:
        if isinstance(text, Numbers):  # the default
            return text
        try:
            values = tuple(float(word) for word in text.split(","))
        except ValueError:
            raise typer.BadParameter(f"must be numbers, separated by commas, got {text!r}") from None
        if wrong := [value for value in values if value not in allowed]:
            raise typer.BadParameter(f"must be {allowed}, got {wrong[0]!r}")
        return Numbers(values)

    about = f"{help_text}; {allowed}; several with commas between."
    return typer.Option(help=about, metavar=metavar, parser=parse, rich_help_panel=panel)
