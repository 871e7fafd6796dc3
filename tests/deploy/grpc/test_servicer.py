from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from itertools import accumulate

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest

from core.errors import OutriderError, Overloaded, Unavailable
from core.records import Chunk, FinishReason, TokenLogprobs, Usage
from deploy.api import offload, sample_seed
from deploy.api.authentication import Authenticator
from deploy.api.hosted import Hosted
from deploy.api.offload import SHORT_BYTES
from deploy.api.proxy.admission import Places
from deploy.api.replies import MAX_DETAILS_CHARS
from deploy.grpc.servicer import MAX_WATCHES, Servicer
from deploy.grpc.status import DETAILS_KEY
from deploy.logs import JsonFormatter
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.grpc import rpc
from tests.deploy.grpc.rpc import TOKENIZER, Recorded, Script, greeting, ids_of

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REQUEST = pb.GenerateRequest(text="say", request_id="mine", sampling=pb.SamplingParams(seed=42))


class Context:
    """Serve's context of a call."""

    def __init__(self, *metadata) -> None:
        self.metadata = metadata
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailers: dict[str, bytes] = {}

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, trailing_metadata):
        self.trailers = dict(trailing_metadata)

    def invocation_metadata(self):
        return self.metadata

    def detail(self, kind):
        """The google.rpc detail of that kind, of those in the trailers."""
        status = status_pb2.Status.FromString(self.trailers[DETAILS_KEY])
        assert (status.code, status.message) == (self.code.value[0], self.details)
        detail = kind()
        assert any(packed.Unpack(detail) for packed in status.details)
        return detail


def servicer(*steps, **script) -> rpc.Encoding:
    return rpc.servicer(Script(*steps, **script))


async def test_a_stream_sends_each_chunk_and_ends_with_how_it_finished():
    chunks = [chunk async for chunk in servicer(*greeting()).GenerateStream(REQUEST, Context())]
    assert [(chunk.text, chunk.HasField("finish")) for chunk in chunks] == [("hello", False), (" word", True)]
    assert [list(chunk.guessed) for chunk in chunks][1][-1] is False
    assert {chunk.request_id for chunk in chunks} == {"mine"}
    finish = chunks[-1].finish
    assert (finish.reason, finish.stop, finish.seed) == (pb.FINISH_REASON_STOP, "!", 42)
    stats = finish.speculation
    assert (stats.target_passes, stats.draft_passes, stats.drafted_tokens) == (2, 1, 6)
    assert (stats.hits, stats.misses, stats.lookup_tokens, stats.continued_passes) == (3, 1, 2, 4)
    sources = [(each.name, each.drafted_tokens, each.accepted_tokens, each.failures) for each in stats.sources]
    assert sources == [("draft", 4, 1, 0), ("prompt_lookup", 2, 1, 1)]
    assert (stats.draft_time_s, stats.hidden_draft_time_s) == (0.5, 0.4)


async def test_a_unary_answer_is_the_whole_stream():
    response = await servicer(*greeting()).Generate(REQUEST, Context())
    assert response.text == "hello word"
    assert tuple(response.token_ids) == ids_of("hello") + ids_of(" wor") + ids_of("d")
    assert response.usage.completion_tokens == len(response.token_ids)
    assert response.finish.stop == "!"


async def test_logprobs_stay_with_their_tokens():
    logprobs = (TokenLogprobs(-0.5, ((7, -0.5), (8, -1.5))), TokenLogprobs(-2.0))
    chunk = Chunk("ab", (7, 9), (True, False), Usage(1, 2), logprobs, FinishReason.LENGTH, 9)
    response = await servicer(chunk).Generate(REQUEST, Context())
    assert [(entry.token_id, entry.logprob) for entry in response.logprobs] == [(7, -0.5), (9, -2.0)]
    assert [(top.token_id, top.logprob) for top in response.logprobs[0].top] == [(7, -0.5), (8, -1.5)]
    assert (response.finish.reason, response.finish.stop_token_id) == (pb.FINISH_REASON_LENGTH, 9)


async def test_the_prompt_s_logprobs_come_with_the_first_chunk_of_the_first_sample():
    scores = (TokenLogprobs(-0.5, ((7, -0.5),)), TokenLogprobs(-2.0))
    first = replace(greeting()[0], prompt_logprobs=scores)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), prompt_logprobs=1)
    chunks = [each async for each in servicer(first, greeting()[1]).GenerateStream(message, Context())]
    assert [(each.token_id, each.logprob, len(each.top)) for each in chunks[0].prompt_logprobs] == [
        (6, -0.5, 1),
        (7, -2.0, 0),
    ]
    assert not chunks[1].prompt_logprobs
    response = await servicer(first, greeting()[1]).Generate(message, Context())
    assert list(response.prompt_logprobs) == list(chunks[0].prompt_logprobs)


async def test_each_call_to_an_engine_comes_with_the_chunk_that_it_led_to():
    first, last = [chunk async for chunk in servicer(*greeting()).GenerateStream(REQUEST, Context())]
    assert [call.call for call in first.trace] == [pb.CALL_VERIFY]
    assert first.trace[0].timing == pb.Timing(waited_s=0.001, computed_s=0.005, passes=1, rows=3)
    assert last.trace[0] == pb.CallTrace(call=pb.CALL_GROWTH, sent_s=0.011, received_s=0.014, guesses=40, used=6)
    assert not last.trace[0].HasField("timing")
    assert not last.trace[0].HasField("verified")
    verified = last.trace[1].verified
    assert list(verified.path) == list(range(len(ids_of(" wor"))))
    assert [verified.token_ids[node] for node in verified.path] == list(ids_of(" wor"))
    assert (verified.parents[0], verified.sources[-2], verified.next_token_id) == (-1, "ngram", *ids_of("d"))
    response = await servicer(*greeting()).Generate(REQUEST, Context())
    assert list(response.trace) == [*first.trace, *last.trace]


@pytest.mark.parametrize("is_traced", [True, False])
async def test_a_trace_is_made_when_it_is_asked_for(is_traced):
    script = Script(*greeting())
    message = pb.GenerateRequest(text="say", speculation=pb.SpeculationParams(trace=is_traced))
    await rpc.servicer(script).Generate(message, Context())
    assert script.requests[0].wants_trace is is_traced


# Several samples

SEVERAL = pb.GenerateRequest(text="say", n=3, sampling=pb.SamplingParams(seed=42))


async def test_each_piece_of_several_samples_has_the_index_of_its_sample():
    chunks = [chunk async for chunk in servicer(*greeting()).GenerateStream(SEVERAL, Context())]
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert ["".join(chunk.text for chunk in own), own[-1].finish.seed] == ["hello word", sample_seed(42, index)]
    num_tokens = len(ids_of("hello") + ids_of(" wor") + ids_of("d"))
    assert chunks[-1].usage == pb.Usage(prompt_tokens=3, completion_tokens=3 * num_tokens)
    totals = [chunk.usage.completion_tokens for chunk in chunks]
    assert totals == list(accumulate(len(chunk.token_ids) for chunk in chunks))


async def test_a_unary_answer_has_all_samples_and_counts_the_prompt_once():
    record = Recorded()
    response = await rpc.servicer(Script(*greeting()), record).Generate(SEVERAL, Context())
    assert [sample.text for sample in response.samples] == ["hello word"] * 3
    assert [sample.finish.seed for sample in response.samples] == [sample_seed(42, index) for index in range(3)]
    assert (response.text, response.finish) == ("hello word", response.samples[0].finish)
    num_tokens = sum(len(sample.token_ids) for sample in response.samples)
    assert response.usage == pb.Usage(prompt_tokens=3, completion_tokens=num_tokens)
    assert record.by_label("request_success_total") == {"stop": 3}
    assert not (await servicer(*greeting()).Generate(REQUEST, Context())).samples


async def test_usage_counts_what_samples_were_resumed_with():
    outputs = [pb.TokenIds(ids=ids_of("hello")), pb.TokenIds()]
    message = pb.GenerateRequest(text="say", n=2, resume_samples=outputs, sampling=pb.SamplingParams(seed=1))
    first = await anext(servicer(*greeting()).GenerateStream(message, Context()))
    other = {0: 0, 1: len(ids_of("hello"))}[first.index]
    assert first.usage.completion_tokens == len(first.token_ids) + other


async def test_the_failure_of_one_sample_ends_all_of_them():
    script, context = Script(greeting()[0], Unavailable("gone")), Context()
    assert await rpc.servicer(script).Generate(SEVERAL, context) == pb.GenerateResponse()
    assert (context.code, script.num_open) == (grpc.StatusCode.UNAVAILABLE, 0)


# Measurements


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_both_methods_are_measured_alike(method):
    record = Recorded()
    call = getattr(rpc.servicer(Script(*greeting()), record), method)(REQUEST, Context())
    if method == "Generate":
        await call
    else:
        assert [chunk async for chunk in call]
    assert record["generation_tokens_total"] == len(ids_of("hello") + ids_of(" word"))
    assert record.by_label("request_success_total") == {"stop": 1}
    assert not record.by_label("request_failure_total")


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(
    ("step", "code"),
    [(Unavailable("gone"), "UNAVAILABLE"), (Overloaded("full", 1.0), "RESOURCE_EXHAUSTED"), (KeyError(), "INTERNAL")],
)
async def test_a_failure_is_counted_and_logged_by_the_code_that_the_client_sees(method, step, code, caplog):
    caplog.set_level("INFO", "deploy.calls")
    record, context = Recorded(), Context()
    call = getattr(rpc.servicer(Script(step), record), method)(REQUEST, context)
    empty = await (call if method == "Generate" else anext(call))
    assert empty == type(empty)()
    assert record.by_label("request_failure_total") == {code: 1}
    assert context.code is grpc.StatusCode[code]
    if method == "GenerateStream":  # it ends with its generator
        await call.aclose()
    assert f"{method}: {code} in " in caplog.text


@pytest.mark.parametrize("name", ["Generate", "Tokenize", "GetModelInfo", "Check"])
def test_a_method_has_the_name_of_its_rpc(name):
    """Serve's log calls it so."""
    assert getattr(Servicer, name).__name__ == name


async def test_a_refused_request_is_counted_too():
    record = Recorded()
    await rpc.servicer(Script(), record).Generate(pb.GenerateRequest(), Context())
    assert record.by_label("request_failure_total") == {"INVALID_ARGUMENT": 1}


async def test_a_client_that_goes_away_is_counted_as_cancelled_and_runs_no_longer():
    record, script = Recorded(), Script(greeting()[0], is_endless=True)
    stream = rpc.servicer(script, record).GenerateStream(REQUEST, Context())
    await anext(stream)
    assert script.num_open == 1
    await stream.aclose()
    assert script.num_open == 0
    assert record.by_label("request_failure_total") == {"CANCELLED": 1}


# Errors


async def test_a_unary_error_is_returned_with_the_field_in_its_trailers():
    context = Context()
    wrong = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=2.0))
    assert await servicer().Generate(wrong, context) == pb.GenerateResponse()
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.top_p" in context.details
    assert context.detail(error_details_pb2.BadRequest).field_violations[0].field == "sampling.top_p"


WRONG = pb.GenerateRequest(text="x", n=0)


@pytest.mark.parametrize(
    ("message", "metadata", "name"),
    [
        (WRONG, [("x-request-id", "header")], "header"),
        (pb.GenerateRequest(text="x", n=0, request_id="mine"), [("x-request-id", "header")], "mine"),
        (pb.GenerateRequest(text="x", request_id="x" * 129), [("x-request-id", "header")], "header"),
        (WRONG, [], None),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_every_error_tells_the_request_id_in_metadata_and_details(method, message, metadata, name):
    context = Context(*metadata, ("traceparent", TRACEPARENT))
    answer = getattr(servicer(), method)(message, context)
    await (answer if method == "Generate" else anext(answer))
    told = context.detail(error_details_pb2.RequestInfo).request_id
    assert told == context.trailers["x-request-id"]
    assert told == name or (name is None and len(told) == 32)
    assert context.trailers["traceparent"] == TRACEPARENT


@pytest.mark.parametrize("text", ["say", "say " * 10])
async def test_a_request_is_its_caller_s_and_waits_by_its_priority(tmp_path, text, monkeypatch):
    """Whether it is translated at once or, as long ones are, in a thread beside."""
    monkeypatch.setattr(offload, "SHORT_BYTES", 20)
    (tmp_path / "tokens").write_text("one\ntwo\n")
    authenticator, script = Authenticator(tmp_path / "tokens"), Script(*greeting())
    both = rpc.encoding([hosted("one", script)], authenticator)
    for token, priority in (("one", -2), ("two", 0), ("one", 7)):
        metadata = [("authorization", f"Bearer {token}"), ("x-request-id", f"{token}{priority}")]
        await both.Generate(pb.GenerateRequest(text=text, n=2, priority=priority), Context(*metadata))
    assert [each.priority for each in script.requests] == [-2, -2, 0, 0, 7, 7]
    assert [each.request_id for each in script.requests][::2] == ["one-2", "two0", "one7"]
    one, two = (authenticator.check([("authorization", f"Bearer {token}")]) for token in ("one", "two"))
    assert [each.caller for each in script.requests] == [one, one, two, two, one, one]


async def test_a_reply_is_named_as_its_call_is():
    context = Context(("x-request-id", "header"))
    assert (await servicer(*greeting()).Generate(pb.GenerateRequest(text="say"), context)).request_id == "header"
    assert (await servicer(*greeting()).Generate(REQUEST, context)).request_id == "mine"


SECRET = "the prompt is nobody's business"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"n": 0},
        {"request_id": SECRET * 9},
        {"model": SECRET},
        {"stopping": pb.StoppingParams(stop=[SECRET] * 99)},
        {"sampling": pb.SamplingParams(bad_words=[SECRET, ""])},
    ],
)
@pytest.mark.parametrize("step", [None, KeyError(), Unavailable("gone")])
async def test_no_log_has_anything_of_a_prompt_and_every_line_is_of_its_request(caplog, wrong, step):
    message = pb.GenerateRequest(**{"text": SECRET, "stopping": pb.StoppingParams(stop=[SECRET]), **wrong})
    with caplog.at_level(logging.DEBUG):
        await servicer(*(greeting() if step is None else [step])).Generate(message, Context(("x-request-id", "mine")))
        lines = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("deploy")]
    assert lines
    assert not [line for line in lines if SECRET in line]
    assert {json.loads(line)["request_id"] for line in lines} == {"mine"}


async def test_an_overloaded_service_says_when_to_come_again():
    context = Context()
    await servicer(Overloaded("full", 1.5)).Generate(REQUEST, context)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    delay = context.detail(error_details_pb2.RetryInfo).retry_delay
    assert (delay.seconds, delay.nanos) == (1, 500_000_000)


async def test_a_stream_that_fails_says_why_with_an_empty_message_and_ends():
    context = Context()
    stream = servicer(greeting()[0], Overloaded("full", 1.5)).GenerateStream(REQUEST, context)
    assert (await anext(stream)).text == "hello"
    assert context.code is None
    assert await anext(stream) == pb.GenerateChunk()
    assert (context.code, context.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert context.detail(error_details_pb2.RetryInfo).retry_delay.seconds == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_defect_is_told_by_an_id_that_the_log_has_and_by_nothing_else(method, caplog):
    context = Context()
    call = getattr(servicer(ZeroDivisionError("secret path")), method)(REQUEST, context)
    await (call if method == "Generate" else anext(call))
    assert context.code is grpc.StatusCode.INTERNAL
    assert "secret" not in context.details
    assert context.details.split()[-1] in caplog.text
    assert "ZeroDivisionError: secret path" in caplog.text


async def test_details_fit_in_the_trailers_however_long_the_error_is():
    context = Context()
    await servicer(OutriderError("안" * 10_000)).Generate(REQUEST, context)
    assert len(context.details) == MAX_DETAILS_CHARS


async def test_a_message_over_the_limit_is_refused():
    context = Context()
    await servicer().Generate(pb.GenerateRequest(text="x" * 100_001), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "100000 bytes" in context.details


async def test_a_long_prompt_is_translated_all_the_same():
    context = Context()
    await servicer().Generate(pb.GenerateRequest(text="ab" * SHORT_BYTES), context)
    assert context.details.startswith("text: must be at most")


# Cancellation


async def test_cancelling_a_call_closes_its_completion():
    script = Script(greeting()[0], is_endless=True)
    call = asyncio.create_task(rpc.servicer(script).Generate(REQUEST, Context()))
    await script.is_waiting.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert script.num_closed == 1


async def test_cancelling_a_stream_closes_its_completion():
    script = Script(greeting()[0], is_endless=True)
    stream = rpc.servicer(script).GenerateStream(REQUEST, Context())
    assert (await anext(stream)).text == "hello"
    waiting = asyncio.create_task(anext(stream))
    await script.is_waiting.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert script.num_closed == 1


async def test_a_stream_that_is_not_read_to_its_end_closes_its_completion():
    script = Script(*greeting())
    async with aclosing(rpc.servicer(script).GenerateStream(REQUEST, Context())) as stream:
        await anext(stream)
    assert script.num_closed == 1


# The other methods


async def test_model_info_says_what_is_served_and_what_unset_fields_take():
    info = await servicer().GetModelInfo(pb.GetModelInfoRequest(), Context())
    assert (info.model, info.target.vocab_size, info.HasField("draft")) == ("pair", TOKENIZER.vocab_size, False)
    assert info.max_draft_tokens == 0
    assert info.verification == pb.VERIFICATION_COUPLED
    assert info.sampling_defaults.temperature == 0.7
    assert not info.sampling_defaults.HasField("seed")


async def test_model_info_explains_how_far_is_drafted_and_why():
    control = (await servicer().GetModelInfo(pb.GetModelInfoRequest(), Context())).control
    assert control == pb.ControlReport(
        policy="adaptive", sessions=2, draft_tokens=5, block_tokens=12, reason=rpc.REPORT.reason,
        acceptance=[0.8, 0.7], hit_rate=0.9, verify_s={1: 0.01, 8: 0.0125}, draft_s={1: 0.002}, wire_s=0.001, changes=3,
        branch_s=0.0004,
    )  # fmt: skip


async def test_tokenize_and_detokenize_are_inverse():
    tokens = await servicer().Tokenize(pb.TokenizeRequest(text="안녕"), Context())
    assert tuple(tokens.token_ids) == TOKENIZER.encode("안녕")
    bare = await servicer().Tokenize(pb.TokenizeRequest(text="안녕", add_special_tokens=False), Context())
    assert tuple(bare.token_ids) == ids_of("안녕")
    request = pb.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=True)
    assert (await servicer().Detokenize(request, Context())).text == "안녕"


@pytest.mark.parametrize(
    ("method", "request_", "code", "named"),
    [
        ("Generate", pb.GenerateRequest(model="x", text="a"), grpc.StatusCode.NOT_FOUND, "'pair'"),
        ("GetModelInfo", pb.GetModelInfoRequest(model="x"), grpc.StatusCode.NOT_FOUND, "'pair'"),
        ("Tokenize", pb.TokenizeRequest(model="x"), grpc.StatusCode.NOT_FOUND, "'pair'"),
        ("Detokenize", pb.DetokenizeRequest(model="x"), grpc.StatusCode.NOT_FOUND, "'pair'"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[9_999]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids[0]"),
        ("Check", HealthCheckRequest(service="x"), grpc.StatusCode.NOT_FOUND, "no such service"),
    ],
)
async def test_a_wrong_call_is_refused(method, request_, code, named):
    context = Context()
    await getattr(servicer(), method)(request_, context)
    assert context.code is code
    assert named in context.details


def hosted(name: str, completions: Script) -> Hosted:
    named = replace(rpc.CONFIG, model_name=name)
    return Hosted(completions, rpc.served(named), rpc.Meters(rpc.Recorded(), rpc.MonotonicClock().now))


async def test_each_of_several_models_answers_to_its_name_and_the_first_to_none():
    models = [hosted(name, Script(*greeting())) for name in ("one", "two")]
    both = rpc.encoding(models)
    info = [await both.GetModelInfo(pb.GetModelInfoRequest(model=name), Context()) for name in ("", "one", "two")]
    assert [each.model for each in info] == ["one", "one", "two"]
    await both.Generate(pb.GenerateRequest(model="two", text="a"), Context())
    assert [len(model.completions.requests) for model in models] == [0, 1]
    context = Context()
    await both.Generate(pb.GenerateRequest(model="three", text="a"), context)
    assert context.details.endswith("there is no model 'three' here; this server has 'one', 'two'")


async def test_the_models_are_listed_and_text_is_that_of_the_model_that_is_named():
    models = [hosted(name, Script()) for name in ("one", "two")]
    models[1].served = replace(models[1].served, tokenizer=Reversed(), draft=rpc.INFO)
    both = rpc.encoding(models)
    listed = (await both.ListModels(pb.ListModelsRequest(), Context())).models
    assert [(model.name, model.has_draft) for model in listed] == [("one", False), ("two", True)]
    assert {(model.max_context_tokens, model.vocab_size) for model in listed} == {(200, TOKENIZER.vocab_size)}
    for name, ids in (("", ids_of("abc")), ("one", ids_of("abc")), ("two", ids_of("cba"))):
        request = pb.TokenizeRequest(model=name, text="abc", add_special_tokens=False)
        assert tuple((await both.Tokenize(request, Context())).token_ids) == ids
        detokenize = pb.DetokenizeRequest(model=name, token_ids=ids)
        assert (await both.Detokenize(detokenize, Context())).text == "abc"
    for method, request in (
        ("Tokenize", pb.TokenizeRequest(model="x")),
        ("Detokenize", pb.DetokenizeRequest(model="x")),
    ):
        context = Context()
        await getattr(both, method)(request, context)
        assert context.code is grpc.StatusCode.NOT_FOUND


class Reversed:
    """Another tokenizer than the first model's."""

    def encode(self, text, add_special_tokens):
        return TOKENIZER.encode(text[::-1], add_special_tokens)

    def decode(self, token_ids, skip_special_tokens):
        return TOKENIZER.decode(token_ids, skip_special_tokens)[::-1]

    def max_text_bytes(self, num_tokens):
        return TOKENIZER.max_text_bytes(num_tokens)


async def test_health_knows_the_services_and_watch_stays_open():
    listed = await servicer().List(HealthListRequest(), Context())
    assert {status.status for status in listed.statuses.values()} == {HealthCheckResponse.SERVING}
    for name in ("", *listed.statuses):
        reply = await servicer().Check(HealthCheckRequest(service=name), Context())
        assert reply.status == HealthCheckResponse.SERVING
    async with aclosing(servicer().Watch(HealthCheckRequest(), Context())) as watch:
        assert (await anext(watch)).status == HealthCheckResponse.SERVING
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(watch), 0.01)
    async with aclosing(servicer().Watch(HealthCheckRequest(service="x"), Context())) as watch:
        assert (await anext(watch)).status == HealthCheckResponse.SERVICE_UNKNOWN


async def test_health_says_that_it_winds_down_to_whoever_asks_or_watches():
    stopping = servicer()
    not_serving = HealthCheckResponse.NOT_SERVING
    async with aclosing(stopping.Watch(HealthCheckRequest(), Context())) as watch:
        assert (await anext(watch)).status == HealthCheckResponse.SERVING
        told = asyncio.ensure_future(anext(watch))
        assert await stopping.wind_down() == 0
        assert (await told).status == not_serving
    async with aclosing(stopping.Watch(HealthCheckRequest(), Context())) as watch:
        assert (await anext(watch)).status == not_serving
    assert (await stopping.Check(HealthCheckRequest(), Context())).status == not_serving
    listed = await stopping.List(HealthListRequest(), Context())
    assert {status.status for status in listed.statuses.values()} == {not_serving}


async def test_strangers_who_watch_leave_room_for_those_who_ask():
    async with AsyncExitStack() as watches:
        watched = servicer()
        for service in ["x"] + [""] * (MAX_WATCHES - 1):
            watch = watched.Watch(HealthCheckRequest(service=service), Context())
            await anext(await watches.enter_async_context(aclosing(watch)))
        context = Context()
        assert await anext(watched.Watch(HealthCheckRequest(), context)) == HealthCheckResponse()
        assert "too many Health watches" in context.details
        assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with aclosing(watched.Watch(HealthCheckRequest(), Context())) as watch:
        assert (await anext(watch)).status == HealthCheckResponse.SERVING


async def test_winding_down_counts_the_completions_of_all_models():
    models = [hosted(name, Script(*greeting())) for name in ("one", "two")]
    both = rpc.encoding(models)
    async with aclosing(both.GenerateStream(pb.GenerateRequest(model="two", text="a"), Context())) as stream:
        await anext(stream)
        assert await both.wind_down() == 1


async def test_cutting_off_ends_the_completions_of_all_models():
    models = [hosted(name, Script(*greeting())) for name in ("one", "two")]
    await rpc.encoding(models).cut_off()
    assert [model.completions.is_closed for model in models] == [True, True]


async def test_the_places_of_an_orchestrator_are_those_of_all_its_models():
    models = [hosted(name, Script()) for name in ("one", "two")]
    limits = models[0].served.config.limits
    assert await rpc.encoding(models).places() == Places(
        2 * (limits.max_sessions + limits.max_queued + 32),
        limits.retry_after_s,
        models[0].served.max_request_bytes,
        "one",
    )
