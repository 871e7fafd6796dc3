"""A parameter has one name everywhere, and its value arrives unchanged on every way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from core.ranges import ranges_of
from core.records import (
    GIVEN_SAMPLING,
    Base,
    Chunk,
    FinishReason,
    GenerationRequest,
    Sampling,
    SamplingFields,
    SequenceSpec,
    SpeculationFields,
    Stamp,
    Usage,
    Verification,
    VerifyRequest,
)
from deploy import api
from deploy.cli.replay import _asked
from deploy.grpc import translate
from deploy.grpc.responses import to_chunk
from deploy.http.bodies import Speculation
from deploy.http.failures import parse
from deploy.http.routes import COMPLETIONS
from deploy.http.translate import to_requests
from deploy.link.requests import decode_requests, encode_requests
from deploy.receipts import ReceiptMaker, receipt_fields
from outrider import SamplingParams
from outrider_client import GenerateFields
from outrider_client.request import to_message
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.contract.bodies import BARE
from tests.deploy.contract.fields import PAIR, SAMPLING, inside

OTHERS = {"logit_bias", "allowed_token_ids", "bad_words"}
"""Sampling parameters that are no numbers; `bad_words` has another form as `bad_word_ids`."""
BESIDE = {"min_tokens", "suppressed_ids"}
"""Sampling fields added by the way a request stops."""
SPECULATION: Mapping[str, Any] = {
    "max_draft_tokens": inside(ranges_of(GenerationRequest)["max_draft_tokens"]),
    "lenience": inside(ranges_of(GenerationRequest)["lenience"]),
    "draft_temperature": inside(ranges_of(GenerationRequest)["draft_temperature"]),
    "pipelining": False,
    "learning": False,
}
LENIENT = Verification.LENIENT_REJECTION


def names(record: type) -> set[str]:
    return {each.name for each in fields(record)}


def by_client_and_grpc() -> GenerationRequest:
    given = {**SAMPLING, **SPECULATION, "verification": str(LENIENT)}
    (request,) = translate.to_requests(to_message("say", given), PAIR, 0.0)
    return request


def by_http(path: str) -> GenerationRequest:
    given = {**BARE[path], **SAMPLING, "speculation": {**SPECULATION, "verification": str(LENIENT)}}
    (request,) = to_requests(parse(COMPLETIONS[path].body, json.dumps(given).encode()), PAIR, 0.0, "name")
    return request


def by_python() -> GenerationRequest:
    given = SamplingParams(**SAMPLING, **SPECULATION, verification=LENIENT)
    (request,) = api.to_requests(given.given("say"), PAIR, 0.0)
    return request


WAYS = {
    "client and gRPC": by_client_and_grpc,
    "Python": by_python,
    **{path: lambda path=path: by_http(path) for path in BARE},
}


def test_a_sampling_parameter_has_one_name_everywhere():
    numbers = set(GIVEN_SAMPLING)
    assert names(Sampling) == numbers | OTHERS | BESIDE
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == numbers | OTHERS | {"bad_word_ids"}
    assert numbers <= set(GenerateFields.__annotations__)
    assert numbers <= names(SamplingParams)
    for path in BARE:
        assert numbers <= set(COMPLETIONS[path].body.model_fields), path


def test_a_parameter_of_speculation_has_one_name_everywhere():
    assert set(SPECULATION) == names(SpeculationFields)
    for known in (
        names(GenerationRequest),
        names(SamplingParams),
        Speculation.model_fields,
        pb.SpeculationParams.DESCRIPTOR.fields_by_name,
        GenerateFields.__annotations__,
    ):
        assert set(SPECULATION) <= set(known)


@pytest.mark.parametrize(("given", "used"), [(SamplingFields, Sampling), (SpeculationFields, GenerationRequest)])
def test_what_callers_give_has_the_type_of_what_is_used(given, used):
    hints = get_type_hints(used)
    for name, hint in get_type_hints(given).items():
        assert hint == hints[name] | None, name


@pytest.mark.parametrize("way", WAYS)
def test_each_value_arrives(way):
    request = WAYS[way]()
    assert {name: getattr(request.sampling, name) for name in SAMPLING} == SAMPLING
    assert {name: getattr(request, name) for name in SPECULATION} == SPECULATION


def test_each_value_reaches_the_engine():
    spec = SequenceSpec.of(by_python())
    request = VerifyRequest(Stamp("a", 1, 0), Base(0, 0), (1,), spec=spec)
    (arrived,) = decode_requests(encode_requests([request]))
    assert arrived.spec == spec
    assert (arrived.spec.sampling, arrived.spec.lenience) == (by_python().sampling, SPECULATION["lenience"])


def test_each_value_stands_in_the_receipt_and_is_asked_for_again():
    request = by_python()
    maker = ReceiptMaker(request, "pair", PAIR.target, None, "")
    last = maker.observe(Chunk("", (7,), (False,), Usage(2, 1), finish_reason=FinishReason.STOP))
    found = receipt_fields(last.receipt)
    assert {name: found["sampling"][name] for name in SAMPLING} == SAMPLING
    assert found["lenience"] == SPECULATION["lenience"]
    message = to_chunk(last, request, 0, last.usage).finish.receipt
    assert {name: getattr(message.sampling, name) for name in SAMPLING} == SAMPLING
    prompt, given = _asked({"prompt": "say"}, found, None)
    (again,) = translate.to_requests(to_message(prompt, given), PAIR, 0.0)
    assert (again.sampling, again.lenience) == (request.sampling, request.lenience)
