"""150 wrong values over a real socket, each refused by its field; every field that can be wrong is among them."""

from __future__ import annotations

import math
import re
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from outrider_client._proto.generation_pb2_grpc import GenerationServiceStub
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.contract.fields import paths, told
from tests.deploy.grpc import test_translate as wrong
from tests.deploy.grpc.rpc import Script, greeting, server
from tests.deploy.grpc.test_translate import VOCAB, message, sampling, served

REFUSED: list[tuple[pb.GenerateRequest, str]] = [
    *((request, field) for request, field, _ in wrong.REFUSED),
    *((message(sampling=wrong.SEEDED, **fields), field) for fields, field in wrong.WRONG_SAMPLES),
    *((sampling(**fields), f"sampling.{field}") for fields, field in wrong.WRONG_MASKS),
    *wrong.MINUS_ONES,
    *((message(structured_output=pb.StructuredOutput(**fields)), field) for fields, field in wrong.WRONG_STRUCTURES),
    *(
        (message(speculation=pb.SpeculationParams(draft_temperature=value)), "speculation.draft_temperature")
        for value in (0.0, -1.0, 0.0001, 101.0, math.nan, math.inf)
    ),
    *(
        (message(speculation=pb.SpeculationParams(lenience=value)), "speculation.lenience")
        for value in (0.0, 0.5, math.nan)
    ),
    *(
        (message(speculation=pb.SpeculationParams(verification=value)), "speculation.verification")
        for value in (pb.VERIFICATION_LENIENT_COUPLED, pb.VERIFICATION_TYPICAL, max(pb.Verification.values()) + 1, -1)
    ),
    *((message(prompt_logprobs=value), "prompt_logprobs") for value in (5, 2**32 - 1)),
    *((message(priority=value), "priority") for value in (-1, -(2**31))),
    *((message(service_tier=value), "service_tier") for value in (3, 4, -1)),
    (message(service_tier="SERVICE_TIER_FLEX", priority=1), "priority"),
    *((message(logprobs=value), "logprobs") for value in (6, 2**31)),
    *((message(stopping=pb.StoppingParams(max_tokens=value)), "stopping.max_tokens") for value in (99, 2**31)),
    *((message(stopping=pb.StoppingParams(min_tokens=value)), "stopping.min_tokens") for value in (98, 2**31)),
    *((message(timeout_s=value), "timeout_s") for value in (-math.inf, 1e308)),
    *((sampling(temperature=value), "sampling.temperature") for value in (0.0009, 100.5, 1e308)),
    *((sampling(top_p=value), "sampling.top_p") for value in (-0.0, 1.0000001)),
    (message(request_id="\x00"), "request_id"),
    (message(source="x"), "source"),
    (message(beams=pb.BeamParams()), "beams.beam_width"),
    *((message(beams=pb.BeamParams(beam_width=value)), "beams.beam_width") for value in (0, 65)),
    (message(beams=pb.BeamParams(beam_width=2, length_penalty=11.0)), "beams.length_penalty"),
    (message(beams=pb.BeamParams(beam_width=2, early_stopping=3)), "beams.early_stopping"),
    (message(source_token_ids=pb.TokenIds(ids=[1])), "source_token_ids.ids"),
    (message(resume_samples=[pb.TokenIds(ids=[VOCAB])]), "resume_samples[0].ids[0]"),
]
NEVER_WRONG = {
    *("text", "chat.messages.content", "chat.messages.name", "chat.messages.tool_calls.id", "chat.tools.description"),
    "chat.messages.tool_calls.name",
    *("sampling.seed", "stopping.ignore_eos", "stopping.include_stop", "structured_output.json_object", "receipt"),
    *("speculation.trace", "speculation.pipelining", "speculation.explain", "speculation.learning"),
}
"""Fields of which any value is taken, if not in any company or of any length."""


def test_no_field_that_can_be_wrong_is_left_out():
    refused = {re.sub(r"\[\d+\]", "", field) for _, field in REFUSED}
    known = {path.removesuffix(".choices") for path in paths(pb.GenerateRequest.DESCRIPTOR)}
    assert known - refused - NEVER_WRONG - {"model"} == set(), "a model that is not there is NOT_FOUND"
    assert len(REFUSED) >= 150


def test_each_wrong_value_is_refused_over_the_socket_by_its_field():
    unlike = []
    with server(Script(*greeting()), pair=served()) as address, grpc.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)
        for index, (request, field) in enumerate(REFUSED):
            with pytest.raises(grpc.RpcError) as caught:
                told(stub, ("Generate", "GenerateStream")[index % 2], request)
            said = (caught.value.code(), named_by(caught.value))
            unlike += [(field, said)] if said != (grpc.StatusCode.INVALID_ARGUMENT, field) else []
        assert stub.Generate(message()).text, "and the next call is served"
    assert unlike == []


def named_by(error: Any) -> str:
    """The field that the details of an error name."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    detail = error_details_pb2.BadRequest()
    assert any(packed.Unpack(detail) for packed in status.details)
    (violation,) = detail.field_violations
    return violation.field
