"""Commands declare their options as the fields of a frozen dataclass, and get one instance of it.

Knows typer, and files that options name; must not know what the options mean.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from core.errors import ConfigError
from core.ranges import Range, ranges_of, text_of

Options = TypeVar("Options")


def number(allowed: Range, help_text: str, *, metavar: str = "N", panel: str | None = None) -> Any:
    """An option whose value must lie in a range, which its help states."""

    def check(value: float | None) -> float | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"must be {allowed}, got {value!r}")
        return value

    return typer.Option(help=f"{help_text}; {allowed}.", metavar=metavar, callback=check, rich_help_panel=panel)


def parameter(record: Any, name: str, *, metavar: str = "N") -> Any:
    """An option for a parameter of a request, with its range and text."""
    return number(ranges_of(record)[name], text_of(record, name), metavar=metavar)


def check_folders(*files: Path | None) -> None:
    """Raises: ConfigError unless the folder of each file that will be written exists."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"cannot write {file}: {file.parent} is not a directory; create it first")


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; in a file whose name ends in .jsonl a JSON string, or an object with a string "prompt".

    Raises: ConfigError, which names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error}") from error
    is_json = path.suffix == ".jsonl"
    given = [(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [_from_json(line, where) if is_json else line for line, where in given]
    if not prompts:
        raise ConfigError(f"--prompts: {path} has no prompt")
    return prompts


def _from_json(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompts: {where} is not JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'--prompts: {where} must be a JSON string or an object with a string "prompt"')
    return prompt


class SettingFlags(dict[str, str]):
    """The texts of flags that are named like settings, by dotted name."""


def add_command(app: typer.Typer, name: str, options: type[Options], run: Callable[[Options], Any]) -> None:
    """Add `run` to `app`. Each field of `options` is an option; its docstring is the help of the command.

    A field `Annotated[SettingFlags, names]` adds a hidden option for each name that `names()` returns.
    """
    # Typer reads the options from the parameters of a function: here those of the dataclass's constructor.
    hints, signature = get_type_hints(options, include_extras=True), inspect.signature(options)
    parameters = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
    flags = [each for each in parameters if get_args(each.annotation)[:1] == (SettingFlags,)]
    parameters = [each for each in parameters if each not in flags]
    names = {f"setting_{each.replace('.', '__')}": each for flag in flags for each in get_args(flag.annotation)[1]()}
    parameters += [_flag(parameter, setting) for parameter, setting in names.items()]

    def command(**values: Any) -> Any:
        texts = {parameter: values.pop(parameter) for parameter in names}
        given = SettingFlags({names[each]: text for each, text in texts.items() if text is not None})
        return run(options(**values, **{flag.name: given for flag in flags}))

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    app.command(name, help=inspect.getdoc(options))(command)


def _flag(parameter: str, setting: str) -> inspect.Parameter:
    """A hidden option for one setting, spelled with underscores as in files or with hyphens as in other flags."""
    spellings = dict.fromkeys((f"--{setting}", f"--{setting.replace('_', '-')}"))
    option = typer.Option(*spellings, metavar="YAML", hidden=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(parameter, kind, default=None, annotation=Annotated[str | None, option])


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
