"""`outrider settings`: every setting with its type, default and meaning, taken from the dataclasses of `core.config`.

`outrider serve` has a flag for each entry of this catalogue, so a new field of a dataclass needs no line here.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Argument

from core.config import ServiceConfig
from core.errors import ConfigError
from deploy.settings import PREFIX

INDENT = "    "


@dataclass(frozen=True, slots=True)
class SettingInfo:
    name: str
    """Dotted path. The flag is -- and this path."""
    kind: str
    default: str
    help: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace(".", "__").upper()


@dataclass(frozen=True)
class SettingsOptions:
    """List settings with type, default and meaning: all, or those whose name begins with PREFIX.

    Each is a key of the settings file, a flag of `outrider serve` and an environment variable.
    """

    prefix: Annotated[
        str, Argument(metavar="[PREFIX]", help="Prefix of the names to list, for example target.engine or limits.")
    ] = ""


def settings(options: SettingsOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    found = [each for each in catalogue() if each.name.startswith(options.prefix)]
    if not found:
        groups = dict.fromkeys(each.name.partition(".")[0] for each in catalogue() if "." in each.name)
        raise ConfigError(f"no setting begins with {options.prefix!r}; groups are {', '.join(groups)}")
    sys.stdout.write("\n".join(map(_shown, found)))
    return 0


def _shown(info: SettingInfo) -> str:
    lines = textwrap.wrap(info.help, 100, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join([f"--{info.name}  {info.kind}, default {info.default}", f"{INDENT}{info.variable}", *lines, ""])


def setting_names() -> tuple[str, ...]:
    return tuple(info.name for info in catalogue())


@cache
def catalogue() -> tuple[SettingInfo, ...]:
    """Every setting of a served pair, in the order of the dataclasses."""
    return tuple(_walk(ServiceConfig, ""))


def _walk(kind: type, prefix: str) -> Iterator[SettingInfo]:
    """The settings of a dataclass. A group that may be None is itself a setting: null or a mapping sets it."""
    hints, texts = get_type_hints(kind), _docstrings(kind)
    for field in fields(kind):
        hint, name = hints[field.name], prefix + field.name
        group = _group(hint)
        if group is None or (NoneType in get_args(hint) and prefix):
            yield SettingInfo(name, _kind(hint), _default(field), texts.get(field.name, ""))
        if group is not None:
            yield from _walk(group, f"{name}.")


def _group(hint: Any) -> type | None:
    """The dataclass of a hint, optional or not; None for other types, and for collections of dataclasses."""
    if get_origin(hint) in (tuple, list, dict):
        return None
    return next((each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)), None)


def _kind(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return str(field.default)
    return str(field.default_factory()) if field.default_factory is not MISSING else "none: must be set"


def _docstrings(kind: type) -> Mapping[str, str]:
    """The docstring under each field, inherited fields included."""
    found: dict[str, str] = {}
    for each in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
                found[node.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found
