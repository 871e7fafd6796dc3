"""Makes receipts, and their fields under the proto's names.

Knows requests, models and digests; must not know messages, bodies or sessions. A receipt contains digests in place of
prompt and output; they still allow to check a guess of a short text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from core.records import GIVEN_SAMPLING, Adapter, Chunk, GenerationRequest, Grammar, ModelInfo, Receipt, Sampling

DIGEST = "sha256"


class ReceiptMaker:
    """Follows one output, and makes its receipt."""

    def __init__(
        self, request: GenerationRequest, model: str, target: ModelInfo, draft: ModelInfo | None, tokenizer_digest: str
    ) -> None:
        self._receipt = Receipt(
            version=outrider_version(),
            model=model,
            target=target,
            draft=draft,
            tokenizer_digest=tokenizer_digest,
            request=request,
            prompt_digest=digest_of_tokens(request.prompt),
            output_digest="",
            num_output_tokens=0,
        )
        self._output = hashlib.sha256(_bytes_of(request.resume_tokens))
        self._num_tokens = len(request.resume_tokens)

    def observe(self, chunk: Chunk) -> Chunk:
        """Add a chunk to the receipt; returns the chunk, the last one with the receipt."""
        self._output.update(_bytes_of(chunk.token_ids))
        self._num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is None:
            return chunk
        output = f"{DIGEST}:{self._output.hexdigest()}"
        receipt = replace(self._receipt, output_digest=output, num_output_tokens=self._num_tokens)
        return replace(chunk, receipt=receipt)


def digest_of_tokens(token_ids: Iterable[int]) -> str:
    """SHA-256 over the ids, each as four bytes, little-endian."""
    return f"{DIGEST}:{hashlib.sha256(_bytes_of(token_ids)).hexdigest()}"


def _bytes_of(token_ids: Iterable[int]) -> bytes:
    return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)


@lru_cache(64)
def fingerprint(target: ModelInfo, tokenizer_digest: str, adapter: Adapter | None = None) -> str:
    """Fingerprint of all that determines outputs besides the request: it changes when outputs may change."""
    parts = [target.digest, target.dtype, target.arithmetic, tokenizer_digest, outrider_version()]
    if adapter is not None:
        parts.append(adapter.digest)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


@cache  # looking it up takes a third of a millisecond
def outrider_version() -> str:
    """Version of the installed distribution; "unknown" if there is none."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "unknown"


def receipt_fields(receipt: Receipt) -> dict[str, Any]:
    """The fields of the proto's Receipt as JSON has them: numbers, texts, lists and objects; absent where unset."""
    request = receipt.request
    fields: dict[str, Any] = {
        "version": receipt.version,
        "model": receipt.model,
        "target": _model_fields(receipt.target),
        "tokenizer_digest": receipt.tokenizer_digest,
        "prompt_digest": receipt.prompt_digest,
        "prompt_tokens": len(request.prompt),
        "output_digest": receipt.output_digest,
        "output_tokens": receipt.num_output_tokens,
        "sampling": _sampling_fields(request.sampling),
        "stopping": _stopping_fields(request),
        "verification": str(request.verification),
        "depends_on_guesses": request.depends_on_guesses,
        "structured_output_digest": _grammar_digest(request.grammar) if request.grammar is not None else "",
        "adapter_digest": request.adapter.digest if request.adapter is not None else "",
    }
    if request.rule.takes_lenience:
        fields["lenience"] = request.lenience
    if receipt.draft is not None:
        fields["draft"] = _model_fields(receipt.draft)
    return fields


def _model_fields(info: ModelInfo) -> dict[str, Any]:
    names = ("name", "digest", "architecture", "dtype", "device", "arithmetic")
    fields: dict[str, Any] = {name: getattr(info, name) for name in names}
    return {**fields, "layers": list(info.layers), "deterministic": info.is_deterministic}


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    return {
        **{name: getattr(sampling, name) for name in GIVEN_SAMPLING},
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias},
        "allowed_token_ids": list(sampling.allowed_token_ids),
        "bad_words": [],  # they are among the next
        "bad_word_ids": [list(word) for word in sampling.bad_words],
    }


def _stopping_fields(request: GenerationRequest) -> dict[str, Any]:
    return {
        "max_tokens": request.max_tokens,
        "min_tokens": request.sampling.min_tokens,
        "stop": list(request.stop),
        "stop_token_ids": sorted(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "include_stop": request.include_stop,
    }


def _grammar_digest(grammar: Grammar) -> str:
    text = f"{grammar.kind}\n{grammar.text}"
    return f"{DIGEST}:{hashlib.sha256(text.encode()).hexdigest()}"
