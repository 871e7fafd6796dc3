"""Finds tool calls in a model's text, in the formats of common models.

Knows the marks of each format; must not know replies or tools' schemas.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping

from deploy.http.output.json_call import CallReader
from deploy.http.output.pieces import OutputPiece, num_held, texts

PYTHON_TAG = "<|python_tag|>"
"""Optional mark before a call of Llama's."""


class CallsReader(ABC):
    """Splits text into calls and other text. White space around calls is dropped."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the names of the tools."""
        self._names = names
        self._held = ""
        self._call: CallReader | None = None
        self._has_calls = False

    def feed(self, text: str) -> list[OutputPiece]:
        self._held += text
        found: list[OutputPiece] = []
        while self._steps(found):
            pass
        return found

    def end(self, *, is_cut: bool = False) -> list[OutputPiece]:
        """Release the held text. An unfinished call without arguments becomes text, unless the output was cut there."""
        rest = "" if self._is_closing or (is_cut and self._is_calling) else self._unread() + self._held
        self._call, self._held = None, ""
        return texts(rest.rstrip() if self._has_calls else rest)

    @property
    @abstractmethod
    def _is_calling(self) -> bool:
        """Whether a call has certainly begun and has not ended."""

    @property
    def _is_closing(self) -> bool:
        """Whether the held text is part of the mark that closes a call."""
        return False

    def _steps(self, found: list[OutputPiece]) -> bool:
        """Make one step. Returns whether another may follow."""
        if self._call is None:
            return self._looks(found)
        pieces, self._held = self._call.feed(self._held)
        found += pieces
        if self._call.is_done or (self._call.is_broken and self._call.has_begun):
            self._has_calls, self._call = True, None
            self._ended()
            return True
        if self._call.is_broken:
            self._held, self._call = self._unread() + self._held, None
            self._failed(found)
            return True
        return False

    def _unread(self) -> str:
        """The text read so far for a call that may turn out to be none."""
        return self._before() + self._call.raw if self._call is not None and not self._call.has_begun else ""

    @abstractmethod
    def _looks(self, found: list[OutputPiece]) -> bool:
        """Outside of calls: take text up to the next call. Returns whether another step may follow."""

    def _before(self) -> str:
        """The mark before the current call."""
        return ""

    @abstractmethod
    def _ended(self) -> None:
        """Called when a call is complete."""

    @abstractmethod
    def _failed(self, found: list[OutputPiece]) -> None:
        """Called when the held text turns out not to be a call."""


class _MarkedCalls(CallsReader):
    """Calls, or lists of calls, that begin with a mark."""

    OPEN: str
    CLOSE: str

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._space = ""
        """White space before the current mark."""
        self._expected: str | None = None
        """Set after a call: the mark that may close it, or "" if only white space may follow."""

    @property
    def _is_calling(self) -> bool:
        return self._call is not None or self._held.lstrip().startswith(self.OPEN)

    @property
    def _is_closing(self) -> bool:
        return self._expected not in (None, "") and self._expected.startswith(self._held)

    def _looks(self, found: list[OutputPiece]) -> bool:
        if self._expected is not None and not self._is_past_end():
            return False
        if self._call is not None:
            return True  # another call of the same list
        start = self._held.find(self.OPEN)
        size = start if start >= 0 else len(self._held) - num_held(self._held, self.OPEN)
        text = self._held[:size].rstrip() if start >= 0 else self._held[:size]
        found += texts(text)
        self._space, self._held = self._held[len(text) : size], self._held[size:]
        if start >= 0 and self._begins():
            return True
        self._held, self._space = self._space + self._held, ""
        return False

    def _is_past_end(self) -> bool:
        """Drop the mark that closes a call. Returns whether the text after it is known."""
        text = self._held.lstrip()
        if self._expected and text.startswith(self._expected):
            text, self._expected = text[len(self._expected) :].lstrip(), ""
        self._held = text
        if not text or (self._expected and self._expected.startswith(text)):
            return False
        self._expected = None
        return True

    def _begins(self) -> bool:
        """Start reading a call after its mark. Returns whether its form is known yet."""
        self._call, self._held = CallReader(), self._held[len(self.OPEN) :]
        return True

    def _before(self) -> str:
        return self._space + self.OPEN

    def _ended(self) -> None:
        self._expected = self.CLOSE

    def _failed(self, found: list[OutputPiece]) -> None:
        size = len(self._space) + len(self.OPEN)
        found += texts(self._held[:size])
        self._held, self._space = self._held[size:], ""


class HermesCalls(_MarkedCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as written by Hermes and Qwen."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"


class MistralCalls(_MarkedCalls):
    """`[TOOL_CALLS]`, then a list of objects, or (in later models) a name and its arguments."""

    OPEN, CLOSE = "[TOOL_CALLS]", "]"
    _NAMED = re.compile(r"\s*([^\s\[\]{}\"]+)(?:\[CALL_ID\][^\[{]*+)?(?:\[ARGS\])?\s*(?=\{)")
    _MAX_NAME_CHARS = 200

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._prefix = self.OPEN

    def _begins(self) -> bool:
        after = self._held[len(self.OPEN) :]
        start = after.lstrip()
        if not start:
            return False
        if start[0] in "[{":
            return self._takes(after.index(start[0]) + (start[0] == "["), CallReader())
        if (named := self._NAMED.match(after)) is not None:
            return self._takes(named.end(), CallReader.of_arguments(named[1]))
        if len(after) > self._MAX_NAME_CHARS:
            self._prefix, self._call = "", CallReader()  # no call begins like this
            return True
        return False

    def _takes(self, num_chars: int, call: CallReader) -> bool:
        """Start a call `num_chars` after the mark."""
        size = len(self.OPEN) + num_chars
        self._prefix, self._held, self._call = self._held[:size], self._held[size:], call
        return True

    def _before(self) -> str:
        return self._space + self._prefix

    def _is_past_end(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(","):
            self._space, self._prefix, self._expected = "", "", None
            self._held, self._call = text[1:], CallReader()
            return True
        return super()._is_past_end()


class LlamaCalls(CallsReader):
    """`{"name": ..., "parameters": {...}}` with nothing before it, as written by Llama 3; calls are separated by `;`.

    An object whose name is not a tool's is no call: the answer may be JSON, too.
    """

    _SKIPPED = re.compile(r"[\s;]*")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_text = False

    @property
    def _is_calling(self) -> bool:
        return self._call is not None and self._call.is_named

    def _looks(self, found: list[OutputPiece]) -> bool:
        if self._is_text:
            found += texts(self._held)
            self._held = ""
            return False
        start = self._SKIPPED.sub("", self._held, count=1) if self._has_calls else self._held.lstrip()
        if PYTHON_TAG.startswith(start) and start != PYTHON_TAG:
            return False
        start = start.removeprefix(PYTHON_TAG).lstrip()
        if start.startswith("{"):
            self._held, self._call = start, CallReader(self._names)
            return True
        self._is_text = bool(start)
        return self._is_text

    def _ended(self) -> None:
        """Do nothing: the next call starts without a closing mark."""

    def _failed(self, found: list[OutputPiece]) -> None:  # noqa: ARG002
        self._is_text = True


READERS: Mapping[str, Callable[[Collection[str]], CallsReader]] = {
    "hermes": HermesCalls,
    "llama3_json": LlamaCalls,
    "mistral": MistralCalls,
}
"""Reader classes by the values of the setting."""
