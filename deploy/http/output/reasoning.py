"""Extracts a model's reasoning before its answer, such as <think>...</think>.

Knows the marks; must not know tool calls or replies.
"""

from __future__ import annotations

from collections.abc import Mapping

from deploy.http.output.pieces import Kind, OutputPiece, num_held, texts

MARKS: Mapping[str, tuple[str, str]] = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""Opening and closing mark of each format."""


class ReasoningReader:
    """Splits reasoning from the answer. Reasoning comes first or not at all; white space around marks is dropped."""

    def __init__(self, form: str, *, has_begun: bool) -> None:
        """`has_begun`: the prompt ends with the opening mark."""
        self._open, self._close = MARKS[form]
        self._is_decided = self._is_thinking = self._is_after_mark = has_begun
        self._held = ""

    def feed(self, text: str) -> list[OutputPiece]:
        self._held += text
        if not (self._is_decided or self._decides()):
            return []
        if self._is_after_mark:
            self._held = self._held.lstrip()
            self._is_after_mark = not self._held
        if not self._is_thinking:
            return texts(self._take(len(self._held)))
        end = self._held.find(self._close)
        if end < 0:
            return texts(self._take(len(self._held) - num_held(self._held, self._close)), Kind.REASONING)
        thought = self._take(end).rstrip()
        self._take(len(self._close))
        self._is_thinking, self._is_after_mark = False, True
        return texts(thought, Kind.REASONING) + self.feed("")

    def end(self, *, is_cut: bool = False) -> list[OutputPiece]:
        """The text held back, unless the output was cut within a mark."""
        is_mark = not self._is_decided or (self._is_thinking and not self._is_after_mark)
        if is_cut and is_mark:
            return []
        return texts(self._take(len(self._held)), Kind.REASONING if self._is_thinking else Kind.TEXT)

    def _decides(self) -> bool:
        """Decide, if possible, whether the text begins with reasoning. Returns whether that is known now."""
        text = self._held.lstrip()
        if text.startswith(self._open):
            self._held = text[len(self._open) :]
            self._is_thinking = self._is_after_mark = True
        self._is_decided = self._is_thinking or not self._open.startswith(text)
        return self._is_decided

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken
