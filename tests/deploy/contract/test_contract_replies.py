"""Each field of a reply is told over a real socket, by some reply to some request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message

from core.errors import InvalidRequest
from core.records import MODEL_SAMPLING, TokenLogprobs, Usage
from outrider_client._proto.generation_pb2_grpc import GenerationServiceStub
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.contract.fields import ADAPTER, PAIR, filled, paths, request_of, told
from tests.deploy.grpc.rpc import CALLS, METHODS, Script, greeting, server

LENIENT = "VERIFICATION_LENIENT_COUPLED"
ASKED: list[dict[str, Any]] = [
    {
        "sampling": {
            "temperature": 1.5, "topK": 3, "topP": 0.5, "minP": 0.125, "repetitionPenalty": 2.0, "seed": "7",
            "presencePenalty": -1.0, "frequencyPenalty": 1.0, "logitBias": {"9": -1.0}, "badWords": ["a"],
            "allowedTokenIds": [7, 9, 11],
        },
        "stopping": {
            "maxTokens": 9, "minTokens": 2, "stop": ["!"], "stopTokenIds": [9], "ignoreEos": True, "includeStop": True,
        },
        "speculation": {"verification": LENIENT, "lenience": 0.5, "trace": True, "explain": True},
        "receipt": True, "logprobs": 1, "promptLogprobs": 1, "model": ADAPTER.name,
    },
    {"n": 3, "receipt": True, "structuredOutput": {"regex": "a+"}},
]  # fmt: skip
ASKED.append({**ASKED[0], "n": 2})


def telling(stop: str | int) -> list[Any]:
    """The greeting, with whatever else a chunk may have."""
    top = TokenLogprobs(-0.5, ((7, -0.25), (8, -1.5)))
    first, last = greeting()
    chunks = [
        replace(each, logprobs=(top,) * len(each.token_ids), explanation=("so",), usage=Usage(3, 4, 2))
        for each in (first, last)
    ]
    chunks[0] = replace(chunks[0], prompt_logprobs=(top,) * 3)
    stats = replace(last.stats, num_draft_failures=1, num_target_failures=2, num_relaxed_tokens=3, num_continued=4)
    problem = InvalidRequest("structured_output", "cannot be followed")
    return [chunks[0], replace(chunks[1], matched_stop=stop, stats=stats, problem=problem, score=-0.5)]


def test_each_field_of_a_reply_is_told():
    """Some reply to some request has each field, except those of `NOT_TOLD`."""
    told_fields: dict[str, set[str]] = {}
    for stop in ("!", 9):
        with server(Script(*telling(stop)), pair=PAIR) as address, grpc.insecure_channel(address) as channel:
            stub = GenerationServiceStub(channel)
            for method, request in asked():
                for reply in told(stub, method, request):
                    told_fields.setdefault(type(reply).__name__, set()).update(filled(reply))
    for name, seen in told_fields.items():
        assert set(paths(getattr(pb, name).DESCRIPTOR)) - seen == NOT_TOLD.get(name, set()), name
    assert len(told_fields) == len(METHODS)


BAD_WORDS = "finish.receipt.sampling.bad_words"
"""A receipt has them as ids."""
DEFAULTS = {path for path in paths(pb.SamplingParams.DESCRIPTOR) if path not in MODEL_SAMPLING}
NOT_TOLD: Mapping[str, set[str]] = {
    "GenerateChunk": {BAD_WORDS},
    "GenerateResponse": {BAD_WORDS, f"samples.{BAD_WORDS}"},
    "GetModelInfoResponse": {f"sampling_defaults.{path}" for path in DEFAULTS},
}


def asked() -> Iterator[tuple[str, Message]]:
    for method in ("Generate", "GenerateStream"):
        yield from ((method, request_of(fields)) for fields in ASKED)
    yield from ((method, message) for method, message in CALLS.items() if not method.startswith("Generate"))
