"""Converts chunks to the choices of OpenAI's objects, with this project's own fields.

Knows the tokenizer, for the text of single tokens; must not know how a reply is sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from statistics import mean
from typing import Any, ClassVar

from core.records import Chunk, FinishReason, TokenLogprobs, Usage
from deploy.api import Hosted, speculation_fields
from deploy.http.openai.bodies import CompletionBody, StreamOptions
from deploy.http.openai.chat_body import ChatBody
from deploy.http.openai.traced import traced_fields
from deploy.http.reply import OWNER, Reply, ReplyOrder
from deploy.http.wire import DONE, encoded, event
from deploy.receipts import receipt_fields


class ChoicesReply(Reply):
    """A reply with one choice for each sample."""

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    PIECE: ClassVar[str]
    """`WHOLE` and `PIECE`: values of `object` in a whole reply and in a piece of a stream."""

    def __init__(self, order: ReplyOrder) -> None:
        body = order.body
        assert isinstance(body, CompletionBody | ChatBody)
        options = body.stream_options or StreamOptions()
        self._begun: set[int] = set()
        self._requests = order.requests
        self._num_samples = body.num_samples or 1
        """Number of samples of each prompt."""
        self._num_choices = body.n or 1
        """Number of choices of each prompt: of its samples, or of its best ones."""
        self._has_logprobs = body.num_logprobs is not None
        self._named = order.named
        self._tokenizer = order.tokenizer
        self._has_token_ids = bool(body.return_token_ids)
        self._has_prompt_logprobs = body.prompt_logprobs is not None
        self._has_usage_at_end = bool(options.include_usage)
        self._has_usage_always = bool(options.continuous_usage_stats)
        self._head = {
            "id": self.PREFIX + order.request_id,
            "created": order.created_s,
            "model": order.model,
            "system_fingerprint": order.fingerprint,
        }
        if body.service_tier is not None:
            self._head["service_tier"] = body.tier_served
        self._usages: dict[int, Usage] = {}

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """The event of a chunk; empty if the chunk has nothing to report yet."""
        is_first = index not in self._begun
        self._begun.add(index)
        self._usages[index] = chunk.usage
        delta = self._delta(index, chunk, is_first=is_first)
        choice = {"index": index, **delta, **self._common(index, [chunk], is_first=is_first)}
        if not (is_first or self._has_usage_always or _has_content(choice, chunk)):
            return b""
        usage = {"usage": self._usage() if self._has_usage_always else None} if self._has_usage_at_end else {}
        of_prompt = self._of_prompt([chunk]) if is_first and not index else {}
        return event(encoded({**self._head, "object": self.PIECE, "choices": [choice], **usage, **of_prompt}))

    def last_piece(self) -> bytes:
        if not self._has_usage_at_end:
            return DONE
        return event(encoded({**self._head, "object": self.PIECE, "choices": [], "usage": self._usage()})) + DONE

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        self._usages = {index: each[-1].usage for index, each in enumerate(chunks)}
        choices = [
            {"index": number, **self._message(index, each), **self._common(index, each, is_first=True)}
            for number, (index, each) in enumerate((index, chunks[index]) for index in self._chosen(chunks))
        ]
        of_prompt = self._of_prompt(chunks[0])
        return {**self._head, "object": self.WHOLE, "choices": choices, "usage": self._usage(), **of_prompt}

    def _chosen(self, chunks: Sequence[Sequence[Chunk]]) -> Sequence[int]:
        """The samples to return: all, or those of each prompt with the largest mean log probability, best first."""
        size, count = self._num_samples, self._num_choices
        if count == size:
            return range(len(chunks))
        prompts = [range(first, first + size) for first in range(0, len(chunks), size)]
        return [
            index
            for samples in prompts
            for index in sorted(samples, key=lambda index: -_mean_logprob(chunks[index]))[:count]
        ]

    def _of_prompt(self, chunks: Sequence[Chunk]) -> dict[str, Any]:  # noqa: ARG002
        """Top-level fields about the prompt, for the first object."""
        return {}

    @abstractmethod
    def _delta(self, index: int, chunk: Chunk, *, is_first: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _message(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]: ...

    def _finish_reason(self, index: int, reason: FinishReason) -> str:  # noqa: ARG002
        return reason.value

    @abstractmethod
    def _logprobs(self, index: int, chunks: Sequence[Chunk], *, is_first: bool) -> dict[str, Any]: ...

    def _common(self, index: int, chunks: Sequence[Chunk], *, is_first: bool) -> dict[str, Any]:
        """Fields of a choice that are the same in all forms, whole or in pieces."""
        last = chunks[-1]
        fields: dict[str, Any] = {
            "logprobs": self._logprobs(index, chunks, is_first=is_first) if self._has_logprobs else None,
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
        """The seed that repeats the output, statistics of speculation, and the receipt if requested."""
        stats = speculation_fields(last.stats) if last.stats is not None else None
        receipt = {"receipt": receipt_fields(last.receipt)} if last.receipt is not None else {}
        problem = {"problem": str(self._named(last.problem))} if last.problem is not None else {}
        score = {"score": last.score} if last.score is not None else {}
        return {"seed": self._requests[index].sampling.seed, "speculation": stats, **receipt, **problem, **score}

    def _usage(self) -> dict[str, Any]:
        """Usage so far. Each prompt counts once, with the smallest number of cached tokens among its samples."""
        usages: dict[int, list[Usage]] = {}
        for index, usage in self._usages.items():
            usages.setdefault(index // self._num_samples, []).append(usage)
        prompt = sum(max(usage.prompt_tokens for usage in each) for each in usages.values())
        output = sum(usage.completion_tokens for usage in self._usages.values())
        cached = sum(min(usage.cached_tokens for usage in each) for each in usages.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _prompt_logprobs(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Log probabilities of one prompt in vLLM's form, if requested; they come with its first sample."""
        scored = [each for chunk in chunks for each in chunk.prompt_logprobs]
        if not (self._has_prompt_logprobs and scored):
            return {}
        tokens = zip(self._requests[index].prompt[1:], scored, strict=True)
        return {"prompt_logprobs": [None, *(self._ranked(*each) for each in tokens)]}

    def _ranked(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """Log probabilities and ranks by token id. The rank is null for a token outside the most probable ones."""
        ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(logprobs.top, 1)}
        return {
            str(each): {"logprob": logprob, "rank": rank, "decoded_token": self._token(each)[0]}
            for each, (logprob, rank) in {token_id: (logprobs.logprob, None), **ranked}.items()
        }

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=True)

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """A token's text by itself, and its bytes."""
        if not self._tokenizer.is_byte_level:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text, text.encode()
        content = self._tokenizer.token_bytes(token_id)
        return content.decode("utf-8", "replace"), content


def scored_tokens(chunks: Sequence[Chunk]) -> Iterator[tuple[int, TokenLogprobs]]:
    """The output's tokens with their log probabilities, if requested."""
    for chunk in chunks:
        if chunk.logprobs:
            yield from zip(chunk.token_ids, chunk.logprobs, strict=True)


def _mean_logprob(chunks: Sequence[Chunk]) -> float:
    logprobs = [each.logprob for _, each in scored_tokens(chunks)]
    return mean(logprobs) if logprobs else -inf


def _has_content(choice: Mapping[str, Any], chunk: Chunk) -> bool:
    """Whether a piece has any content. It may have none, because text may lag behind the tokens."""
    names = ("text", "delta", "finish_reason", "token_ids", "outrider", "prompt_logprobs")
    return any(choice.get(name) for name in names) or bool(choice["logprobs"] and chunk.token_ids)


def model_card(model: Hosted, created_s: int) -> dict[str, Any]:
    """One entry of /v1/models, for clients of both APIs."""
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
    by_openai = {"object": "model", "created": created_s, "owned_by": OWNER}
    by_anthropic = {"type": "model", "display_name": model.name, "created_at": created_at}
    parent = {"parent": model.served.config.model_name} if model.served.adapter is not None else {}
    return {"id": model.name, **by_openai, **by_anthropic, **parent, "max_model_len": model.served.context_tokens}
