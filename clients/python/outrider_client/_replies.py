"""Converts protobuf messages to records. Pure functions; a record's fields have the names of its message's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, get_args

from google.protobuf.message import Message

from outrider_client._proto import generation_pb2 as pb
from outrider_client.records import (
    Call,
    CallTrace,
    Chunk,
    Completion,
    Control,
    Finish,
    FinishReason,
    ListedModel,
    Model,
    ModelInfo,
    Sample,
    SamplingDefaults,
    Source,
    Speculation,
    Timing,
    TokenLogprob,
    Unknown,
    Usage,
    Verification,
    VerifiedBlock,
)

Record = TypeVar("Record")
Name = TypeVar("Name", bound=str)

_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_VERIFICATIONS: dict[int, Verification] = {
    pb.Verification.Value(f"VERIFICATION_{name.upper()}"): name for name in get_args(Verification)
}
_CALLS: dict[int, Call] = {
    pb.CALL_VERIFY: "verify",
    pb.CALL_BLOCK: "block",
    pb.CALL_GROWTH: "growth",
    pb.CALL_PREFILL: "prefill",
}


def to_chunk(message: pb.GenerateChunk) -> Chunk:
    """One piece of a stream."""
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        guessed=tuple(message.guessed),
        logprobs=tuple(_logprob(logprob) for logprob in message.logprobs),
        usage=_record(Usage, message.usage),
        finish=_finish(message.finish) if message.HasField("finish") else None,
        trace=tuple(_call(call) for call in message.trace),
        index=message.index,
        prompt_logprobs=tuple(_logprob(logprob) for logprob in message.prompt_logprobs),
        explanation=tuple(message.explanation),
    )


def to_completion(chunks: Sequence[Chunk], request_id: str, num_calls: int) -> Completion:
    """The completion that the chunks of a finished stream add up to."""
    indices = sorted({chunk.index for chunk in chunks})
    samples = tuple(_sample([chunk for chunk in chunks if chunk.index == index]) for index in indices)
    first = {field.name: getattr(samples[0], field.name) for field in fields(Sample)}
    return Completion(
        **first,
        usage=chunks[-1].usage,
        request_id=request_id,
        num_calls=num_calls,
        samples=samples,
        prompt_logprobs=_joined(chunk.prompt_logprobs for chunk in chunks),
    )


def _sample(chunks: Sequence[Chunk]) -> Sample:
    finish = chunks[-1].finish
    assert finish is not None, "a stream without a last chunk raises"
    return Sample(
        text="".join(chunk.text for chunk in chunks),
        token_ids=_joined(chunk.token_ids for chunk in chunks),
        guessed=_joined(chunk.guessed for chunk in chunks),
        logprobs=_joined(chunk.logprobs for chunk in chunks),
        finish=finish,
        trace=_joined(chunk.trace for chunk in chunks),
        explanation=_joined(chunk.explanation for chunk in chunks),
    )


def to_models(message: pb.ListModelsResponse) -> tuple[ListedModel, ...]:
    """The served models. The first is the default."""
    return tuple(_record(ListedModel, model) for model in message.models)


def to_model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    """A served target and its draft."""
    return ModelInfo(
        model=message.model,
        target=_record(Model, message.target),
        draft=_record(Model, message.draft) if message.HasField("draft") else None,
        max_draft_tokens=message.max_draft_tokens,
        verification=_named(_VERIFICATIONS, message.verification),
        sampling_defaults=_record(SamplingDefaults, message.sampling_defaults),
        control=_record(Control, message.control) if message.HasField("control") else None,
    )


def _finish(message: pb.Finish) -> Finish:
    matched = message.WhichOneof("matched")
    return Finish(
        reason=_named(_REASONS, message.reason),
        matched=getattr(message, matched) if matched else None,
        seed=message.seed,
        speculation=_speculation(message.speculation) if message.HasField("speculation") else None,
        receipt=_json(message.receipt) if message.HasField("receipt") else None,
        problem=message.problem or None,
        score=message.score if message.HasField("score") else None,
    )


def _named(names: Mapping[int, Name], number: int) -> Name | Unknown:
    """The name of an enum's value; "unknown" for a value of a newer server, which must not break the stream."""
    return names.get(number, "unknown")


def _json(message: Message) -> dict[str, Any]:
    """The JSON form of HTTP replies: field names of the proto, verifications in lower case, ids as lists."""
    present = [field for field in message.DESCRIPTOR.fields if not field.has_presence or message.HasField(field.name)]
    return {field.name: _json_value(field.name, getattr(message, field.name)) for field in present}


def _json_value(name: str, value: Any) -> Any:
    if name == "verification":
        return _named(_VERIFICATIONS, value)
    if isinstance(value, pb.TokenIds):
        return list(value.ids)
    if isinstance(value, Message):
        return _json(value)
    if isinstance(value, str | float | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    return [_json_value(name, each) for each in value]


def _speculation(message: pb.SpeculationStats) -> Speculation:
    sources = tuple(_record(Source, source) for source in message.sources)
    return replace(_record(Speculation, message), sources=sources)


def _logprob(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((alternative.token_id, alternative.logprob) for alternative in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)


def _call(message: pb.CallTrace) -> CallTrace:
    return CallTrace(
        call=_named(_CALLS, message.call),
        sent_s=message.sent_s,
        received_s=message.received_s,
        guesses=message.guesses,
        used=message.used,
        timing=_record(Timing, message.timing) if message.HasField("timing") else None,
        verified=_verified(message.verified) if message.HasField("verified") else None,
    )


def _verified(message: pb.VerifiedBlock) -> VerifiedBlock:
    return VerifiedBlock(
        token_ids=tuple(message.token_ids),
        parents=tuple(message.parents),
        sources=tuple(message.sources),
        path=tuple(message.path),
        next_token_id=message.next_token_id,
    )


def _record(kind: type[Record], message: Message) -> Record:
    """A record whose fields are scalars, or lists or maps of scalars."""
    return kind(**{field.name: _plain(getattr(message, field.name)) for field in fields(kind)})  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    """The value without protobuf's containers, which would change with their message."""
    if isinstance(value, str | float | int):
        return value
    return dict(value) if isinstance(value, Mapping) else tuple(value)


def _joined(parts: Iterable[tuple[Record, ...]]) -> tuple[Record, ...]:
    return tuple(item for part in parts for item in part)
