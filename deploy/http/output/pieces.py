"""The kinds of text in a model's output, and helpers for their readers."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

ID_CHARS = string.ascii_letters + string.digits


class Kind(StrEnum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Text of one kind. The pieces of a call are its arguments, as JSON; the first has the call's name."""

    kind: Kind
    text: str
    name: str | None = None


def texts(text: str, kind: Kind = Kind.TEXT) -> list[OutputPiece]:
    """One piece; none for empty text."""
    return [OutputPiece(kind, text)] if text else []


def num_held(text: str, mark: str) -> int:
    """Number of characters at the end of `text` that may begin `mark`, including white space before them."""
    most = min(len(text), len(mark) - 1)
    begun = next((size for size in range(most, 0, -1) if mark.startswith(text[-size:])), 0)
    return len(text) - len(text[: len(text) - begun].rstrip())


def joined(pieces: Sequence[OutputPiece], kind: Kind) -> str:
    return "".join(piece.text for piece in pieces if piece.kind is kind)


def calls_of(pieces: Sequence[OutputPiece]) -> list[tuple[str, str]]:
    """The name and the arguments of each call."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind is not Kind.CALL:
            continue
        if piece.name is not None:
            calls.append((piece.name, piece.text))
        else:
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + piece.text)
    return calls


def new_call_id() -> str:
    """A random id of nine letters and digits, as some chat templates require."""
    return "".join(secrets.choice(ID_CHARS) for _ in range(9))
