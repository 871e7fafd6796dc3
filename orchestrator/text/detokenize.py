"""Incremental detokenization: the text that may be shown, and where a stop string ends it.

Knows the tokenizer and the stop strings of one request; must not know sessions, verdicts or blocks. The text depends
only on the tokens, never on their division into pushes, so a resumed stream shows exactly the rest.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
"""Length of the longest UTF-8 character, in bytes. An undecodable sequence of this length cannot be completed."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    num_kept: int
    """Number of the pushed tokens up to and including the one that completes the stop string, else all of them."""
    stop: str | None = None
    """Stop string that ends the output after this piece."""


class IncrementalDetokenizer:
    """Detokenizes one output incrementally.

    Invariant: until a stop string is found, the concatenated pieces, including that of `finish`, equal
    `tokenizer.decode` of all tokens. An incomplete character is held back, and so is the longest suffix with which a
    stop string may begin. If several stop strings match, the first to be complete wins; among those, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._decoder = _ByteDecoder(tokenizer) if tokenizer.is_byte_level else _WindowDecoder(tokenizer)
        self._stop = tuple(stop)
        self._max_held = max(map(len, self._stop), default=1) - 1
        self._include_stop = include_stop
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Add tokens. Nothing may follow a piece with a stop."""
        if not self._stop:
            return Piece("".join(map(self._decoder.push, token_ids)), len(token_ids))
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            if text := self._decoder.push(token_id):
                shown_text, stop = self._release(text)
                shown.append(shown_text)
                if stop is not None:
                    return Piece("".join(shown), index + 1, stop)
        return Piece("".join(shown), len(token_ids))

    def finish(self) -> Piece:
        """Return the text that was held back. No token may follow."""
        text, stop = self._release(self._decoder.finish())
        if stop is None:
            text, self._held = text + self._held, ""
        return Piece(text, 0, stop)

    def _release(self, text: str) -> tuple[str, str | None]:
        """Add `text` to the held text, and release the part that cannot begin a stop string."""
        text = self._held + text
        if (match := self._find_stop(text)) is not None:
            start, stop = match
            self._held = ""
            return text[: start + len(stop) if self._include_stop else start], stop
        num_shown = len(text) - self._num_to_hold(text)
        self._held = text[num_shown:]
        return text[:num_shown], None

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _num_to_hold(self, text: str) -> int:
        for length in range(min(self._max_held, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


class _ByteDecoder:
    """Decoder for byte-level vocabularies, whose tokens are strings of bytes. Exact, in constant time per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decoder for all other vocabularies: decodes the newest tokens after the few earlier ones that affect them.

    Text that ends in U+FFFD waits for the rest of its character. There is one deviation from the library: a shown
    character stays, where the library would replace a whole run of byte tokens because of a later invalid byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        """Last tokens whose text was shown. They precede the next token in decoding, so that it is not decoded as the
        start of a text."""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        num_incomplete = len(text) - len(text.rstrip(REPLACEMENT))
        return "" if 0 < num_incomplete < MAX_CHARACTER_BYTES else self._show(text)

    def finish(self) -> str:
        return self._show(self._pending_text()) if self._pending else ""

    def _show(self, text: str) -> str:
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        shown = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode([*self._context, *self._pending])
        return text.removeprefix(shown) if text.startswith(shown) else self._tokenizer.decode(self._pending)
