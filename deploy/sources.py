"""The source of each setting's value: a flag, the environment, a line of a file, or a default.

Knows names and sources; must not know which settings exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import yaml

from core.errors import ConfigError

DEFAULT = "default"
MISSING = object()


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    """Dotted path of the setting."""
    value: object
    source: str
    """Description of the source, for errors."""

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Parse NAME=VALUE, with a YAML value. Raises: ConfigError."""
        name, separator, value = text.partition("=")
        if not separator or not all(name.split(".")):
            raise ConfigError(f"a setting is given as NAME=VALUE (for example target.num_replicas=2), got {text!r}")
        return cls(name, yaml_value(value, text), f"--set {text}")

    def contradicts(self, later: Setting) -> bool:
        """Whether applying `later` after this one loses a part of either, or replaces it."""
        if later.name.startswith(f"{self.name}."):
            part = _at(self.value, later.name[len(self.name) + 1 :])
            return not isinstance(self.value, Mapping) or part not in (MISSING, later.value)
        if self.name == later.name or self.name.startswith(f"{later.name}."):
            return bool(_at(later.value, self.name[len(later.name) + 1 :]) != self.value)
        return False

    @classmethod
    def of_flag(cls, name: str, text: str) -> Setting:
        """Parse the value of a flag that is named like the setting; the value is YAML. Raises: ConfigError."""
        return cls(name, yaml_value(text, f"--{name} {text}"), f"--{name}")


def refuse_contradictions(settings: Sequence[Setting]) -> None:
    """Raises: ConfigError, which names both sources, if two of these settings cannot both hold."""
    for one, other in combinations(settings, 2):
        if one.contradicts(other):
            raise ConfigError(f"{one.source} and {other.source} contradict each other: give one of them")


def yaml_value(text: str, item: str) -> object:
    """Raises: ConfigError, which quotes `item`."""
    try:
        value: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value in {item!r} is not YAML") from error
    return value


@dataclass(frozen=True, slots=True)
class Sources:
    """The layers of a configuration: `given` settings over a file or built-in ones; the last given one wins."""

    given: Sequence[Setting] = ()
    file: Path | None = None
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line numbers in the file, by setting name."""
    built_in: str = DEFAULT
    """Source of the settings in `built_in_names` if there is no file."""
    built_in_names: frozenset[str] = frozenset()

    @classmethod
    def in_file(cls, given: Sequence[Setting], file: Path, text: str) -> Sources:
        """`text` is the file's content and valid YAML."""
        return cls(given, file, dict(_lines(yaml.compose(text, yaml.SafeLoader))))

    def of(self, name: str) -> str:
        for setting in reversed(self.given):
            if setting.name == name:
                return setting.source
            if name.startswith(f"{setting.name}."):
                part = _at(setting.value, name[len(setting.name) + 1 :])
                return setting.source if part is not MISSING else DEFAULT
        if name in self.lines:
            return f"{self.file}:{self.lines[name]}"
        return self.built_in if name in self.built_in_names else DEFAULT

    def of_problem(self, name: str) -> str:
        """The source of the setting, or of a group around it or a part of it, in parentheses for an error."""
        for setting in reversed(self.given):
            one, other = f"{name}.", f"{setting.name}."
            if one.startswith(other) or other.startswith(one):
                return f" ({setting.source})"
        if self.file is None:
            return ""
        return f" ({self.file}{self._line(name)})"

    def _line(self, name: str) -> str:
        """`:LINE` of the setting, or of the innermost group around it that is in the file; else empty."""
        while name and name not in self.lines:
            name = name.rpartition(".")[0]
        return f":{self.lines[name]}" if name else ""


def _at(value: object, path: str) -> object:
    """The part of a group at this path, the value itself at an empty one; MISSING if it has none."""
    for part in filter(None, path.split(".")):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def _lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        below = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        below = [(str(index), value, value) for index, value in enumerate(node.value)]
    else:
        return
    for key, begin, value in below:
        yield f"{prefix}{key}", begin.start_mark.line + 1
        yield from _lines(value, f"{prefix}{key}.")
