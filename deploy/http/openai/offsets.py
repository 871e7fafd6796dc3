"""The position of each token in the text of one completion, for `text_offset`.

As in OpenAI's API, offsets count characters from the beginning of the prompt, even if it is not echoed.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.text import IncrementalDetokenizer, Tokenizer


class TextOffsets:
    """Offsets of a prompt's tokens, then of an output's.

    A token inside a character has the offset of the character. A special token has no text, and has the offset of the
    next text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._num_chars = 0
        self._end = 0
        """End of the text so far."""

    def of(self, token_id: int) -> int:
        """Offset of the next token."""
        offset = self._num_chars
        self._num_chars += len(self._detokenizer.push([token_id]).text)
        return offset

    def end_prompt(self, offsets: Sequence[int], num_chars: int) -> list[int]:
        """The offsets of the prompt's tokens, limited to its `num_chars` characters; resets the state for the output.

        The output follows the prompt, but its text does not depend on it.
        """
        self._detokenizer = IncrementalDetokenizer(self._tokenizer)
        self._num_chars = self._end = num_chars
        return [min(offset, num_chars) for offset in offsets]

    def within(self, offsets: Sequence[int], text: str, *, is_last: bool) -> list[int]:
        """The offsets once `text` is added. At the end, tokens cut off by a stop string are moved to its end."""
        self._end += len(text)
        return [min(offset, self._end) for offset in offsets] if is_last else list(offsets)
