"""From the core to bodies: chunks become the choices of OpenAI's objects, this project's own fields beside.

Knows the tokenizer, for the text of single tokens; must not know how a reply is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from core.records import Chunk, GenerationRequest, TokenLogprobs, Usage
from deploy.api import Hosted, speculation_fields
from orchestrator.text import Tokenizer

OWNER = "outrider"


class Reply(ABC):
    """One reply, to `requests` that are samples of one prompt. An instance counts what it has written."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    PIECE: ClassVar[str]
    """Names of the objects: of a whole reply, and of a piece of a stream."""

    def __init__(
        self,
        model: str,
        requests: Sequence[GenerationRequest],
        tokenizer: Tokenizer,
        created_s: int,
        *,
        has_token_ids: bool = False,
        has_usage_at_end: bool = False,
        has_usage_always: bool = False,
        echoed: str | None = None,
    ) -> None:
        """`echoed` is the prompt, where the output is to follow it."""
        self._echoed = echoed
        self._begun: set[int] = set()
        self._requests = requests
        self._tokenizer = tokenizer
        self._has_token_ids = has_token_ids
        self._has_usage_at_end = has_usage_at_end
        self._has_usage_always = has_usage_always
        self._head = {"id": self.PREFIX + requests[0].request_id, "created": created_s, "model": model}
        self._usages: dict[int, Usage] = {}

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """One event of a stream."""
        self._usages[index] = chunk.usage
        choice = {"index": index, **self._delta(index, chunk), **self._common(index, [chunk])}
        usage = {"usage": self._usage() if self._has_usage_always else None} if self._has_usage_at_end else {}
        return {**self._head, "object": self.PIECE, "choices": [choice], **usage}

    def last_piece(self) -> dict[str, Any] | None:
        """What follows when all samples have ended, if it was asked for."""
        if not self._has_usage_at_end:
            return None
        return {**self._head, "object": self.PIECE, "choices": [], "usage": self._usage()}

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """The reply at once; `chunks` are those of each sample."""
        self._usages = {index: each[-1].usage for index, each in enumerate(chunks)}
        choices = [
            {"index": index, **self._message("".join(chunk.text for chunk in each)), **self._common(index, each)}
            for index, each in enumerate(chunks)
        ]
        return {**self._head, "object": self.WHOLE, "choices": choices, "usage": self._usage()}

    @abstractmethod
    def _delta(self, index: int, chunk: Chunk) -> dict[str, Any]: ...

    @abstractmethod
    def _message(self, text: str) -> dict[str, Any]: ...

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
            fields["finish_reason"] = last.finish_reason.value
            fields["stop_reason"] = last.matched_stop
            fields["outrider"] = self._outrider(index, last)
        return fields

    def _outrider(self, index: int, last: Chunk) -> dict[str, Any]:
        """By what seed the output can be repeated, and what speculation did for it."""
        stats = speculation_fields(last.stats) if last.stats is not None else None
        return {"seed": self._requests[index].sampling.seed, "speculation": stats}

    def _usage(self) -> dict[str, int]:
        """Of all samples so far; they share one prompt."""
        prompt = max((usage.prompt_tokens for usage in self._usages.values()), default=0)
        output = sum(usage.completion_tokens for usage in self._usages.values())
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """One token as it reads alone, and its bytes."""
        if not self._tokenizer.is_byte_level:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text, text.encode()
        content = self._tokenizer.token_bytes(token_id)
        return content.decode("utf-8", "replace"), content


class CompletionReply(Reply):
    """Of /v1/completions."""

    PREFIX = "cmpl-"
    WHOLE = PIECE = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_chars = [0] * len(self._requests)

    def _delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        is_first = index not in self._begun
        self._begun.add(index)
        return self._message(chunk.text) if is_first else {"text": chunk.text}

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": (self._echoed or "") + text}

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


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    PREFIX = "chatcmpl-"
    WHOLE = "chat.completion"
    PIECE = "chat.completion.chunk"

    def _delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        return {"delta": {**role, "content": chunk.text}}

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(  # offsets alone need the index
        self,
        index: int,  # noqa: ARG002
        tokens: Sequence[tuple[int, TokenLogprobs]],
        scored: Sequence[TokenLogprobs],  # noqa: ARG002
    ) -> dict[str, Any]:
        content = [
            {**self._entry(token_id, each.logprob), "top_logprobs": [self._entry(*other) for other in each.top]}
            for token_id, each in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, content = self._token(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(content)}


def model_card(model: Hosted, created_s: int) -> dict[str, Any]:
    """One entry of /v1/models."""
    length = model.served.context_tokens
    return {"id": model.name, "object": "model", "created": created_s, "owned_by": OWNER, "max_model_len": length}
