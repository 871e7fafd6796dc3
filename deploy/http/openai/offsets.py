"""Where the tokens of one completion stand in its text, as `text_offset` says.

Offsets count characters from the beginning of the prompt, whether it is repeated or not, as with OpenAI.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.text import IncrementalDetokenizer, Tokenizer


class TextOffsets:
    """Of a prompt's tokens, then of an output's. A token within a character stands where the character begins; a
    special token, which has no text, where the next text does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._num_chars = 0
        self._end = 0
        """Of the text so far."""

    def of(self, token_id: int) -> int:
        """Where the next token begins."""
        offset = self._num_chars
        self._num_chars += len(self._detokenizer.push([token_id]).text)
        return offset

    def end_prompt(self, offsets: Sequence[int], num_chars: int) -> list[int]:
        """The offsets of the prompt's tokens, within a prompt of `num_chars`. The output follows, whose text does not
        depend on it.
        """
        self._detokenizer = IncrementalDetokenizer(self._tokenizer)
        self._num_chars = self._end = num_chars
        return [min(offset, num_chars) for offset in offsets]

    def within(self, offsets: Sequence[int], text: str, *, is_last: bool) -> list[int]:
        """With `text` added: tokens whose text a stop string has cut off stand at the end."""
        self._end += len(text)
        return [min(offset, self._end) for offset in offsets] if is_last else list(offsets)
