"""Replies of the endpoints to completions that the test wrote down: no Ray, no models, no sockets."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest

from core.errors import DeadlinePassed, InvalidRequest, Overloaded, Unavailable, UnsoundScores
from core.records import Chunk, FinishReason, TokenLogprobs, Usage
from deploy.api import sample_seed
from deploy.api.authentication import Authenticator
from deploy.api.hosted import Hosted, Models
from deploy.api.offload import Offload
from deploy.calls import CallId
from deploy.clock import MonotonicClock
from deploy.http import servicer as module
from deploy.http.servicer import HttpServicer
from deploy.http.wire import DONE, Call, Head
from deploy.metrics.meters import Meters
from tests.deploy.grpc.rpc import LIMITS, Recorded, Script, greeting, ids_of, served
from tests.vocabularies import as_product, byte_level

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def servicer(script, record=None, authenticator=None, *, models=None):
    clock = MonotonicClock()
    models = models or Models([Hosted(script, served(), Meters(record or Recorded(), clock.now))])
    return HttpServicer(models, clock, authenticator or Authenticator(None), Offload())


def call(path=COMPLETIONS, method="POST", authorization=None, **fields):
    if path == COMPLETIONS:
        fields = {"prompt": "say", **fields}
    return Call(method, path, authorization, CallId("mine"), json.dumps(fields).encode())


async def respond(servicer, call):
    head, *parts = [part async for part in servicer.respond(call)]
    assert isinstance(head, Head)
    return head, b"".join(parts)


async def whole(servicer, call):
    head, body = await respond(servicer, call)
    assert dict(head.headers)["content-type"] == "application/json"
    assert dict(head.headers)["content-length"] == str(len(body))
    return head.status, json.loads(body)


async def events(servicer, call):
    head, body = await respond(servicer, call)
    assert (head.status, dict(head.headers)["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert body.endswith(DONE)
    return [json.loads(line.removeprefix("data: ")) for line in body.decode().split("\n\n")[:-2]]


async def error(servicer, call):
    head, body = await respond(servicer, call)
    assert dict(head.headers)["content-length"] == str(len(body))
    content = json.loads(body)["error"]
    assert set(content) == {"message", "type", "param", "code", "request_id"}
    assert content["request_id"] == "mine"
    return head, content


# Replies


def usage(prompt, output, cached=0):
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


async def test_a_whole_completion():
    status, reply = await whole(servicer(Script(*greeting())), call(seed=42, return_token_ids=True))
    assert (status, reply["id"], reply["object"], reply["model"]) == (200, "cmpl-mine", "text_completion", "pair")
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello word", "stop", "!")
    assert choice["token_ids"] == [*ids_of("hello"), *ids_of(" wor"), *ids_of("d")]
    assert choice["logprobs"] is None
    assert choice["outrider"]["seed"] == 42
    assert choice["outrider"]["speculation"]["drafted_tokens"] == 6
    num_tokens = len(choice["token_ids"])
    assert reply["usage"] == usage(3, num_tokens)


async def test_a_whole_reply_that_cannot_be_made_has_the_status_of_its_error(monkeypatch):
    def broken(_content):
        raise Unavailable("nothing can be said")

    monkeypatch.setattr(module, "encoded", broken)
    status, reply = await whole(servicer(Script(*greeting())), call())
    assert (status, reply["error"]["message"]) == (503, "nothing can be said")


async def test_a_stream_of_a_completion():
    first, last = await events(servicer(Script(*greeting())), call(stream=True))
    assert [each["choices"][0]["text"] for each in (first, last)] == ["hello", " word"]
    assert [each["choices"][0]["finish_reason"] for each in (first, last)] == [None, "stop"]
    assert "outrider" not in first["choices"][0]
    assert last["choices"][0]["outrider"]["speculation"]["hits"] == 3
    assert "usage" not in last


async def test_usage_of_a_stream_comes_at_its_end():
    options = {"include_usage": True}
    *pieces, last = await events(servicer(Script(*greeting())), call(stream=True, stream_options=options))
    assert [each["usage"] for each in pieces] == [None, None]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ids_of("hello") + ids_of(" wor") + ids_of("d"))


async def test_usage_of_a_stream_comes_with_each_piece_if_it_is_asked_for():
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *_ = await events(servicer(Script(*greeting())), call(stream=True, stream_options=options))
    assert first["usage"]["completion_tokens"] == len(ids_of("hello"))


def with_template(script):
    pair = replace(served(), tokenizer=as_product(byte_level(), "{{ messages[0].content }}"))
    return servicer(script, models=Models([Hosted(script, pair, Meters(Recorded(), MonotonicClock().now))]))


async def test_a_whole_chat():
    messages = [{"role": "user", "content": "say"}]
    status, reply = await whole(with_template(Script(*greeting())), call(CHAT, messages=messages))
    assert (status, reply["id"], reply["object"]) == (200, "chatcmpl-mine", "chat.completion")
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello word", "refusal": None}


async def test_a_stream_of_a_chat_says_the_role_once():
    messages = [{"role": "user", "content": "say"}]
    pieces = await events(with_template(Script(*greeting())), call(CHAT, messages=messages, stream=True))
    assert {each["object"] for each in pieces} == {"chat.completion.chunk"}
    deltas = [each["choices"][0]["delta"] for each in pieces]
    assert deltas == [{"role": "assistant", "content": "hello"}, {"content": " word"}]


async def test_an_unknown_guesser_is_refused_by_name_and_nothing_runs():
    script = Script(*greeting())
    head, told = await error(servicer(script), call(speculation={"guessers": ["draft", "oracle"]}))
    assert (head.status, told["param"]) == (400, "speculation.guessers[1]")
    assert "one of draft, prompt_lookup" in told["message"]
    assert "'oracle'" in told["message"]
    assert script.requests == []


LOGPROBS = (TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5))), TokenLogprobs(-2.0))


def scored():
    return Chunk("ab", (7, 9), (True, False), Usage(1, 2), LOGPROBS, FinishReason.LENGTH, 9)


async def test_a_request_is_its_caller_s_and_waits_by_its_priority(tmp_path):
    (tmp_path / "tokens").write_text("one\ntwo\n")
    authenticator, script = Authenticator(tmp_path / "tokens"), Script(*greeting())
    http = servicer(script, authenticator=authenticator)
    for token in ("one", "two"):
        await whole(http, call(authorization=f"Bearer {token}", priority=-2))
    callers = [authenticator.check([("authorization", f"Bearer {token}")]) for token in ("one", "two")]
    assert [(each.caller, each.priority) for each in script.requests] == [(name, -2) for name in callers]
    assert len(set(callers)) == 2
    assert [each.isolation for each in script.requests] == [f"caller:{name}" for name in callers]


async def test_a_prompt_is_repeated_with_its_logprobs_if_they_are_asked_for():
    scores = (TokenLogprobs(-0.25, ((7, -0.25),)),)
    script = [replace(scored(), prompt_logprobs=scores)]
    given = {"prompt": list(ids_of("ab")), "echo": True, "logprobs": 1}
    _, reply = await whole(servicer(Script(*script)), call(**given))
    (choice,) = reply["choices"]
    assert choice["text"] == "abab"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.5, -2.0]
    assert logprobs["tokens"][:2] == ["a", "b"]
    assert [top and list(top.values()) for top in logprobs["top_logprobs"]][:2] == [None, [-0.25, -0.25]]
    assert logprobs["text_offset"][:3] == [0, 1, 2]
    (event,) = await events(servicer(Script(*script)), call(stream=True, **given))
    assert (event["choices"][0]["text"], event["choices"][0]["logprobs"]) == ("abab", logprobs)
    plain = await events(servicer(Script(*greeting())), call(stream=True, echo=True, n=2))
    texts = ["".join(e["choices"][0]["text"] for e in plain if e["choices"][0]["index"] == i) for i in range(2)]
    assert texts == ["sayhello word"] * 2


async def test_logprobs_of_a_completion_are_lists_beside_each_other():
    _, reply = await whole(servicer(Script(scored())), call(logprobs=2))
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -2.0]
    assert [sorted(each.values()) for each in logprobs["top_logprobs"]] == [[-1.5, -0.5], [-2.0]]
    assert logprobs["text_offset"] == [3, 3 + len(logprobs["tokens"][0])]


async def test_offsets_go_on_from_piece_to_piece():
    first, last = scored(), scored()
    pieces = await events(servicer(Script(replace(first, finish_reason=None), last)), call(logprobs=2, stream=True))
    offsets = [each["choices"][0]["logprobs"]["text_offset"] for each in pieces]
    tokens = [token for each in pieces for token in each["choices"][0]["logprobs"]["tokens"]]
    assert offsets[1][0] == len("say") + sum(map(len, tokens[:2]))


async def test_logprobs_of_a_chat_are_one_entry_a_token():
    messages = [{"role": "user", "content": "say"}]
    script = Script(scored())
    _, reply = await whole(with_template(script), call(CHAT, messages=messages, logprobs=True, top_logprobs=2))
    first, second = reply["choices"][0]["logprobs"]["content"]
    assert (first["logprob"], len(first["top_logprobs"]), second["top_logprobs"]) == (-0.5, 2, [])
    assert bytes(first["bytes"]).decode("utf-8", "replace") == first["token"]


# Several samples


async def test_each_of_n_samples_has_a_session_and_a_seed():
    script = Script(*greeting())
    record = Recorded()
    _, reply = await whole(servicer(script, record), call(n=3, seed=5))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in reply["choices"]} == {"hello word"}
    seeds = [sample_seed(5, index) for index in range(3)]
    assert [choice["outrider"]["seed"] for choice in reply["choices"]] == seeds
    assert sorted(request.sampling.seed for request in script.requests) == sorted(seeds)
    num_tokens = 3 * len(ids_of("hello") + ids_of(" wor") + ids_of("d"))
    assert reply["usage"] == usage(3, num_tokens)
    assert record.by_label("request_success_total") == {"stop": 3}


async def test_a_stream_of_n_samples_tells_them_apart():
    pieces = await events(servicer(Script(*greeting())), call(n=2, stream=True))
    texts = {0: "", 1: ""}
    for piece in pieces:
        texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    assert texts == {0: "hello word", 1: "hello word"}


async def test_a_sample_that_fails_ends_the_others():
    class OneFails(Script):
        async def generate(self, request):
            if len(self.requests) == 1:
                self.requests.append(request)
                raise Overloaded("full", 1.0)
            async for chunk in super().generate(request):
                yield chunk

    script = OneFails(is_endless=True)
    head, _ = await error(servicer(script), call(n=2))
    assert head.status == 429
    assert script.num_open == 0


# Cancellation and slow readers


@pytest.mark.parametrize("num_samples", [1, 2])
async def test_a_stream_that_is_closed_frees_its_sessions(num_samples):
    script, record = Script(greeting()[0], is_endless=True), Recorded()
    async with aclosing(servicer(script, record).respond(call(stream=True, n=num_samples))) as parts:
        assert isinstance(await anext(parts), Head)
        assert script.num_open == num_samples
    assert script.num_open == 0
    assert record.by_label("request_failure_total") == {"CANCELLED": num_samples}


async def test_a_whole_reply_that_is_cancelled_frees_its_session():
    script = Script(greeting()[0], is_endless=True)
    task = asyncio.create_task(respond(servicer(script), call()))
    await asyncio.wait_for(script.is_waiting.wait(), 10)
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), script.num_open) == (True, 0)


async def test_no_more_is_taken_from_a_session_than_a_slow_reader_takes():
    num_taken = 0

    class Eager(Script):
        async def generate(self, request):
            nonlocal num_taken
            async for chunk in super().generate(request):
                num_taken += 1
                yield chunk

    script = Eager(*[greeting()[0]] * 100, greeting()[1])
    async with aclosing(servicer(script).respond(call(stream=True))) as parts:
        for _ in range(4):
            await anext(parts)
        await asyncio.sleep(0.01)
        assert num_taken < 10


# Errors


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (Overloaded("full", 0.5), 429, "rate_limit_error"),
        (Unavailable("nobody"), 503, "server_error"),
        (DeadlinePassed("late"), 504, "timeout_error"),
        (UnsoundScores("NaN"), 422, "invalid_request_error"),
        (ValueError("secret"), 500, "server_error"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_errors_have_the_status_that_clients_know(raised, status, kind, is_stream):
    record = Recorded()
    head, content = await error(servicer(Script(raised), record), call(stream=is_stream))
    assert (head.status, content["type"], content["param"]) == (status, kind, None)
    assert "secret" not in content["message"]
    assert record.by_label("request_failure_total") == {getattr(raised, "status", "INTERNAL"): 1}
    if status == 429:
        assert (dict(head.headers)["retry-after"], dict(head.headers)["retry-after-ms"]) == ("1", "500")


async def test_an_error_within_a_stream_is_its_last_event():
    head, body = await respond(servicer(Script(greeting()[0], Unavailable("lost"))), call(stream=True))
    assert head.status == 200
    assert json.loads(body.decode().split("\n\n")[-2].removeprefix("data: "))["error"]["message"] == "lost"
    assert DONE not in body


async def test_a_bad_field_is_named_and_counted():
    record = Recorded()
    head, content = await error(servicer(Script(), record), call(temperature=-1))
    assert (head.status, content["param"], content["type"]) == (400, "temperature", "invalid_request_error")
    assert record.by_label("request_failure_total") == {"INVALID_ARGUMENT": 1}


async def test_an_unknown_model_is_not_found():
    head, content = await error(servicer(Script()), call(model="other"))
    assert (head.status, content["param"], content["code"]) == (404, "model", "model_not_found")
    head, _ = await error(servicer(Script()), call("/v1/models/other", "GET"))
    assert head.status == 404


async def test_a_body_that_is_too_long_is_413():
    head, content = await error(servicer(Script()), call(user="x" * 700_000))
    assert (head.status, content["param"]) == (413, "body")


async def test_a_body_may_be_six_times_as_long_as_a_message_since_its_text_may_be_escaped():
    user = "\\u0078" * (LIMITS.max_message_bytes // 6 + 1)
    body = b'{"prompt": "say", "user": "%b"}' % user.encode()
    assert len(body) > LIMITS.max_message_bytes
    head, _ = await respond(servicer(Script(*greeting())), replace(call(), body=body))
    assert head.status == 200


@pytest.mark.parametrize(
    ("path", "method", "status", "said"),
    [
        ("/v1/embeddings", "POST", 404, "no embeddings"),
        ("/v1/responses/resp_1", "GET", 404, "keeps no responses"),
        ("/ui", "GET", 404, "nothing"),
        ("/metrics", "POST", 405, "GET"),
        ("/v1/images/generations", "POST", 404, "text alone"),
        (COMPLETIONS, "HEAD", 405, "POST"),
        (COMPLETIONS, "OPTIONS", 405, "POST"),
        (COMPLETIONS, "GET", 405, "POST"),
        ("/v1/models", "POST", 405, "GET"),
        ("/health", "DELETE", 405, "GET"),
    ],
)
async def test_what_is_not_there_is_said_clearly(path, method, status, said):
    head, content = await error(servicer(Script()), call(path, method))
    assert head.status == status
    assert said in content["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/pair", "/health", "/"])
async def test_head_asks_what_get_asks(path):
    """The HTTP server leaves out the body."""
    (head, *_), (of_get, *_) = [
        [part async for part in servicer(Script()).respond(call(path, m))] for m in ("HEAD", "GET")
    ]
    assert (head, head.status) == (of_get, 200)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": "say " * 300}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 60_000}, "prompt", "context_length_exceeded"),
        ({"prompt": [5] * 300}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 1000}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"bad_words": ["x" * 60_000]}, "bad_words[0]", None),
    ],
)
async def test_what_the_context_has_no_room_for_has_openai_s_code(fields, param, code):
    head, content = await error(servicer(Script()), call(**fields))
    assert (head.status, content["param"], content["code"]) == (400, param, code)


# The rest


async def test_models_are_listed():
    _, listed = await whole(servicer(Script()), call("/v1/models", "GET"))
    (card,) = listed["data"]
    assert (listed["object"], card["id"], card["object"], card["max_model_len"]) == ("list", "pair", "model", 200)
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "pair", "pair")
    _, one = await whole(servicer(Script()), call("/v1/models/pair", "GET"))
    assert one["id"] == "pair"


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic right", "right"])
async def test_a_token_is_asked_for_before_anything_is_read(tmp_path, authorization):
    (tmp_path / "tokens").write_text("right\n")
    http = servicer(Script(*greeting()), authenticator=Authenticator(tmp_path / "tokens"))
    head, content = await error(http, Call("POST", COMPLETIONS, authorization, CallId("mine"), b"no JSON"))
    assert (head.status, content["code"]) == (401, "invalid_api_key")
    assert dict(head.headers)["www-authenticate"] == "Bearer"
    status, _ = await whole(http, call(authorization="Bearer right"))
    assert status == 200
    assert (await whole(http, call("/health", "GET")))[0] == 200


async def test_health_says_when_nothing_new_is_taken():
    clock = MonotonicClock()
    models = Models([Hosted(Script(), served(), Meters(Recorded(), clock.now))])
    http = servicer(Script(), models=models)
    assert await whole(http, call("/health", "GET")) == (200, {"status": "ok"})
    models.is_winding_down = True
    assert (await error(http, call("/health", "GET")))[0].status == 503


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
)
async def test_what_an_engine_refuses_has_the_field_of_the_body(fields, param):
    """A grammar may be refused when the output has got to a place that cannot be followed."""
    script = Script(InvalidRequest("structured_output", "cannot be followed: it is too large"))
    head, content = await error(servicer(script), call(**fields))
    assert (head.status, content["param"]) == (400, param)
