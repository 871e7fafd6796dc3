"""Each field of the client reaches the server's records, and the client has every field of the server."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from core.records import GenerationRequest, Grammar, GrammarKind, Sampling, Verification
from deploy.api import Served
from deploy.grpc import translate
from outrider_client import InvalidRequest, records
from outrider_client._proto import generation_pb2 as pb
from outrider_client.request import _PATHS, GenerateFields, to_message
from tests.deploy.grpc.rpc import CONFIG, INFO, TOKENIZER

EVERYTHING = {
    "model": "pair",
    "request_id": "mine",
    "timeout_s": 5.0,
    "logprobs": 0,
    "prompt_logprobs": 2,
    "priority": -3,
    "resume_token_ids": [11, 12],
    "n": 1,
    "resume_samples": [],
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 0.5,
    "min_p": 0.0,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.0,
    "frequency_penalty": -2.0,
    "seed": 0,
    "logit_bias": {5: -100.0},
    "allowed_token_ids": [7, 8],
    "bad_words": ["a"],
    "bad_word_ids": [[7, 8]],
    "max_tokens": 50,
    "min_tokens": 0,
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "include_stop": True,
    "max_draft_tokens": 0,
    "verification": "rejection",
    "policy": "heuristic",
    "pipelining": False,
    "guessers": ["prompt_lookup"],
    "template": "Dear .*",
    "trace": True,
}
DEFAULTS = Sampling(temperature=0.7, top_k=40)
SERVED = Served(INFO, None, TOKENIZER, DEFAULTS, CONFIG)


def received(prompt="hello", **fields) -> GenerationRequest:
    """The request as the server understands it."""
    wire = pb.GenerateRequest.FromString(to_message(prompt, fields).SerializeToString())
    (request,) = translate.to_requests(wire, SERVED, 100.0)
    return request


def test_every_argument_arrives_and_zero_is_a_value():
    request = received(**EVERYTHING)
    assert request.sampling == Sampling(
        temperature=0.0,
        top_k=0,
        top_p=0.5,
        repetition_penalty=1.5,
        frequency_penalty=-2.0,
        seed=0,
        logit_bias=((5, -100.0),),
        allowed_token_ids=(7, 8),
        bad_words=(TOKENIZER.encode("a", add_special_tokens=False), (7, 8)),
        suppressed_ids=(7,),
    )
    assert request.prompt == TOKENIZER.encode("hello")
    assert (request.request_id, request.deadline, request.num_logprobs, request.num_prompt_logprobs) == (
        "mine",
        105.0,
        0,
        2,
    )
    assert request.priority == -3
    assert (request.resume_tokens, request.max_tokens, request.stop) == ((11, 12), 50, ("a", "b"))
    assert (request.stop_token_ids, request.ignore_eos, request.include_stop) == (frozenset({7}), True, True)
    assert (request.max_draft_tokens, request.verification) == (0, Verification.REJECTION)
    assert (request.policy, request.pipelining, request.wants_trace) == ("heuristic", False, True)
    assert request.guessers == ("prompt_lookup",)
    assert request.template == Grammar(GrammarKind.REGEX, "Dear .*")
    assert request.grammar is None


def test_several_samples_arrive():
    message = to_message("hello", {"n": 2, "seed": 5, "resume_samples": [[11], []]})
    first, second = translate.to_requests(message, SERVED, 100.0)
    assert (first.sampling.seed, first.resume_tokens, second.resume_tokens) == (5, (11,), ())
    assert not to_message("hello", {"n": 2, "resume_samples": [[11], []]}).sampling.HasField("seed")


def test_what_the_output_must_look_like_arrives():
    assert received(json_schema='{"type":"null"}').grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}')
    assert received(json_schema={"type": "null"}).grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}')
    assert received(json_object=True).grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    assert received(regex="a+").grammar == Grammar(GrammarKind.REGEX, "a+")
    assert (
        received(choice=["a", "b"]).grammar == received(choice=("a", "b")).grammar == Grammar(GrammarKind.REGEX, "a|b")
    )
    assert received(grammar='start: "a"').grammar == Grammar(GrammarKind.LARK, 'start: "a"')
    assert to_message("hello", {"choice": []}).structured_output.WhichOneof("kind") == "choice"
    with pytest.raises(InvalidRequest, match="at most one of"):
        to_message("hello", {"regex": "a", "json_object": True})


def test_none_leaves_a_field_to_the_server():
    nothing = dict.fromkeys(EVERYTHING)
    message = to_message("hello", nothing)
    message.ClearField("request_id")
    message.sampling.ClearField("seed")
    assert message == pb.GenerateRequest(text="hello", sampling=pb.SamplingParams())
    assert received(**nothing).sampling.temperature == DEFAULTS.temperature


def test_a_seed_and_an_id_are_drawn_for_each_request():
    messages = [to_message("hello", {}) for _ in range(10)]
    assert len({message.sampling.seed for message in messages}) == 10
    assert len({message.request_id for message in messages}) == 10
    assert 2**45 < max(message.sampling.seed for message in messages) < 2**53


def test_no_seed_is_drawn_for_output_that_another_seed_gave():
    assert not to_message("hello", {"resume_token_ids": [1]}).sampling.HasField("seed")


def test_prompts_of_all_kinds_arrive():
    assert received(None, token_ids=[4, 5]).prompt == (4, 5)
    chat = to_message(None, {"messages": [{"role": "user", "content": "hi"}]}).chat
    assert chat == pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    assert to_message("hello", {"stop": "ab"}).stopping.stop == ["ab"], "one string is one stop string"
    assert to_message(None, {"token_ids": []}).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize("fields", [{}, {"token_ids": [1], "messages": []}])
def test_exactly_one_prompt_must_be_given(fields):
    with pytest.raises(InvalidRequest) as caught:
        to_message(None, fields)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("top_k", -1, "sampling.top_k"),
        ("temperature", "warm", "sampling.temperature"),
        ("seed", 2**64, "sampling.seed"),
        ("token_ids", [-1], "token_ids.ids"),
        ("messages", [{"role": "user", "text": "x"}], "chat.messages"),
        ("verification", "blind", "speculation.verification"),
        ("stop", [3], "stopping.stop"),
        ("timeout_s", 0.0, "timeout_s"),
        ("timeout_s", float("nan"), "timeout_s"),
        ("logit_bias", {-3: 1.0}, "sampling.logit_bias"),
        ("n", -1, "n"),
        ("priority", 2**31, "priority"),
        ("service_tier", "slow", "service_tier"),
        ("allowed_token_ids", [-1], "sampling.allowed_token_ids"),
        ("bad_words", [7], "sampling.bad_words"),
        ("guessers", ["draft", 7], "speculation.guessers"),
        ("bad_word_ids", [["x"]], "sampling.bad_word_ids.ids"),
        ("resume_samples", [[-1]], "resume_samples.ids"),
        ("bad_word_ids", 5, "sampling.bad_word_ids.ids"),
        ("top_k", (1, 2), "sampling.top_k"),
        ("stop_token_ids", 1, "stopping.stop_token_ids"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_refused_by_the_name_that_the_server_uses(name, value, field):
    prompt = None if name in ("token_ids", "messages") else "hello"
    with pytest.raises(InvalidRequest) as caught:
        to_message(prompt, {name: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"INVALID_ARGUMENT: {field}: ")


@pytest.mark.parametrize("name", ["tempratur", "text"])
def test_an_argument_that_does_not_exist_is_an_error_of_the_program(name):
    with pytest.raises(TypeError, match=name):
        to_message("hello", {name: None})


def test_tools_and_their_calls_arrive_in_a_chat():
    call = {"id": "1", "name": "f", "arguments": {"a": 1}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2", "tool_call_id": "1"}]
    tools = [{"name": "f", "description": "adds", "parameters": {"type": "object"}}, {"name": "g", "parameters": "{}"}]
    chat = to_message(None, {"messages": messages, "tools": tools, "template_arguments": {"mood": "glad"}}).chat
    assert chat == pb.ChatMessages(
        messages=[
            pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments='{"a": 1}')]),
            pb.ChatMessage(role="tool", content="2", tool_call_id="1"),
        ],
        tools=[
            pb.Tool(name="f", description="adds", parameters='{"type": "object"}'),
            pb.Tool(name="g", parameters="{}"),
        ],
        template_arguments='{"mood": "glad"}',
    )


@pytest.mark.parametrize("fields", [{"tools": [{"name": "f"}]}, {"template_arguments": {}}])
def test_what_is_for_a_chats_template_is_refused_beside_another_prompt(fields):
    with pytest.raises(InvalidRequest, match="must not be given without messages"):
        to_message("hello", fields)


def paths(descriptor, prefix=""):
    for field in descriptor.fields:
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            yield prefix + field.name
        else:
            yield from paths(field.message_type, f"{prefix}{field.name}.")


PARTS = {"chat.messages": pb.ChatMessage, "chat.tools": pb.Tool}
"""Arguments that are mappings of a message's fields."""


def test_whatever_a_request_may_hold_has_an_argument():
    given = {name: set(paths(message.DESCRIPTOR, f"{name}.")) for name, message in PARTS.items()}
    offered = (set(_PATHS.values()) - set(PARTS)).union(*given.values())
    assert set(paths(pb.GenerateRequest.DESCRIPTOR)) == offered
    assert set(GenerateFields.__annotations__) == set(_PATHS) - {"text"} >= set(EVERYTHING)


@pytest.mark.parametrize(
    ("record", "message", "not_offered"),
    [
        (records.Usage, pb.Usage, set()),
        (records.CallTrace, pb.CallTrace, set()),
        (records.Timing, pb.Timing, set()),
        (records.Speculation, pb.SpeculationStats, set()),
        (records.Chunk, pb.GenerateChunk, {"request_id"}),
        (records.Model, pb.ModelInfo, set()),
        (records.ModelInfo, pb.GetModelInfoResponse, set()),
        (records.Control, pb.ControlReport, set()),
    ],
)
def test_whatever_a_reply_holds_has_a_field(record, message, not_offered):
    named = {field.name for field in dataclasses.fields(record)}
    assert named | not_offered == set(message.DESCRIPTOR.fields_by_name)


def test_errors_survive_pickling():
    with pytest.raises(InvalidRequest) as caught:
        to_message(None, {})
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.code, again.field, str(again)) == (
        InvalidRequest,
        caught.value.code,
        "prompt",
        str(caught.value),
    )
