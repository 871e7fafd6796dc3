"""Converts replies of core.records to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.records import DraftUpdate, Likeliest, Missing, Refused, Stamp, Timing, TokenLogprobs, Verdict
from core.speculation import NewNodes
from deploy.link.requests import decode_stamp, encode_stamp
from deploy.link.stream import LinkError, parse
from deploy.link.trees import (
    decode_distributions,
    decode_features,
    decode_guesses,
    encode_distributions,
    encode_features,
    encode_guesses,
)
from protos.outrider.link.v1 import link_pb2 as pb

Reply = Verdict | DraftUpdate | Missing | Refused
INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")
"""Types of the columns of new nodes."""


def encode_replies(replies: Sequence[Reply]) -> bytes:
    return pb.Replies(replies=map(_encode, replies)).SerializeToString()


def encode_loss(reason: str) -> bytes:
    """The message that ends a link whose engine has failed."""
    return pb.Replies(lost=reason).SerializeToString()


def encode_working(stamps: Sequence[Stamp]) -> bytes:
    """The heartbeat of a busy engine: it is making steps and still has these requests."""
    return pb.Replies(working=map(encode_stamp, stamps)).SerializeToString()


def decode_replies(frame: bytes) -> tuple[list[Reply], str | None, list[Stamp]]:
    """The replies; the reason of a failure, or None; the requests still in progress. Raises: LinkError."""
    message = parse(pb.Replies, frame)
    try:
        replies = [*map(_decode, message.replies)]
    except ValueError as error:
        raise LinkError(f"an invalid reply: {error}") from error
    return replies, message.lost if message.HasField("lost") else None, [*map(decode_stamp, message.working)]


def _encode(reply: Reply) -> pb.Reply:
    stamp = encode_stamp(reply.stamp)
    match reply:
        case Verdict():
            return pb.Reply(stamp=stamp, verdict=_encode_verdict(reply))
        case DraftUpdate():
            return pb.Reply(stamp=stamp, draft_update=_encode_draft_update(reply))
        case Missing():
            return pb.Reply(stamp=stamp, missing=pb.Missing(held=reply.held))
        case Refused():
            refused = pb.Refused(reason=reply.reason, is_final=reply.is_final, field=reply.field)
            return pb.Reply(stamp=stamp, refused=refused)


def _decode(message: pb.Reply) -> Reply:
    stamp = decode_stamp(message.stamp)
    match message.WhichOneof("content"):
        case "verdict":
            return _decode_verdict(stamp, message.verdict)
        case "draft_update":
            return _decode_draft_update(stamp, message.draft_update)
        case "missing":
            return Missing(stamp, message.missing.held)
        case "refused":
            refused = message.refused
            field = refused.field if refused.HasField("field") else None
            return Refused(stamp, refused.reason, refused.is_final, field)
    raise ValueError("unknown kind of reply; both ends must have the same version")


def _encode_verdict(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(
        path=verdict.path,
        next_token=verdict.next_token,
        held=verdict.held,
        logprobs=map(_encode_logprobs, verdict.logprobs),
        timing=_encode_timing(verdict.timing),
        continued=verdict.continued,
        prompt_logprobs=map(_encode_logprobs, verdict.prompt_logprobs),
        num_relaxed=verdict.num_relaxed,
        samples=verdict.samples,
        num_cached=verdict.num_cached,
        features=encode_features(verdict.features),
        guesses=encode_guesses(verdict.guesses),
        likeliest=map(_encode_likeliest, verdict.likeliest),
    )


def _decode_verdict(stamp: Stamp, message: pb.Verdict) -> Verdict:
    return Verdict(
        stamp,
        tuple(message.path),
        message.next_token,
        message.held,
        tuple(map(_decode_logprobs, message.logprobs)),
        _decode_timing(message.timing) if message.HasField("timing") else None,
        message.continued,
        tuple(map(_decode_logprobs, message.prompt_logprobs)),
        message.num_relaxed,
        tuple(message.samples),
        message.num_cached,
        decode_features(message.features) if message.HasField("features") else None,
        decode_guesses(message.guesses),
        tuple([tuple(zip(each.ids, each.logprobs, strict=True)) for each in message.likeliest]),
    )


def _encode_likeliest(likeliest: Likeliest) -> pb.Likeliest:
    return pb.Likeliest(ids=[token for token, _ in likeliest], logprobs=[logprob for _, logprob in likeliest])


def _encode_draft_update(draft_update: DraftUpdate) -> pb.DraftUpdate:
    new_nodes = draft_update.new_nodes
    return pb.DraftUpdate(
        held=draft_update.held,
        first=new_nodes.first,
        parents=new_nodes.parents.astype(INT).tobytes(),
        tokens=new_nodes.tokens.astype(INT).tobytes(),
        ranks=new_nodes.ranks.astype(INT).tobytes(),
        chances=new_nodes.chances.astype(FLOAT).tobytes(),
        confidences=new_nodes.confidences.astype(FLOAT).tobytes(),
        root=new_nodes.root,
        timing=_encode_timing(draft_update.timing),
        is_over=draft_update.is_over,
        q=encode_distributions(new_nodes.q),
    )


def _decode_draft_update(stamp: Stamp, message: pb.DraftUpdate) -> DraftUpdate:
    new_nodes = NewNodes(
        message.first,
        np.frombuffer(message.parents, INT),
        np.frombuffer(message.tokens, INT),
        np.frombuffer(message.ranks, INT),
        np.frombuffer(message.chances, FLOAT),
        np.frombuffer(message.confidences, FLOAT),
        message.root,
        decode_distributions(message.q),
    )
    timing = _decode_timing(message.timing) if message.HasField("timing") else None
    return DraftUpdate(stamp, new_nodes, message.held, timing, message.is_over)


def _encode_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[value for _, value in logprobs.top],
    )


def _decode_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))


def _encode_timing(timing: Timing | None) -> pb.Timing | None:
    if timing is None:
        return None
    return pb.Timing(
        waited_s=timing.waited_s,
        computed_s=timing.computed_s,
        num_passes=timing.num_passes,
        num_rows=timing.num_rows,
        num_sessions=timing.num_sessions,
        guessing_s=timing.guessing_s,
    )


def _decode_timing(message: pb.Timing) -> Timing:
    return Timing(
        message.waited_s,
        message.computed_s,
        message.num_passes,
        message.num_rows,
        message.num_sessions,
        message.guessing_s,
    )
