"""Each field of a request arrives behind a real socket. One that is new in the proto fails here until it is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import pytest

from outrider_client._proto.generation_pb2_grpc import GenerationServiceStub
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.contract.fields import PAIR, SAMPLING, filled, paths, request_of, told
from tests.deploy.grpc.rpc import METHODS, Script, greeting, server

CALL = {"id": "1", "name": "f", "arguments": '{"a": 1}'}
USER = {"role": "user", "content": "x"}


def chat(*messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"chat": {"messages": [*messages], **fields}}


def called(**changes: Any) -> dict[str, Any]:
    return chat({"role": "assistant", "toolCalls": [{**CALL, **changes}]})


def tool(**fields: Any) -> dict[str, Any]:
    return chat(USER, tools=[{"name": "f", **fields}])


def speculation(**fields: Any) -> dict[str, Any]:
    return {"speculation": fields}


LENIENT = "VERIFICATION_LENIENT_COUPLED"
SENT: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"text": "say"}, {"text": "see"}),
    "token_ids.ids": ({"tokenIds": {"ids": [5]}}, {"tokenIds": {"ids": [6]}}),
    "chat.messages.role": (chat(USER), chat({**USER, "role": "system"})),
    "chat.messages.content": (chat(USER), chat({**USER, "content": "y"})),
    "chat.messages.name": (chat({**USER, "name": "Ann"}), chat(USER)),
    "chat.messages.tool_call_id": (chat({"role": "tool", "toolCallId": "1"}), chat({"role": "tool"})),
    "chat.messages.tool_calls.id": (called(), called(id="2")),
    "chat.messages.tool_calls.name": (called(), called(name="g")),
    "chat.messages.tool_calls.arguments": (called(), called(arguments='{"a": 2}')),
    "chat.tools.name": (tool(), tool(name="g")),
    "chat.tools.description": (tool(description="does"), tool()),
    "chat.tools.parameters": (tool(parameters='{"type": "object"}'), tool()),
    "chat.template_arguments": (chat(USER, templateArguments='{"flag": "up"}'), chat(USER)),
    "request_id": ({"requestId": "mine"}, {"requestId": "yours"}),
    **{
        f"sampling.{name}": ({"sampling": {name: value}}, {})
        for name, value in {
            **SAMPLING, "logit_bias": {"9": -1.0}, "bad_words": ["a"], "allowed_token_ids": [7, 9],
        }.items()
    },
    "sampling.bad_word_ids.ids": ({"sampling": {"badWordIds": [{"ids": [7, 8]}]}}, {}),
    **{
        f"stopping.{name}": ({"stopping": {name: value}}, {})
        for name, value in {
            "max_tokens": 5, "min_tokens": 2, "stop": ["a"], "stop_token_ids": [9], "ignore_eos": True,
            "include_stop": True,
        }.items()
    },
    "speculation.max_draft_tokens": (speculation(maxDraftTokens=0), {}),
    "speculation.verification": (speculation(verification="VERIFICATION_BLOCK"), {}),
    "speculation.trace": (speculation(trace=True), {}),
    "speculation.policy": (speculation(policy="static"), {}),
    "speculation.pipelining": (speculation(pipelining=False), {}),
    "speculation.learning": (speculation(learning=False), {}),
    "speculation.guessers": (speculation(guessers=["prompt_lookup"]), {}),
    "speculation.template": (speculation(template="a+"), {}),
    "speculation.lenience": (
        speculation(verification=LENIENT, lenience=0.5),
        speculation(verification=LENIENT, lenience=0.25),
    ),
    "speculation.explain": (speculation(explain=True), {}),
    "speculation.draft_temperature": (speculation(draftTemperature=0.5), {}),
    "logprobs": ({"logprobs": 0}, {}),
    "prompt_logprobs": ({"promptLogprobs": 0}, {}),
    "resume_token_ids": ({"resumeTokenIds": [9]}, {}),
    "timeout_s": ({"timeoutS": 60.0}, {}),
    "n": ({"n": 2}, {}),
    "resume_samples.ids": ({"resumeSamples": [{"ids": [9]}]}, {}),
    "priority": ({"priority": 3}, {}),
    "service_tier": ({"serviceTier": "SERVICE_TIER_FLEX"}, {}),
    "receipt": ({"receipt": True}, {}),
    "beams.beam_width": ({"beams": {"beamWidth": 2}}, {"beams": {"beamWidth": 3}}),
    "beams.length_penalty": ({"beams": {"beamWidth": 2, "lengthPenalty": 0.5}}, {"beams": {"beamWidth": 2}}),
    "beams.early_stopping": (
        {"beams": {"beamWidth": 2, "earlyStopping": "EARLY_STOPPING_NEVER"}},
        {"beams": {"beamWidth": 2, "earlyStopping": "EARLY_STOPPING_WHEN_FULL"}},
    ),
    **{
        f"structured_output.{name}": ({"structuredOutput": {name: value}}, {})
        for name, value in {
            "json_schema": '{"type": "null"}', "json_object": True, "regex": "a+", "grammar": 'start: "a"',
        }.items()
    },
    "structured_output.choice.choices": (
        {"structuredOutput": {"choice": {"choices": ["a"]}}},
        {"structuredOutput": {"choice": {"choices": ["b"]}}},
    ),
}  # fmt: skip
"""For each field a request that has it, and one that has not, or another value."""
BY_REPLY = {"model"}
"""Fields that no record has: `test_a_model_is_chosen_by_its_name`."""
OF_ENCODERS = {"source", "source_token_ids.ids"}
"""Fields that this model refuses: tests/deploy/api/test_source.py."""


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(*greeting())


@pytest.fixture(scope="module")
def stub(script: Script) -> Iterator[GenerationServiceStub]:
    with server(script, pair=PAIR) as address, grpc.insecure_channel(address) as channel:
        yield GenerationServiceStub(channel)


def records(stub: GenerationServiceStub, script: Script, fields: Mapping[str, Any]) -> list[Any]:
    """The request as it arrived behind the socket."""
    del script.requests[:]
    assert list(stub.GenerateStream(request_of(fields)))
    return [*script.requests]


def test_no_field_of_a_request_is_left_out():
    assert {*SENT, *BY_REPLY, *OF_ENCODERS} == set(paths(pb.GenerateRequest.DESCRIPTOR))


@pytest.mark.parametrize("path", SENT)
def test_each_field_of_a_request_arrives(stub, script, path):
    with_it, without = SENT[path]
    assert path in set(filled(request_of(with_it)))
    assert records(stub, script, with_it) != records(stub, script, without)
    if "timeoutS" not in with_it:  # of which the clock makes a deadline
        assert records(stub, script, with_it) == records(stub, script, with_it)


def test_a_model_is_chosen_by_its_name(stub):
    with_a_model = {method: kind for method, kind in METHODS.items() if "model" in kind.DESCRIPTOR.fields_by_name}
    assert len(with_a_model) >= 5
    for method, kind in with_a_model.items():
        with pytest.raises(grpc.RpcError) as caught:
            told(stub, method, kind(model="another"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert stub.Generate(pb.GenerateRequest(model="pair", text="say")).text
