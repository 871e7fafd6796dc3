"""The output sent to a client: where it ends, and how text, ids, logprobs and usage are cut there together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import InvalidRequest
from core.records import Chunk, FinishReason, GenerationRequest, TokenLogprobs, Usage
from orchestrator.text import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class _Ending:
    num_kept: int
    reason: FinishReason
    matched: str | int | None = None


class Output:
    """The growing output of one completion.

    Invariant: nothing may be committed after `commit` returns a chunk with a finish reason.
    """

    def __init__(
        self, request: GenerationRequest, eos_token_ids: frozenset[int], detokenizer: IncrementalDetokenizer
    ) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._eos_token_ids = frozenset() if request.ignore_eos else eos_token_ids
        self._ending_ids = self._eos_token_ids | request.stop_token_ids
        self.num_tokens = 0
        self.is_finished = False
        self._num_cached: int | None = None

    @property
    def num_remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self._request.max_tokens - self.num_tokens

    def found_cached(self, num_tokens: int) -> None:
        """Record the number of prompt and resumed tokens found in the target's cache. Only the first call counts."""
        if self._num_cached is None:
            self._num_cached = min(num_tokens, len(self._request.prompt))

    def commit(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> Chunk:
        """Return the chunk for a verdict's tokens: accepted guesses and the target's own token, cut at the stream's
        end."""
        assert not self.is_finished, "a finished output takes no more tokens"
        return self._take(token_ids, logprobs, prompt_logprobs, is_resumed=False)

    def resume(self, token_ids: Sequence[int]) -> Chunk | None:
        """Add output that the client already has. Return a chunk only if that output is complete."""
        chunk = self._take(tuple(token_ids), (), (), is_resumed=True)
        return chunk if self.is_finished else None

    def cut_short(self, problem: InvalidRequest) -> Chunk:
        """Return the last chunk of an output that has begun and cannot go on."""
        assert not self.is_finished, "a finished output takes no more tokens"
        self.is_finished = True
        last = self._detokenizer.finish()
        return Chunk(
            text=last.text,
            token_ids=(),
            is_guess=(),
            usage=self._usage,
            finish_reason=FinishReason.LENGTH if last.stop is None else FinishReason.STOP,
            matched_stop=last.stop,
            problem=problem if last.stop is None else None,
        )

    @property
    def _usage(self) -> Usage:
        return Usage(len(self._request.prompt), self.num_tokens, self._num_cached or 0)

    def _take(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
        *,
        is_resumed: bool,
    ) -> Chunk:
        ending = self._find_ending(token_ids)
        num_kept = ending.num_kept if ending else len(token_ids)
        text, stop_match = self._detokenize(token_ids[:num_kept], ending)
        ending = stop_match or ending
        num_kept = ending.num_kept if ending else num_kept
        self.num_tokens += num_kept
        self.is_finished = ending is not None
        num_shown = 0 if is_resumed else num_kept
        return Chunk(
            text="" if is_resumed else text,
            token_ids=token_ids[:num_shown],
            is_guess=tuple([index < len(token_ids) - 1 for index in range(num_shown)]),
            logprobs=logprobs[:num_shown],
            prompt_logprobs=prompt_logprobs,
            usage=self._usage,
            finish_reason=ending.reason if ending else None,
            matched_stop=ending.matched if ending else None,
        )

    def _find_ending(self, token_ids: Sequence[int]) -> _Ending | None:
        """Find the first token that ends the stream by its id or by count. The detokenizer finds stop strings."""
        num_remaining = self.num_remaining
        for num, token in enumerate(token_ids, 1):
            if token in self._ending_ids:
                matched = token if token in self._request.stop_token_ids else None
                return _Ending(num, FinishReason.STOP, matched)
            if num == num_remaining:
                return _Ending(num, FinishReason.LENGTH)
        return None

    def _detokenize(self, token_ids: Sequence[int], ending: _Ending | None) -> tuple[str, _Ending | None]:
        """Return the text of the tokens, and an earlier ending if a stop string cuts them shorter."""
        is_stopped = ending is not None and ending.reason is FinishReason.STOP
        shown = token_ids[:-1] if is_stopped and not self._request.include_stop else token_ids
        piece = self._detokenizer.push(shown)
        if piece.stop is not None:
            return piece.text, _Ending(piece.num_kept, FinishReason.STOP, piece.stop)
        if ending is None:
            return piece.text, None
        last = self._detokenizer.finish()
        stop_match = _Ending(len(token_ids), FinishReason.STOP, last.stop) if last.stop is not None else None
        return piece.text + last.text, stop_match
