"""The service as clients meet it, through Serve's own proxy."""

from __future__ import annotations

import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from deploy.cli import main
from outrider_client import Client, GenerateFields, NotFound, OutriderError, Overloaded, Retry
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.system.served import MAX_SESSIONS, MAX_TRIES

pytestmark = pytest.mark.ray
PROMPT = "the rain in spain"
LENGTH: GenerateFields = {"max_tokens": 24, "ignore_eos": True}
SAMPLED: GenerateFields = {**LENGTH, "temperature": 1.0, "seed": 7}


@pytest.fixture
def address(running):
    return running.address


@pytest.fixture
def client(address):
    with Client(address, retry=Retry(max_retries=0)) as client:
        yield client


@pytest.fixture
def stub(address):
    with grpc.insecure_channel(address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def request(max_tokens: int = 24, **fields: object) -> pb.GenerateRequest:
    stopping = pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=PROMPT, stopping=stopping, **fields)


def test_the_stream_the_whole_and_plain_decoding_are_the_same_tokens(client, stub):
    whole = stub.Generate(request(sampling=pb.SamplingParams(temperature=1.0, seed=7)))
    stream = drafted_stream(client)
    plain = client.generate(PROMPT, **SAMPLED, max_draft_tokens=0)
    assert tuple(whole.token_ids) == stream.token_ids == plain.token_ids
    assert plain.finish.speculation.drafted_tokens == 0


def drafted_stream(client):
    """The first of a few with guesses."""
    streams = (client.generate(PROMPT, **SAMPLED) for _ in range(MAX_TRIES))
    return next(stream for stream in streams if stream.finish.speculation.drafted_tokens)


def test_a_stream_is_resumed_where_it_broke_off(client):
    chunks = list(client.stream(PROMPT, **SAMPLED))
    received = [token for chunk in chunks[:2] for token in chunk.token_ids]
    rest = list(client.stream(PROMPT, **SAMPLED, resume_token_ids=received))
    assert "".join(chunk.text for chunk in chunks[2:]) == "".join(chunk.text for chunk in rest)
    assert chunks[-1].usage == rest[-1].usage


def test_any_output_can_be_repeated_by_the_seed_that_was_drawn_for_it(stub):
    first = stub.Generate(request())
    again = stub.Generate(request(sampling=pb.SamplingParams(seed=first.finish.seed)))
    assert again.token_ids == first.token_ids


def test_a_unary_refusal_names_the_field_in_its_trailers(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(request(sampling=pb.SamplingParams(top_p=2.0)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "sampling.top_p"


def test_a_refused_stream_says_the_field_and_nothing_else(client):
    with pytest.raises(OutriderError) as caught:
        client.generate(PROMPT, top_p=2.0)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message == "sampling.top_p: must be in (0, 1], got 2.0"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_relaxed_rule_is_served_by_its_name_and_tells_how_often_it_was_lenient(client, temperature):
    fields = GenerateFields(**LENGTH, temperature=temperature, seed=7, verification="lenient_coupled")
    exact = client.generate(PROMPT, **{**fields, "verification": "coupled"})
    assert exact.finish.speculation.relaxed_tokens == 0
    assert client.generate(PROMPT, **fields, lenience=1.0).token_ids == exact.token_ids
    assert client.generate(PROMPT, **fields, lenience=1e-9, max_draft_tokens=0).token_ids == exact.token_ids
    streams = (client.generate(PROMPT, **fields, lenience=1e-9) for _ in range(MAX_TRIES))
    relaxed = next(stream for stream in streams if stream.finish.speculation.relaxed_tokens)
    assert relaxed.finish.speculation.relaxed_tokens <= relaxed.finish.speculation.accepted_tokens
    assert len(relaxed.token_ids) == 24


@pytest.mark.parametrize("draft_temperature", [0.3, 3.0])
def test_a_draft_temperature_changes_no_token_of_a_seeded_output(client, draft_temperature):
    fields = GenerateFields(**LENGTH, temperature=1.0, seed=7)
    exact = client.generate(PROMPT, **fields, max_draft_tokens=0)
    assert client.generate(PROMPT, **fields, draft_temperature=draft_temperature).token_ids == exact.token_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_temperature": 0.0}, "speculation.draft_temperature: must be in "),
        ({"verification": "lenient_rejection"}, "speculation.lenience: must be given with lenient_rejection"),
        ({"lenience": 0.5}, "speculation.lenience: must not be given with coupled"),
        ({"verification": "typical", "resume_token_ids": [5]}, "resume_token_ids: must be empty with typical"),
    ],
)
def test_speculation_is_refused_by_the_field_that_is_wrong(client, fields, message):
    with pytest.raises(OutriderError, match=message) as caught:
        client.generate(PROMPT, **SAMPLED, **fields)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(NotFound, match=r"NOT_FOUND.*'outrider-demo'"):
        client.generate(PROMPT, model="gpt")


def test_what_is_one_too_many_is_refused_and_there_is_room_again_when_a_stream_is_dropped(client):
    streams = [client.stream(PROMPT, max_tokens=1500, ignore_eos=True) for _ in range(MAX_SESSIONS)]
    for stream in streams:
        next(stream)
    with pytest.raises(Overloaded, match="RESOURCE_EXHAUSTED"):
        client.generate(PROMPT)
    streams[0].close()
    assert until_accepted(client, LENGTH).usage.completion_tokens == 24
    for stream in streams[1:]:
        stream.close()


def until_accepted(client: Client, fields: GenerateFields, timeout_s: float = 20.0):
    """A cancellation takes a moment to arrive."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return client.generate(PROMPT, **fields)
        except Overloaded:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_a_deadline_ends_the_stream_and_frees_its_place(client):
    for _ in range(MAX_SESSIONS + 1):
        with pytest.raises(OutriderError, match="DEADLINE_EXCEEDED"):
            until_accepted(client, {"max_tokens": 400, "ignore_eos": True, "timeout_s": 0.05})
    assert until_accepted(client, LENGTH).usage.completion_tokens == 24


def test_the_other_methods_answer(client, stub):
    info = client.model_info()
    assert (info.model, info.target.architecture, info.max_draft_tokens) == ("outrider-demo", "LlamaForCausalLM", 8)
    ids = stub.Tokenize(pb.TokenizeRequest(text="안녕")).token_ids
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "안녕"


def test_health_is_checked_watched_and_listed(address):
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert stub.Check(health_pb2.HealthCheckRequest()).status == serving
        assert stub.List(health_pb2.HealthListRequest()).statuses["outrider.v1.GenerationService"].status == serving
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == serving
        watch.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="x"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_the_services(address, version):
    with grpc.insecure_channel(address) as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        names = {service.name for service in next(ask(iter([question]))).list_services_response.service}
    assert {"outrider.v1.GenerationService", "grpc.health.v1.Health"} <= names


def test_the_command_line_streams_from_it(address, capsys):
    arguments = ("generate", "the rain", "--address", address, "--max-tokens", "8", "--temperature", "0")
    assert main.main(arguments) == 0
    out, err = capsys.readouterr()
    assert len(out) > 1
    assert "target passes" in err


def test_model_info_reports_the_state_of_control(client):
    client.generate(PROMPT, **SAMPLED)
    control = client.model_info().control
    assert (control.policy, control.draft_tokens) == ("static", 8)
    assert control.verify_s
    assert min(control.verify_s.values()) > 0


def test_a_trace_has_a_verification_for_every_target_pass(client):
    chunks = list(client.stream(PROMPT, **LENGTH, trace=True))
    calls = [call for chunk in chunks for call in chunk.trace]
    verified = [call for call in calls if call.call == "verify"]
    stats = chunks[-1].finish.speculation
    assert len(verified) == stats.target_passes
    assert sum(call.guesses for call in verified) == stats.drafted_tokens
    assert sum(call.used for call in verified) == stats.accepted_tokens
    for call in calls:
        assert 0 <= call.sent_s <= call.received_s
        assert call.timing is not None
        assert call.timing.waited_s + call.timing.computed_s <= call.received_s - call.sent_s
    assert not any(chunk.trace for chunk in client.stream(PROMPT, **LENGTH))


def test_streams_run_side_by_side(client):
    results: dict[int, tuple[int, ...]] = {}

    def run(seed: int) -> None:
        results[seed] = until_accepted(client, {**SAMPLED, "seed": seed}).token_ids

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: client.generate(PROMPT, **{**SAMPLED, "seed": seed}).token_ids for seed in (1, 2)} == results
