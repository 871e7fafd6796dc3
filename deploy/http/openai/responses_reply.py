"""The reply to /v1/responses, as one object or as a stream of typed events.

Knows OpenAI's events; must not know how a reply is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.records import Chunk, FinishReason, Usage
from deploy.http.failures import Failure
from deploy.http.openai.responses_body import ResponsesBody
from deploy.http.output import Block, BlockChange, Blocks, Change, Kind
from deploy.http.reply import Reply, ReplyOrder, usage_of
from deploy.http.wire import encoded, event

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
PREFIXES: Mapping[Kind, str] = {Kind.TEXT: "msg_", Kind.REASONING: "rs_", Kind.CALL: "fc_"}


class ResponsesReply(Reply):
    def __init__(self, order: ReplyOrder) -> None:
        assert isinstance(order.body, ResponsesBody)
        self._body = order.body
        self._order = order
        self._id = f"resp_{order.request_id}"
        self._blocks = Blocks(order.reading, "call_")
        self._num_events = 0
        self._chunks: list[Chunk] = []

    def piece(self, index: int, chunk: Chunk) -> bytes:  # noqa: ARG002 - there is only one sample
        events = [] if self._chunks else [self._state("created"), self._state(IN_PROGRESS)]
        self._chunks = [chunk]
        return b"".join([*events, *(data for change in self._changes(chunk) for data in self._events(change))])

    def last_piece(self) -> bytes:
        return self._state(self._status)

    def failing(self, failure: Failure) -> bytes:
        self._blocks.cut()
        return self._state(FAILED, error={"code": "server_error", "message": failure.message})

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> Mapping[str, Any]:
        for chunk in chunks[0]:
            self._changes(chunk)
        self._chunks = [chunks[0][-1]]
        return self._response(self._status)

    def _changes(self, chunk: Chunk) -> list[BlockChange]:
        changes = self._blocks.feed(chunk.text, chunk.finish_reason)
        if self._blocks.all or chunk.finish_reason is None:
            return changes
        return self._blocks.add_empty(is_cut=chunk.finish_reason is FinishReason.LENGTH)

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._chunks[-1].finish_reason is FinishReason.LENGTH else COMPLETED

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": f"response.{kind}", "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(encoded(content), f"response.{kind}")

    def _state(self, kind: str, error: Mapping[str, Any] | None = None) -> bytes:
        status = IN_PROGRESS if kind == "created" else kind
        return self._event(kind, response=self._response(status, error))

    def _events(self, change: BlockChange) -> list[bytes]:
        location = {"item_id": self._item_id(change.block), "output_index": change.block.index}
        if change.block.kind is Kind.CALL:
            return self._call_events(change, location)
        of_part = {**location, "content_index": 0}
        name = "output_text" if change.block.kind is Kind.TEXT else "reasoning_text"
        extra: dict[str, Any] = {"logprobs": []} if change.block.kind is Kind.TEXT else {}
        match change.what:
            case Change.BEGIN:
                part = _part(change.block.kind, "")
                return [self._item_event("added", change), self._event("content_part.added", **of_part, part=part)]
            case Change.ADD:
                return [self._event(f"{name}.delta", **of_part, delta=change.text, **extra)]
        part = _part(change.block.kind, change.block.text)
        return [
            self._event(f"{name}.done", **of_part, text=change.block.text, **extra),
            self._event("content_part.done", **of_part, part=part),
            self._item_event("done", change),
        ]

    def _call_events(self, change: BlockChange, location: Mapping[str, Any]) -> list[bytes]:
        name = "function_call_arguments"
        match change.what:
            case Change.BEGIN:
                return [self._item_event("added", change)]
            case Change.ADD:
                return [self._event(f"{name}.delta", **location, delta=change.text)]
        done = self._event(f"{name}.done", **location, name=change.block.name, arguments=change.block.text)
        return [done, self._item_event("done", change)]

    def _item_event(self, what: str, change: BlockChange) -> bytes:
        item = self._item(change.block) if what == "done" else self._begun(change.block)
        return self._event(f"output_item.{what}", output_index=change.block.index, item=item)

    def _item_id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}{self._order.request_id}_{block.index}"

    def _begun(self, block: Block) -> dict[str, Any]:
        """The item of a block at its beginning, without the content that its deltas add later."""
        item = {**self._item(block), "status": IN_PROGRESS}
        return {**item, "arguments": ""} if block.kind is Kind.CALL else {**item, "content": []}

    def _item(self, block: Block) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": INCOMPLETE if block.is_cut else COMPLETED}
        if block.kind is Kind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        content = [_part(block.kind, block.text)]
        if block.kind is Kind.REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _response(self, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        is_over = status != IN_PROGRESS
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._order.created_s,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "model": self._order.model,
            "output": [self._item(block) for block in self._blocks.all] if is_over else [],
            "usage": self._usage() if is_over else None,
            **self._asked(),
        }

    def _asked(self) -> dict[str, Any]:
        """The request's own fields, which OpenAI's API repeats in the reply."""
        given = self._body.model_dump(
            mode="json",
            by_alias=True,
            exclude_unset=True,
            include={"instructions", "metadata", "user", "text", "tools", "tool_choice", "parallel_tool_calls"},
        )
        sampling = self._order.requests[0].sampling
        defaults: dict[str, Any] = {
            "instructions": None,
            "metadata": {},
            "text": {"format": {"type": "text"}},
            "tools": [],
        }
        defaults |= {"tool_choice": "auto", "parallel_tool_calls": True}
        return {
            **defaults,
            **{name: value for name, value in given.items() if value is not None},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": self._order.requests[0].max_tokens,
            "service_tier": self._body.tier_served,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "reasoning": {
                "effort": (self._body.effort_asked or (None, None))[1],
                "summary": self._body.reasoning and self._body.reasoning.summary,
            },
            "truncation": "disabled",
            "outrider": {"seed": sampling.seed},
        }

    def _usage(self) -> dict[str, Any]:
        usage: Usage = usage_of(self._chunks, self._order.requests[0])
        thoughts = self._blocks.text(Kind.REASONING)
        num_encoded = len(self._order.tokenizer.encode(thoughts, add_special_tokens=False)) if thoughts else 0
        num_thoughts = min(num_encoded, usage.completion_tokens)  # the model may have used fewer tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_thoughts},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
