"""One output's text, divided into thoughts, answer and calls.

Knows the readers of each; must not know how a reply is written.
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
"""Of a prompt, among which the mark is that opens thoughts, if the template has written it."""
OTHER_CALLS = ("<function=", "<arg_key>")
"""In templates whose calls are no JSON, although their marks are those of Hermes."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is looked for in the outputs of one request."""

    calls: str | None = None
    """A format, where there are tools that may be called."""
    names: frozenset[str] = frozenset()
    """Those of the tools."""
    is_forced: bool = False
    """The output is calls alone: whatever else stands there belongs to their marks."""
    most_calls: int | None = None
    """Calls after that number are left out."""
    reasoning: str | None = None
    has_begun: bool = False
    """Whether the prompt ends with the mark that opens thoughts."""

    @property
    def is_plain(self) -> bool:
        """All text is answer."""
        return self.calls is None and self.reasoning is None


def calls_format(config: HttpConfig, tokenizer: Tokenizer) -> str | None:
    """How the model writes calls, by the setting or its chat template; None for not at all, or in an unknown way."""
    if config.tool_call_parser != AUTO:
        return None if config.tool_call_parser == NONE else config.tool_call_parser
    template = tokenizer.template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return None if any(other in template for other in OTHER_CALLS) else "hermes"
    return "llama3_json" if '"parameters": ' in template else None


def reasoning_format(config: HttpConfig, tokenizer: Tokenizer) -> str | None:
    """The same for how it marks its thoughts."""
    if config.reasoning_parser != AUTO:
        return None if config.reasoning_parser == NONE else config.reasoning_parser
    template = tokenizer.template or ""
    return next((name for name, marks in MARKS.items() if any(mark in template for mark in marks)), None)


def has_begun(reasoning: str, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt's end opens thoughts, as some templates do."""
    end = tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(MARKS[reasoning][0])


class Splitter:
    """Divides one growing text. What may belong to a mark is held back; nothing is given twice or lost."""

    def __init__(self, reading: Reading) -> None:
        form = reading.reasoning
        self._reasoning = ReasoningReader(form, has_begun=reading.has_begun) if form is not None else None
        self._calls: CallsReader | None = READERS[reading.calls](reading.names) if reading.calls is not None else None
        self._is_forced = reading.is_forced
        self._most_calls = reading.most_calls
        self.num_calls = 0

    def feed(self, text: str) -> list[OutputPiece]:
        """What is certain now that `text` has followed."""
        pieces = texts(text) if self._reasoning is None else self._reasoning.feed(text)
        return list(self._counted(self._divided(pieces)))

    def end(self, *, is_cut: bool = False) -> list[OutputPiece]:
        """What was held back: nothing more will follow. Of an output that was `is_cut`, no part of a mark."""
        pieces = self._divided(self._reasoning.end(is_cut=is_cut)) if self._reasoning is not None else []
        if self._calls is not None and not self._is_forced:
            pieces += self._calls.end(is_cut=is_cut)
        return list(self._counted(pieces))

    def _divided(self, pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
        """With the calls taken out of the answer."""
        if self._calls is None:
            return list(pieces)
        return [
            part for piece in pieces for part in (self._calls.feed(piece.text) if piece.kind is Kind.TEXT else [piece])
        ]

    def _counted(self, pieces: Sequence[OutputPiece]) -> Iterator[OutputPiece]:
        """Without the calls that are too many."""
        for piece in pieces:
            self.num_calls += piece.name is not None
            if piece.kind is not Kind.CALL or self._most_calls is None or self.num_calls <= self._most_calls:
                yield piece
