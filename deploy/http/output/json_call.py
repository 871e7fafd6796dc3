"""Reads one call in JSON, character by character: its name, then its arguments as they come.

Knows JSON; must not know the marks around it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from deploy.http.output.pieces import Kind, OutputPiece

ARGUMENTS = ("arguments", "parameters")
NO_ARGUMENTS = ("null", '""')
"""Values that some models write instead of {}."""


class _At(Enum):
    OBJECT = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    BEFORE_VALUE = auto()
    VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class CallReader:
    """One call, `{"name": ..., "arguments": {...}}`. The keys may be in any order, and there may be others.

    Nothing is returned before the name is known and allowed. After that the arguments are returned as written, valid or
    not; as in OpenAI's API, the client has to validate them.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names` are the names that make a call; None allows any."""
        self._names = names
        self._at = _At.OBJECT
        self._key = ""
        self._value: list[str] = []
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._name: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = self._is_streamed = self._ends_with_value = False
        self._given: list[OutputPiece] = []
        self.has_begun = False
        """Whether the name has been returned."""
        self.raw = ""
        """The text read so far; it becomes plain text again if it is no call."""

    @classmethod
    def of_arguments(cls, name: str) -> CallReader:
        """A reader for a call whose name comes before its arguments."""
        reader = cls()
        reader._name, reader._key, reader._at = name, ARGUMENTS[0], _At.BEFORE_VALUE
        reader._ends_with_value = True
        return reader

    @property
    def is_done(self) -> bool:
        return self._at is _At.DONE

    @property
    def is_named(self) -> bool:
        """Whether the name is known and allowed."""
        return self._name is not None

    @property
    def is_broken(self) -> bool:
        """Whether the text is no call, or no longer one. The following characters are then text."""
        return self._at is _At.BROKEN

    def feed(self, text: str) -> tuple[list[OutputPiece], str]:
        """Read text. Returns the part of the call that is certain, and the text after the call."""
        self._given = []
        size = 0
        for size, char in enumerate(text, 1):  # noqa: B007
            self._read(char)
            if self.is_done or self.is_broken:
                break
        used = size - 1 if self.is_broken else size
        self.raw += text[:used]
        self._flush()
        return self._given, text[used:]

    def _read(self, char: str) -> None:
        match self._at:
            case _At.VALUE:
                self._read_value(char)
            case _At.IN_KEY:
                self._read_key(char)
            case _ if char.isspace():
                pass
            case _At.BEFORE_VALUE:
                self._begin_value(char)
            case _At.OBJECT if char == "{":
                self._at = _At.KEY
            case _At.KEY if char == '"':
                self._key, self._at = "", _At.IN_KEY
            case _At.KEY if char == ",":
                pass
            case _At.KEY if char == "}":
                self._end()
            case _At.COLON if char == ":":
                self._at = _At.BEFORE_VALUE
            case _:
                self._at = _At.BROKEN

    def _read_key(self, char: str) -> None:
        if char == '"':
            self._at = _At.COLON
        else:
            self._key += char

    def _begin_value(self, char: str) -> None:
        self._value, self._depth, self._in_string, self._is_escaped = [], 0, False, False
        self._at = _At.VALUE
        self._has_arguments |= self._key in ARGUMENTS
        self._is_streamed = self._key in ARGUMENTS and char in "{["
        self._read_value(char)

    def _read_value(self, char: str) -> None:
        """Read one character of a value. A quote ends a string, a bracket an object or array, a delimiter the rest."""
        if self._in_string:
            self._keep(char)
            is_quote = char == '"' and not self._is_escaped
            self._is_escaped = char == "\\" and not self._is_escaped
            self._in_string = not is_quote
            if is_quote and not self._depth:
                self._end_value()
        elif char == '"':
            self._keep(char)
            self._in_string = True
        elif char in "{[":
            self._keep(char)
            self._depth += 1
        elif self._depth:
            self._keep(char)
            self._depth -= char in "}]"
            if not self._depth:
                self._end_value()
        elif char in ",}" or char.isspace():
            self._end_value()
            self._read(char)
        else:
            self._keep(char)

    def _keep(self, char: str) -> None:
        self._value.append(char)

    def _end_value(self) -> None:
        text, self._at = "".join(self._value), _At.KEY
        if self._key == "name":
            name = _string(text)
            self._name = name if self._names is None or name in self._names else None
            self._at = _At.KEY if self._name is not None else _At.BROKEN
        if self._key in ARGUMENTS:
            self._arguments.append(text if self._is_streamed else _object(text))
        if self._ends_with_value:
            self._end()

    def _end(self) -> None:
        if self._name is None:
            self._at = _At.BROKEN if not self.has_begun else _At.DONE
            return
        if not self._has_arguments:
            self._arguments.append("{}")
            self._has_arguments = True
        self._at = _At.DONE

    def _flush(self) -> None:
        """Return the arguments read so far. Arguments that are not an object are returned only when complete."""
        if self._name is None or not self._has_arguments:
            return
        if self._at is _At.VALUE and self._is_streamed:
            self._arguments.append("".join(self._value))
            self._value = []
        text = "".join(self._arguments)
        self._arguments = []
        if text or not self.has_begun:
            self._given.append(OutputPiece(Kind.CALL, text, None if self.has_begun else self._name))
            self.has_begun = True


def _string(text: str) -> str | None:
    """The JSON string in `text`; None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) and value else None


def _object(text: str) -> str:
    """Arguments as a JSON object. Models may write them as a string that holds JSON, or as an empty value."""
    if text in NO_ARGUMENTS:
        return "{}"
    return _string(text) or text
