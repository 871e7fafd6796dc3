"""Converts chunks, completions and models to protobuf.

Pure functions; `deploy.grpc.translate` goes the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from core.config import ServiceConfig
from core.records import (
    MODEL_SAMPLING,
    CallTrace,
    Chunk,
    GenerationRequest,
    ModelInfo,
    Receipt,
    Sampling,
    Timing,
    TokenLogprobs,
    Usage,
    VerifiedBlock,
)
from deploy.api import Served, speculation_fields
from deploy.grpc.translate import VERIFICATION_PREFIX
from deploy.receipts import receipt_fields
from orchestrator.policy import ControlReport
from protos.outrider.v1 import generation_pb2 as pb

Kind = TypeVar("Kind", bound=Message)


def to_chunk(chunk: Chunk, request: GenerationRequest, index: int, usage: Usage) -> pb.GenerateChunk:
    """One message of a stream: a chunk of sample `index`, with the usage of all samples."""
    return pb.GenerateChunk(
        index=index,
        request_id=request.request_id,
        text=chunk.text,
        token_ids=chunk.token_ids,
        guessed=chunk.is_guess,
        logprobs=_logprobs(chunk),
        prompt_logprobs=_prompt_logprobs([chunk], request),
        usage=_usage(usage),
        finish=_finish(chunk, request),
        trace=map(_call, chunk.trace),
        explanation=chunk.explanation,
    )


def to_response(
    chunks: Sequence[Sequence[Chunk]], requests: Sequence[GenerationRequest], usage: Usage
) -> pb.GenerateResponse:
    """A whole completion in one message; `chunks` are those of each sample."""
    first, *others = map(_sample, chunks, requests)
    return pb.GenerateResponse(
        request_id=requests[0].request_id,
        text=first.text,
        token_ids=first.token_ids,
        logprobs=first.logprobs,
        prompt_logprobs=_prompt_logprobs(chunks[0], requests[0]),
        usage=_usage(usage),
        finish=first.finish,
        trace=first.trace,
        explanation=first.explanation,
        samples=[first, *others] if others else (),
    )


def _sample(chunks: Sequence[Chunk], request: GenerationRequest) -> pb.Sample:
    """One sample. Its last chunk has the finish reason."""
    return pb.Sample(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in _logprobs(chunk)],
        finish=_finish(chunks[-1], request),
        trace=[_call(call) for chunk in chunks for call in chunk.trace],
        explanation=[line for chunk in chunks for line in chunk.explanation],
    )


def to_model_info(
    config: ServiceConfig, target: ModelInfo, draft: ModelInfo | None, defaults: Sampling, control: ControlReport
) -> pb.GetModelInfoResponse:
    """The served models, the defaults of unset fields, and the state of the policy."""
    return pb.GetModelInfoResponse(
        model=config.model_name,
        target=_alike(pb.ModelInfo, target),
        draft=_alike(pb.ModelInfo, draft) if draft is not None else None,
        max_draft_tokens=config.speculation.max_draft_tokens if draft is not None else 0,
        verification=VERIFICATION_PREFIX + config.speculation.verification.name,
        sampling_defaults=pb.SamplingParams(**{name: getattr(defaults, name) for name in MODEL_SAMPLING}),
        control=_alike(pb.ControlReport, control, sessions=control.num_sessions, changes=control.num_changes),
    )


def to_model_list(served: Sequence[Served]) -> pb.ListModelsResponse:
    """The models that requests can name."""
    return pb.ListModelsResponse(models=map(_listed, served))


def _listed(served: Served) -> pb.ListedModel:
    return pb.ListedModel(
        name=served.name,
        adapter_of=served.config.model_name if served.adapter is not None else "",
        max_context_tokens=served.context_tokens,
        vocab_size=served.target.vocab_size,
        has_draft=served.draft is not None,
    )


def _alike(kind: type[Kind], record: object, **others: Any) -> Kind:
    """A message with the fields of a record of the same names, except for `others`."""
    names = [name for name in kind.DESCRIPTOR.fields_by_name if name not in others]
    return kind(**{name: getattr(record, name) for name in names}, **others)


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens, cached_tokens=usage.cached_tokens
    )


def _logprobs(chunk: Chunk) -> list[pb.TokenLogprob]:
    if not chunk.logprobs:
        return []
    return [_logprob(token, logprobs) for token, logprobs in zip(chunk.token_ids, chunk.logprobs, strict=True)]


def _prompt_logprobs(chunks: Sequence[Chunk], request: GenerationRequest) -> list[pb.TokenLogprob]:
    found = [logprobs for chunk in chunks for logprobs in chunk.prompt_logprobs]
    tokens = request.prompt[1:] if found else ()  # copying a long prompt for each chunk is slow
    return [_logprob(token, logprobs) for token, logprobs in zip(tokens, found, strict=False)]


def _logprob(token_id: int, logprobs: TokenLogprobs) -> pb.TokenLogprob:
    top = [pb.AlternativeLogprob(token_id=other, logprob=logprob) for other, logprob in logprobs.top]
    return pb.TokenLogprob(token_id=token_id, logprob=logprobs.logprob, top=top)


def _finish(chunk: Chunk, request: GenerationRequest) -> pb.Finish | None:
    if chunk.finish_reason is None:
        return None
    matched = chunk.matched_stop
    return pb.Finish(
        reason=f"FINISH_REASON_{chunk.finish_reason.name}",
        stop=matched if isinstance(matched, str) else None,
        stop_token_id=matched if isinstance(matched, int) else None,
        seed=request.sampling.seed,
        speculation=pb.SpeculationStats(**speculation_fields(chunk.stats)) if chunk.stats is not None else None,
        receipt=_receipt(chunk.receipt) if chunk.receipt is not None else None,
        problem=str(chunk.problem or ""),
        score=chunk.score,
    )


def _receipt(receipt: Receipt) -> pb.Receipt:
    fields = receipt_fields(receipt)
    return pb.Receipt(
        **{
            **fields,
            "verification": VERIFICATION_PREFIX + receipt.request.verification.name,
            "sampling": _receipt_sampling(fields["sampling"]),
        }
    )


def _receipt_sampling(fields: Mapping[str, Any]) -> pb.SamplingParams:
    """Build the message from the receipt's JSON form, in which keys are strings and bad words are lists."""
    bias = {int(token_id): value for token_id, value in fields["logit_bias"].items()}
    words = [pb.TokenIds(ids=ids) for ids in fields["bad_word_ids"]]
    return pb.SamplingParams(**{**fields, "logit_bias": bias, "bad_word_ids": words})


def _call(trace: CallTrace) -> pb.CallTrace:
    return pb.CallTrace(
        call=f"CALL_{trace.call.name}",
        sent_s=trace.sent_s,
        received_s=trace.received_s,
        guesses=trace.num_guesses,
        used=trace.num_used,
        timing=_timing(trace.timing) if trace.timing is not None else None,
        verified=_verified(trace.verified) if trace.verified is not None else None,
    )


def _verified(block: VerifiedBlock) -> pb.VerifiedBlock:
    return _alike(pb.VerifiedBlock, block, token_ids=block.tokens, next_token_id=block.next_token)


def _timing(timing: Timing) -> pb.Timing:
    return _alike(pb.Timing, timing, passes=timing.num_passes, rows=timing.num_rows)
