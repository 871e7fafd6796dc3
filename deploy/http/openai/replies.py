"""From the core to bodies: chunks become the choices of OpenAI's objects, this project's own fields beside.

Knows the tokenizer, for the text of single tokens; must not know how a reply is sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from core.records import Chunk, FinishReason, TokenLogprobs, Usage
from deploy.api import Hosted, speculation_fields
from deploy.http.openai.bodies import CompletionBody, StreamOptions
from deploy.http.openai.chat_body import ChatBody
from deploy.http.openai.traced import traced_fields
from deploy.http.reply import OWNER, Reply, ReplyOrder, text_of
from deploy.http.wire import DONE, encoded, event
from deploy.receipts import receipt_fields


class ChoicesReply(Reply):
    """A reply with a choice for each sample."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    PIECE: ClassVar[str]
    """Names of the objects: of a whole reply, and of a piece of a stream."""

    def __init__(self, order: ReplyOrder) -> None:
        body = order.body
        assert isinstance(body, CompletionBody | ChatBody)
        options = body.stream_options or StreamOptions()
        self._begun: set[int] = set()
        self._requests = order.requests
        self._tokenizer = order.tokenizer
        self._has_token_ids = bool(body.return_token_ids)
        self._has_usage_at_end = bool(options.include_usage)
        self._has_usage_always = bool(options.continuous_usage_stats)
        self._head = {"id": self.PREFIX + order.request_id, "created": order.created_s, "model": order.model}
        if body.service_tier is not None:
            self._head["service_tier"] = body.tier_served
        self._usages: dict[int, Usage] = {}

    def piece(self, index: int, chunk: Chunk) -> bytes:
        self._usages[index] = chunk.usage
        choice = {"index": index, **self._delta(index, chunk), **self._common(index, [chunk])}
        if self._is_empty(choice, chunk):
            return b""
        usage = {"usage": self._usage() if self._has_usage_always else None} if self._has_usage_at_end else {}
        return event(encoded({**self._head, "object": self.PIECE, "choices": [choice], **usage}))

    def _is_empty(self, choice: Mapping[str, Any], chunk: Chunk) -> bool:
        """Whether nobody would miss the piece: its text is held back, as by a character that is not whole."""
        has_report = choice["finish_reason"] is not None or chunk.logprobs or choice.get("token_ids")
        has_text = any(choice["delta"].values()) if "delta" in choice else choice["text"]
        return not (has_text or has_report or "outrider" in choice or self._has_usage_always)

    def last_piece(self) -> bytes:
        if not self._has_usage_at_end:
            return DONE
        return event(encoded({**self._head, "object": self.PIECE, "choices": [], "usage": self._usage()})) + DONE

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        self._usages = {index: each[-1].usage for index, each in enumerate(chunks)}
        choices = [
            {"index": index, **self._message(index, each), **self._common(index, each)}
            for index, each in enumerate(chunks)
        ]
        return {**self._head, "object": self.WHOLE, "choices": choices, "usage": self._usage()}

    @abstractmethod
    def _delta(self, index: int, chunk: Chunk) -> dict[str, Any]: ...

    @abstractmethod
    def _message(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]: ...

    def _finish_reason(self, index: int, reason: FinishReason) -> str:  # noqa: ARG002
        return reason.value

    @abstractmethod
    def _logprobs(
        self, index: int, tokens: Sequence[tuple[int, TokenLogprobs]], scored: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Of tokens of the output, and of those of the prompt but its first, which come with the first piece."""

    def _common(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """What choices have in all forms, whole or in pieces."""
        last = chunks[-1]
        tokens = [
            pair for chunk in chunks if chunk.logprobs for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)
        ]
        scored = [each for chunk in chunks for each in chunk.prompt_logprobs]
        asked = self._requests[index].num_logprobs is not None
        fields: dict[str, Any] = {
            "logprobs": self._logprobs(index, tokens, scored) if asked else None,
            "finish_reason": None,
        }
        if self._has_token_ids:
            fields["token_ids"] = [token_id for chunk in chunks for token_id in chunk.token_ids]
        if last.finish_reason is not None:
            fields["finish_reason"] = self._finish_reason(index, last.finish_reason)
            fields["stop_reason"] = last.matched_stop
            fields["outrider"] = self._outrider(index, last)
        if explanation := [line for chunk in chunks for line in chunk.explanation]:
            fields["outrider"] = {**fields.get("outrider", {}), "explanation": explanation}
        if self._requests[index].wants_trace:
            traced = traced_fields(chunks, self._text)
            fields["outrider"] = {**fields.get("outrider", {}), **traced}
        return fields

    def _outrider(self, index: int, last: Chunk) -> dict[str, Any]:
        """By what seed the output can be repeated, what speculation did for it, and the receipt if asked for."""
        stats = speculation_fields(last.stats) if last.stats is not None else None
        receipt = {"receipt": receipt_fields(last.receipt)} if last.receipt is not None else {}
        return {"seed": self._requests[index].sampling.seed, "speculation": stats, **receipt}

    def _usage(self) -> dict[str, Any]:
        """Of all samples so far; they share one prompt."""
        usages = self._usages.values()
        prompt = max((usage.prompt_tokens for usage in usages), default=0)
        output = sum(usage.completion_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": min((usage.cached_tokens for usage in usages), default=0)},
        }

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=True)

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """One token as it reads alone, and its bytes."""
        if not self._tokenizer.is_byte_level:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text, text.encode()
        content = self._tokenizer.token_bytes(token_id)
        return content.decode("utf-8", "replace"), content


class CompletionReply(ChoicesReply):
    """Of /v1/completions."""

    PREFIX = "cmpl-"
    WHOLE = PIECE = "text_completion"

    def __init__(self, order: ReplyOrder) -> None:
        super().__init__(order)
        assert isinstance(order.body, CompletionBody)
        self._num_chars = [0] * len(self._requests)
        self._echoed: str | None = None
        """The prompt, where the output is to follow it."""
        if order.body.echo:
            prompt = order.body.prompt
            self._echoed = prompt if isinstance(prompt, str) else self._tokenizer.decode(self._requests[0].prompt)

    def _delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        is_first = index not in self._begun
        self._begun.add(index)
        return self._message(index, [chunk]) if is_first else {"text": chunk.text}

    def _message(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:  # noqa: ARG002
        return {"text": (self._echoed or "") + text_of(chunks)}

    def _logprobs(
        self, index: int, tokens: Sequence[tuple[int, TokenLogprobs]], scored: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """The prompt's first token follows nothing, and has none."""
        all_tokens: list[tuple[int, TokenLogprobs | None]] = [*tokens]
        is_first = self._num_chars[index] == 0
        if self._echoed is not None and is_first:
            all_tokens[:0] = zip(self._requests[index].prompt, (None, *scored), strict=True)
        names = [self._name(token_id) for token_id, _ in all_tokens]
        offsets = []
        for name in names:
            offsets.append(self._num_chars[index])
            self._num_chars[index] += len(name)
        return {
            "tokens": names,
            "token_logprobs": [each and each.logprob for _, each in all_tokens],
            "top_logprobs": [each and {self._name(i): logprob for i, logprob in each.top} for _, each in all_tokens],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        """The token's text; its bytes, as OpenAI writes them, where they are no text: names must tell tokens apart."""
        text, content = self._token(token_id)
        is_text = text.encode("utf-8", "replace") == content
        return text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def model_card(model: Hosted, created_s: int) -> dict[str, Any]:
    """One entry of /v1/models, for the clients of both APIs."""
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
    by_openai = {"object": "model", "created": created_s, "owned_by": OWNER}
    by_anthropic = {"type": "model", "display_name": model.name, "created_at": created_at}
    return {"id": model.name, **by_openai, **by_anthropic, "max_model_len": model.served.context_tokens}
