"""The reply to /v1/chat/completions: messages with reasoning and tool calls, whole or in deltas.

Knows how to split a text; must not know how a reply is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core.records import Chunk, FinishReason
from deploy.http.openai.chat_body import ChatBody
from deploy.http.openai.replies import ChoicesReply, scored_tokens
from deploy.http.output import Kind, OutputPiece, Splitter, calls_of, joined, new_call_id
from deploy.http.reply import ReplyOrder, text_of


class ChatReply(ChoicesReply):
    PREFIX = "chatcmpl-"
    WHOLE = "chat.completion"
    PIECE = "chat.completion.chunk"

    def __init__(self, order: ReplyOrder) -> None:
        super().__init__(order)
        assert isinstance(order.body, ChatBody)
        self._is_plain = order.reading.is_plain
        self._echoed = order.body.echoed
        self._splitters = [Splitter(order.reading) for _ in order.requests]
        self._num_calls = [0] * len(order.requests)
        self._last_kinds: list[Kind | None] = [None] * len(order.requests)
        """Kind of the last piece of each sample, once its text has begun."""

    def _of_prompt(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        ids = {"prompt_token_ids": self._requests[0].prompt} if self._has_token_ids else {}
        return {**ids, **self._prompt_logprobs(0, chunks)}

    def _delta(self, index: int, chunk: Chunk, *, is_first: bool) -> dict[str, Any]:
        role, begin = ({"role": "assistant"}, self._echoed) if is_first else ({}, "")
        if self._is_plain:
            content = begin + chunk.text
            return {"delta": {**role, **({"content": content} if content or is_first else {})}}
        pieces = self._pieces(index, chunk.text, chunk.finish_reason)
        fields = {
            **_thoughts(pieces),
            "content": begin + joined(pieces, Kind.TEXT),
            "tool_calls": [self._call_delta(index, piece) for piece in pieces if piece.kind is Kind.CALL],
        }
        return {"delta": {**role, **{name: value for name, value in fields.items() if value}}}

    def _pieces(self, index: int, text: str, finish: FinishReason | None) -> list[OutputPiece]:
        splitter, is_cut = self._splitters[index], finish is FinishReason.LENGTH
        pieces = splitter.feed(text) + (splitter.end(is_cut=is_cut) if finish is not None else [])
        return [self._parted(index, piece) for piece in pieces]

    def _parted(self, index: int, piece: OutputPiece) -> OutputPiece:
        """The piece. Text that follows an earlier text and a call begins with a line break, since all text is
        joined."""
        before = self._last_kinds[index]
        if piece.kind is Kind.TEXT or before is not None:
            self._last_kinds[index] = piece.kind
        is_after_call = piece.kind is Kind.TEXT and before is Kind.CALL
        return replace(piece, text="\n" + piece.text) if is_after_call else piece

    def _call_delta(self, index: int, piece: OutputPiece) -> dict[str, Any]:
        if piece.name is None:
            return {"index": self._num_calls[index] - 1, "function": {"arguments": piece.text}}
        self._num_calls[index] += 1
        function = {"name": piece.name, "arguments": piece.text}
        return {"index": self._num_calls[index] - 1, "id": new_call_id(), "type": "function", "function": function}

    def _message(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        text = text_of(chunks)
        if self._is_plain:
            return {"message": {"role": "assistant", "content": self._echoed + text, "refusal": None}}
        pieces = self._pieces(index, text, chunks[-1].finish_reason)
        answer = self._echoed + joined(pieces, Kind.TEXT)
        calls = [_call(begun) for begun in calls_of(pieces)]
        self._num_calls[index] = len(calls)
        message: dict[str, Any] = {"role": "assistant", "content": answer or (None if calls else ""), "refusal": None}
        return {"message": {**message, **_thoughts(pieces), **({"tool_calls": calls} if calls else {})}}

    def _finish_reason(self, index: int, reason: FinishReason) -> str:
        return "tool_calls" if self._num_calls[index] and reason is FinishReason.STOP else reason.value

    def _logprobs(self, index: int, chunks: Sequence[Chunk], *, is_first: bool) -> dict[str, Any]:  # noqa: ARG002
        content = [
            {**self._entry(token_id, each.logprob), "top_logprobs": [self._entry(*other) for other in each.top]}
            for token_id, each in scored_tokens(chunks)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, content = self._token(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(content)}


def _thoughts(pieces: Sequence[OutputPiece]) -> dict[str, str]:
    """The reasoning under both names that other servers use."""
    thoughts = joined(pieces, Kind.REASONING)
    return {"reasoning": thoughts, "reasoning_content": thoughts} if thoughts else {}


def _call(call: tuple[str, str]) -> dict[str, Any]:
    name, arguments = call
    return {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
