"""Splits the text of one output into reasoning, answer and tool calls.

Knows the reader of each part; must not know how a reply is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.config import AUTO, NONE, HttpConfig
from deploy.http.output.calls import READERS, CallsReader
from deploy.http.output.pieces import Kind, OutputPiece, texts
from deploy.http.output.reasoning import MARKS, ReasoningReader
from orchestrator.text import Tokenizer

PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that may hold an opening mark written by the chat template."""
OTHER_CALLS = ("<function=", "<arg_key>")
"""Marks in templates that also have Hermes' marks, but whose calls are not JSON."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Parts to look for in the outputs of one request."""

    calls: str | None = None
    """Format of calls; None if no tools may be called."""
    names: frozenset[str] = frozenset()
    """Names of the tools."""
    is_forced: bool = False
    """Whether the output consists of calls alone. Other text then belongs to the marks of the calls."""
    most_calls: int | None = None
    """Calls beyond this number are dropped."""
    reasoning: str | None = None
    has_begun: bool = False
    """Whether the prompt ends with the mark that opens reasoning."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is answer."""
        return self.calls is None and self.reasoning is None


def calls_format(config: HttpConfig, tokenizer: Tokenizer) -> str | None:
    """The model's format of calls, from the setting or its chat template; None if it has none, or an unknown one."""
    if config.tool_call_parser != AUTO:
        return None if config.tool_call_parser == NONE else config.tool_call_parser
    template = tokenizer.template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return None if any(other in template for other in OTHER_CALLS) else "hermes"
    return "llama3_json" if '"parameters": ' in template else None


def reasoning_format(config: HttpConfig, tokenizer: Tokenizer) -> str | None:
    """The model's format of reasoning, from the setting or its chat template; None if it has none."""
    if config.reasoning_parser != AUTO:
        return None if config.reasoning_parser == NONE else config.reasoning_parser
    template = tokenizer.template or ""
    return next((name for name, marks in MARKS.items() if any(mark in template for mark in marks)), None)


def has_begun(reasoning: str, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends with the mark that opens reasoning, as some templates do."""
    end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(MARKS[reasoning][0])


class Splitter:
    """Splits one growing text. Text that may belong to a mark is held back; nothing is lost or repeated."""

    def __init__(self, reading: Reading) -> None:
        form = reading.reasoning
        self._reasoning = ReasoningReader(form, has_begun=reading.has_begun) if form is not None else None
        self._calls: CallsReader | None = READERS[reading.calls](reading.names) if reading.calls is not None else None
        self._is_forced = reading.is_forced
        self._most_calls = reading.most_calls
        self.num_calls = 0

    def feed(self, text: str) -> list[OutputPiece]:
        """The pieces that are certain once `text` is added."""
        pieces = texts(text) if self._reasoning is None else self._reasoning.feed(text)
        return list(self._counted(self._divided(pieces)))

    def end(self, *, is_cut: bool = False) -> list[OutputPiece]:
        """The pieces held back, at the end of the text. If the output was cut, parts of marks are dropped."""
        pieces = self._divided(self._reasoning.end(is_cut=is_cut)) if self._reasoning is not None else []
        if self._calls is not None and not self._is_forced:
            pieces += self._calls.end(is_cut=is_cut)
        return list(self._counted(pieces))

    def _divided(self, pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
        """The pieces with calls separated from the answer."""
        if self._calls is None:
            return list(pieces)
        return [
            part for piece in pieces for part in (self._calls.feed(piece.text) if piece.kind is Kind.TEXT else [piece])
        ]

    def _counted(self, pieces: Sequence[OutputPiece]) -> Iterator[OutputPiece]:
        """The pieces without calls beyond the limit."""
        for piece in pieces:
            self.num_calls += piece.name is not None
            if piece.kind is not Kind.CALL or self._most_calls is None or self.num_calls <= self._most_calls:
                yield piece
