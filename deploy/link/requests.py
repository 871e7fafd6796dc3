"""Converts requests of core.records to protobuf and back. Fields with default values are omitted."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import InvalidRequest
from core.records import (
    GIVEN_SAMPLING,
    Adapter,
    Base,
    Continuation,
    DraftRequest,
    Grammar,
    GrammarKind,
    Sampling,
    SequenceSpec,
    Stamp,
    Verification,
    VerifyRequest,
    Want,
)
from deploy.link.stream import LinkError, parse
from deploy.link.trees import (
    decode_features,
    decode_tree,
    decode_tree_spec,
    encode_features,
    encode_tree,
    encode_tree_spec,
)
from protos.outrider.link.v1 import link_pb2 as pb
from protos.outrider.v1 import generation_pb2 as api

Request = VerifyRequest | Continuation | DraftRequest

VERIFICATION_PREFIX = "VERIFICATION_"
"""Prefix of rule names in the proto."""
_WANTS_BY_NUMBER = {pb.Want.Value(f"WANT_{want.name}"): want for want in Want}
_OPTIONAL = tuple(
    each.name for each in pb.SequenceSpec.DESCRIPTOR.fields if each.has_presence and not each.message_type
)
"""Numbers of a `SequenceSpec` that may be absent."""
_KINDS_BY_NUMBER = {pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}"): kind for kind in GrammarKind}


def encode_requests(batch: Sequence[Request]) -> bytes:
    offers = [_encode_offer(request) for request in batch if isinstance(request, Continuation)]
    verify = [_encode_verify(request) for request in batch if isinstance(request, VerifyRequest)]
    draft = [_encode_draft(request) for request in batch if isinstance(request, DraftRequest)]
    return pb.Requests(verify=verify, draft=draft, offers=offers).SerializeToString()


def decode_requests(frame: bytes) -> list[Request]:
    """Raises: LinkError."""
    message = parse(pb.Requests, frame)
    try:
        return [
            *map(_decode_verify, message.verify),
            *map(_decode_draft, message.draft),
            *map(_decode_offer, message.offers),
        ]
    except (ValueError, KeyError, InvalidRequest) as error:
        raise LinkError(f"an invalid request: {error}") from error


def encode_stamp(stamp: Stamp) -> pb.Stamp:
    return pb.Stamp(lease=stamp.lease, epoch=stamp.epoch, round=stamp.round)


def decode_stamp(message: pb.Stamp) -> Stamp:
    return Stamp(message.lease, message.epoch, message.round)


def _encode_verify(request: VerifyRequest) -> pb.VerifyRequest:
    return pb.VerifyRequest(
        stamp=encode_stamp(request.stamp),
        base=_encode_base(request.base),
        suffix=request.suffix,
        block=encode_tree(request.block),
        spec=_encode_spec(request.spec),
        wants=[f"WANT_{want.name}" for want in request.wants],
    )


def _decode_verify(message: pb.VerifyRequest) -> VerifyRequest:
    return VerifyRequest(
        decode_stamp(message.stamp),
        Base(message.base.num_tokens, message.base.prefix_hash),
        tuple(message.suffix),
        decode_tree(message.block),
        _decode_spec(message.spec) if message.HasField("spec") else None,
        tuple([_WANTS_BY_NUMBER[number] for number in message.wants]),
    )


def _encode_offer(offer: Continuation) -> pb.Continuation:
    return pb.Continuation(
        stamp=encode_stamp(offer.stamp), after=offer.after, tree=encode_tree(offer.tree), is_open=offer.is_open
    )


def _decode_offer(message: pb.Continuation) -> Continuation:
    return Continuation(decode_stamp(message.stamp), message.after, decode_tree(message.tree), message.is_open)


def _encode_draft(request: DraftRequest) -> pb.DraftRequest:
    return pb.DraftRequest(
        stamp=encode_stamp(request.stamp),
        base=_encode_base(request.base),
        suffix=request.suffix,
        growth=encode_tree_spec(request.growth),
        spec=_encode_spec(request.spec),
        features=encode_features(request.features),
    )


def _decode_draft(message: pb.DraftRequest) -> DraftRequest:
    return DraftRequest(
        decode_stamp(message.stamp),
        Base(message.base.num_tokens, message.base.prefix_hash),
        tuple(message.suffix),
        decode_tree_spec(message.growth),
        _decode_spec(message.spec) if message.HasField("spec") else None,
        decode_features(message.features) if message.HasField("features") else None,
    )


def _encode_base(base: Base) -> pb.Base:
    return pb.Base(num_tokens=base.num_tokens, prefix_hash=base.prefix_hash)


def _encode_spec(spec: SequenceSpec | None) -> pb.SequenceSpec | None:
    if spec is None:
        return None
    return pb.SequenceSpec(
        prompt_len=spec.prompt_len,
        sampling=_encode_sampling(spec.sampling),
        verification=VERIFICATION_PREFIX + spec.verification.name,
        grammar=_encode_grammar(spec.grammar),
        adapter=_encode_adapter(spec.adapter),
        **{name: getattr(spec, name) for name in _OPTIONAL},
    )


def _decode_spec(message: pb.SequenceSpec) -> SequenceSpec:
    return SequenceSpec(
        message.prompt_len,
        _decode_sampling(message.sampling),
        Verification[pb.Verification.Name(message.verification).removeprefix(VERIFICATION_PREFIX)],
        grammar=_decode_grammar(message.grammar) if message.HasField("grammar") else None,
        adapter=_decode_adapter(message.adapter) if message.HasField("adapter") else None,
        **{name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)},
    )


def _encode_grammar(grammar: Grammar | None) -> pb.Grammar | None:
    return None if grammar is None else pb.Grammar(kind=f"GRAMMAR_KIND_{grammar.kind.name}", text=grammar.text)


def _decode_grammar(message: pb.Grammar) -> Grammar:
    return Grammar(_KINDS_BY_NUMBER[message.kind], message.text)


def _encode_adapter(adapter: Adapter | None) -> pb.Adapter | None:
    return None if adapter is None else pb.Adapter(name=adapter.name, path=adapter.path, digest=adapter.digest)


def _decode_adapter(message: pb.Adapter) -> Adapter:
    return Adapter(message.name, message.path, message.digest)


def _encode_sampling(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        params=api.SamplingParams(
            **{name: getattr(sampling, name) for name in GIVEN_SAMPLING},
            logit_bias=dict(sampling.logit_bias),
            allowed_token_ids=sampling.allowed_token_ids,
            bad_word_ids=[api.TokenIds(ids=word) for word in sampling.bad_words],
        ),
        min_tokens=sampling.min_tokens,
        suppressed_ids=sampling.suppressed_ids,
    )


def _decode_sampling(message: pb.Sampling) -> Sampling:
    """Raises: InvalidRequest."""
    params = message.params
    return Sampling(
        **{name: getattr(params, name) for name in GIVEN_SAMPLING},
        logit_bias=tuple(sorted(params.logit_bias.items())),
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in params.bad_word_ids),
        min_tokens=message.min_tokens,
        suppressed_ids=tuple(message.suppressed_ids),
    )
