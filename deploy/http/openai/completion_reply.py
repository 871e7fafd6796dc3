"""The reply to /v1/completions: texts, with log probabilities as parallel lists.

Knows OpenAI's objects; must not know how a reply is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.records import Chunk, TokenLogprobs
from deploy.http.openai.bodies import CompletionBody
from deploy.http.openai.offsets import TextOffsets
from deploy.http.openai.replies import ChoicesReply, scored_tokens
from deploy.http.reply import ReplyOrder, text_of


class CompletionReply(ChoicesReply):
    PREFIX = "cmpl-"
    WHOLE = PIECE = "text_completion"

    def __init__(self, order: ReplyOrder) -> None:
        super().__init__(order)
        assert isinstance(order.body, CompletionBody)
        self._body = order.body
        self._texts: dict[int, TextOffsets] = {}

    def _delta(self, index: int, chunk: Chunk, *, is_first: bool) -> dict[str, Any]:
        return self._message(index, [chunk]) if is_first else {"text": chunk.text}

    def _message(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        return {"text": (self._prompt(index) if self._body.echo else "") + text_of(chunks)}

    def _prompt(self, index: int) -> str:
        """The prompt as given; decoded if it was given as ids or has been truncated."""
        prompt = self._body.prompt[index // self._num_samples]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(self._requests[index].prompt)

    def _common(self, index: int, chunks: Sequence[Chunk], *, is_first: bool) -> dict[str, Any]:
        fields = super()._common(index, chunks, is_first=is_first)
        if is_first and self._has_token_ids:
            fields["prompt_token_ids"] = self._requests[index].prompt
        return {**fields, **self._prompt_logprobs(index, chunks)}

    def _logprobs(self, index: int, chunks: Sequence[Chunk], *, is_first: bool) -> dict[str, Any]:
        """Log probabilities as parallel lists. The prompt's first token has none."""
        tokens: list[tuple[int, TokenLogprobs | None]] = [*scored_tokens(chunks)]
        if is_first:
            self._texts[index] = TextOffsets(self._tokenizer)
        texts, num_echoed = self._texts[index], 0
        if is_first and self._body.echo:
            scored = [each for chunk in chunks for each in chunk.prompt_logprobs]
            echoed = list(zip(self._requests[index].prompt, (None, *scored), strict=True))
            num_echoed, tokens = len(echoed), echoed + tokens
        offsets = [texts.of(token_id) for token_id, _ in tokens[:num_echoed]]
        if is_first:
            offsets = texts.end_prompt(offsets, len(self._prompt(index)))
        offsets += [texts.of(token_id) for token_id, _ in tokens[num_echoed:]]
        return {
            "tokens": [self._name(token_id) for token_id, _ in tokens],
            "token_logprobs": [each and each.logprob for _, each in tokens],
            "top_logprobs": [each and self._top(token_id, each) for token_id, each in tokens],
            "text_offset": texts.within(offsets, text_of(chunks), is_last=chunks[-1].finish_reason is not None),
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the actual one: at most one more than requested, as in OpenAI's API."""
        most = self._body.logprobs
        top = {self._name(each): logprob for each, logprob in logprobs.top[:most]}
        return {**top, self._name(token_id): logprobs.logprob}

    def _name(self, token_id: int) -> str:
        """The token's text; if it is not valid text, its bytes in OpenAI's notation, so that names are distinct."""
        text, content = self._token(token_id)
        is_text = text.encode("utf-8", "replace") == content
        return text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
