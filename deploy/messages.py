"""A request's parameters as protobuf messages, filled by name.

Knows records and generated messages; must not know gRPC, HTTP or links.
"""

from __future__ import annotations

from typing import Any

from core.records import GIVEN_SAMPLING, Sampling
from protos.outrider.v1 import generation_pb2 as pb


def sampling_message(sampling: Sampling) -> pb.SamplingParams:
    """The message with each field set; bad words as ids."""
    return pb.SamplingParams(
        **{name: getattr(sampling, name) for name in GIVEN_SAMPLING},
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_word_ids=[pb.TokenIds(ids=word) for word in sampling.bad_words],
    )


def sampling_of(message: pb.SamplingParams, **others: Any) -> Sampling:
    """The record of a message made by `sampling_message`; `others` are fields that the message lacks.

    Raises: InvalidRequest for a value outside its range.
    """
    return Sampling(
        **{name: getattr(message, name) for name in GIVEN_SAMPLING},
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_word_ids),
        **others,
    )
