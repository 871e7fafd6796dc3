"""An output as a sequence of blocks: reasoning, text, or one tool call each.

Knows how to split a text; must not know how an API writes blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.records import FinishReason
from deploy.http.output.pieces import Kind, OutputPiece, new_call_id
from deploy.http.output.splitter import Reading, Splitter


class Change(StrEnum):
    BEGIN = "begin"
    ADD = "add"
    END = "end"


@dataclass(slots=True)
class Block:
    """Consecutive text of one kind."""

    index: int
    kind: Kind
    name: str
    """Name of the called tool."""
    call_id: str
    text: str = ""
    is_cut: bool = False
    """Whether the output ended before the block was complete."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    what: Change
    block: Block
    text: str = ""
    """Text added to the block."""


class Blocks:
    """All blocks of one output; only the last may be open."""

    def __init__(self, reading: Reading, prefix: str) -> None:
        """`prefix` begins the ids of calls."""
        self._splitter = Splitter(reading)
        self._prefix = prefix
        self._is_open = False
        self.all: list[Block] = []

    def feed(self, text: str, finish: FinishReason | None) -> list[BlockChange]:
        """The changes that more text causes, in order. `finish` is set with the last text."""
        pieces = self._splitter.feed(text)
        if finish is None:
            return list(self._take(pieces))
        is_cut = finish is FinishReason.LENGTH
        changes = list(self._take(pieces + self._splitter.end(is_cut=is_cut)))
        for last in self.all[-1:]:
            last.is_cut = is_cut if last.kind is not Kind.CALL else not _is_json(last.text)
        return [*changes, *self._end()]

    def cut(self) -> None:
        """Mark an open block as cut: no more text will come."""
        if self._is_open:
            self.all[-1].is_cut = True

    def add_empty(self, *, is_cut: bool) -> list[BlockChange]:
        """Add an empty text block, for an output that must have at least one block."""
        begin = self._begin(Kind.TEXT, "")
        self.all[-1].is_cut = is_cut
        return [begin, *self._end()]

    def _take(self, pieces: Sequence[OutputPiece]) -> Iterator[BlockChange]:
        for piece in pieces:
            if not self._is_open or piece.kind is not self.all[-1].kind or piece.name is not None:
                yield from self._end()
                yield self._begin(piece.kind, piece.name or "")
            if piece.text:
                self.all[-1].text += piece.text
                yield BlockChange(Change.ADD, self.all[-1], piece.text)

    def _begin(self, kind: Kind, name: str) -> BlockChange:
        """Begin a new block after all others."""
        self._is_open = True
        call_id = self._prefix + new_call_id() if kind is Kind.CALL else ""
        self.all.append(Block(len(self.all), kind, name, call_id))
        return BlockChange(Change.BEGIN, self.all[-1])

    def _end(self) -> Iterator[BlockChange]:
        if self._is_open:
            self._is_open = False
            yield BlockChange(Change.END, self.all[-1])

    @property
    def has_calls(self) -> bool:
        return any(block.kind is Kind.CALL for block in self.all)

    def text(self, kind: Kind) -> str:
        return "".join(block.text for block in self.all if block.kind is kind)


def _is_json(text: str) -> bool:
    """Whether `text` is JSON. Such arguments are complete, even if the mark after them was cut off."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
