"""The reply to /v1/messages, as one object or as a stream of events.

Knows Anthropic's events; must not know how a reply is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from core.records import Chunk, FinishReason
from deploy.http.output import Block, BlockChange, Blocks, Change, Kind
from deploy.http.reply import Reply, ReplyOrder, usage_of
from deploy.http.wire import encoded, event

DELTAS: Mapping[Kind, tuple[str, str]] = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}
"""Type of a delta and its text field, for each kind of block."""


class MessagesReply(Reply):
    def __init__(self, order: ReplyOrder) -> None:
        self._order = order
        self._blocks = Blocks(order.reading, "toolu_")
        self._last: Chunk | None = None

    def piece(self, index: int, chunk: Chunk) -> bytes:  # noqa: ARG002 - there is only one sample
        events = [] if self._last is not None else [self._start(), _event("ping")]
        changes = self._changes(chunk)
        return b"".join([*events, *map(_of_change, changes)])

    def last_piece(self) -> bytes:
        delta = {**self._stop(), "stop_details": None}
        return _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> Mapping[str, Any]:
        for chunk in chunks[0]:
            self._changes(chunk)
        return self._message([_whole(block) for block in self._blocks.all])

    def _changes(self, chunk: Chunk) -> list[BlockChange]:
        self._last = chunk
        return self._blocks.feed(chunk.text, chunk.finish_reason)

    def _start(self) -> bytes:
        return _event("message_start", message=self._message([]))

    def _message(self, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._order.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._order.model,
            "content": content,
            **self._stop(),
            "usage": {**self._usage(), "service_tier": "standard"},
        }

    def _stop(self) -> dict[str, Any]:
        """The stop reason; null until the message has ended."""
        last = self._last
        if last is None or last.finish_reason is None:
            return {"stop_reason": None, "stop_sequence": None}
        if last.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(last.matched_stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.matched_stop}
        return {"stop_reason": "tool_use" if self._blocks.has_calls else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Usage by Anthropic's names. `input_tokens` leaves out tokens read from the cache."""
        usage = usage_of([] if self._last is None else [self._last], self._order.requests[0])
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached_tokens}
        num_computed = usage.prompt_tokens - usage.cached_tokens
        return {"input_tokens": num_computed, **cached, "output_tokens": usage.completion_tokens}


def _event(kind: str, **fields: Any) -> bytes:
    return event(encoded({"type": kind, **fields}), kind)


def _of_change(change: BlockChange) -> bytes:
    kind, index = change.block.kind, change.block.index
    match change.what:
        case Change.BEGIN:
            return _event("content_block_start", index=index, content_block=_empty(change.block))
        case Change.ADD:
            name, field = DELTAS[kind]
            return _event("content_block_delta", index=index, delta={"type": name, field: change.text})
    return _event("content_block_stop", index=index)


def _empty(block: Block) -> dict[str, Any]:
    if block.kind is Kind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""} if block.kind is Kind.REASONING else _text("")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _whole(block: Block) -> dict[str, Any]:
    match block.kind:
        case Kind.CALL:
            return {**_empty(block), "input": arguments_read(block.text, is_cut=block.is_cut)}
        case Kind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    return _text(block.text)


def arguments_read(text: str, *, is_cut: bool) -> dict[str, Any]:
    """The arguments of a call. For a cut call, the complete ones, as Anthropic's client parses a stream.

    Text that is not an object is returned under Anthropic's key INVALID_JSON.
    """
    try:
        value = from_json(text or "{}", allow_partial=is_cut)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
