"""Limits of what callers can do to the service and to each other, over the wire, by a client built from reflection."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from reflected import reflected
from served import MAX_SESSIONS

from deploy.launch.cluster import MAX_MESSAGE_BYTES
from tests.deploy.grpc.rpc import HEALTH, METHODS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

KINDS = {**METHODS, **HEALTH}
"""The messages of all RPCs."""
TEXTS = [
    (name, field)
    for name in sorted(KINDS)
    for field in ("text", "service")
    if field in KINDS[name].DESCRIPTOR.fields_by_name
]
LATIN = "caf\xe9".encode("latin-1")


@pytest.fixture
async def methods(running):
    async with running.channel() as channel:
        yield reflected(running.address, channel)


def completion(methods, max_tokens=4, **fields):
    return methods["GenerateStream"].request(
        **{"text": "def f(x):\n", **fields},
        sampling={"temperature": 0.0},
        stopping={"max_tokens": max_tokens, "ignore_eos": True},
    )


def detail(error, kind):
    """The google.rpc detail of that kind, of those of an error."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    detail = kind()
    assert any(packed.Unpack(detail) for packed in status.details)
    return detail


def test_reflection_tells_every_method(running, methods):
    assert set(methods) == set(KINDS)


async def test_a_completion_is_served(methods):
    chunks = await methods["GenerateStream"](completion(methods))
    (whole,) = await methods["Generate"](completion(methods))
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
    assert all(chunk.token_ids or chunk.HasField("finish") for chunk in chunks)


async def test_a_completion_is_held_to_what_it_must_look_like(methods):
    """The client knows by reflection alone. What cannot be followed is refused by name before any model work."""
    request = methods["Generate"].request
    given = {"text": "x = ", "sampling": {"temperature": 1.0, "seed": 5}, "stopping": {"max_tokens": 64}}
    (whole,) = await methods["Generate"](request(**given, structured_output={"regex": "[a-f]{3}-[0-9]{2}"}))
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", whole.text)
    assert whole.finish.reason == 1, "it has ended by itself"
    plain = request(**given, structured_output={"regex": "[a-f]{3}-[0-9]{2}"}, speculation={"max_draft_tokens": 0})
    assert (await methods["Generate"](plain))[0].token_ids == whole.token_ids
    (chosen,) = await methods["Generate"](request(**given, structured_output={"choice": {"choices": ["yes", "no"]}}))
    assert chosen.text in ("yes", "no")
    error = await methods["Generate"].error(request(**given, structured_output={"json_schema": '{"not": {}}'}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "structured_output.json_schema"


# What cannot be decoded


@pytest.mark.parametrize("name", sorted(KINDS))
async def test_a_corrupt_message_is_an_invalid_argument_and_no_class_of_ours_is_told(methods, name):
    error = await methods[name].error(b"\xff\xff\xff")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "corrupt" in error.details()
    assert "DecodeError" not in error.details()


@pytest.mark.parametrize(("name", "field"), TEXTS)
async def test_text_that_is_not_utf_8_is_an_invalid_argument_that_names_the_field(methods, name, field):
    error = await methods[name].error(
        methods[name].request(**{field: "CAFE"}).SerializeToString().replace(b"CAFE", LATIN)
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == field


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("num_messages", [0, 2])
async def test_a_call_has_exactly_one_message(methods, name, num_messages):
    request = completion(methods) if name.startswith("Generate") else methods[name].request()
    error = await methods[name].error(*[request] * num_messages)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "one message" in error.details()


@pytest.mark.parametrize("name", ["Generate", "GenerateStream"])
async def test_a_wrong_field_is_named_in_the_details_of_streams_too(methods, name):
    error = await methods[name].error(completion(methods, request_id="x" * 200))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "request_id"


# What is too long


async def test_what_no_context_holds_is_refused_by_its_length(methods):
    (info,) = await methods["GetModelInfo"](methods["GetModelInfo"].request())
    longest = info.target.max_context_tokens * 31  # bytes of the demo vocabulary's longest token
    error = await methods["Generate"].error(completion(methods, text="x" * (longest + 1)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "text"
    assert f"{longest + 1} bytes" in error.details()


@pytest.mark.parametrize("num_bytes", [4_000_000, MAX_MESSAGE_BYTES - 100, MAX_MESSAGE_BYTES + 1, 50_000_000])
async def test_a_message_over_any_limit_is_refused(methods, num_bytes):
    error = await methods["GenerateStream"].error(completion(methods, text="x" * num_bytes))
    is_over = num_bytes > MAX_MESSAGE_BYTES
    assert error.code() is (grpc.StatusCode.RESOURCE_EXHAUSTED if is_over else grpc.StatusCode.INVALID_ARGUMENT)
    assert ("larger than max" if is_over else "bytes long") in error.details()


async def test_what_is_compressed_is_served_and_is_no_way_around_the_limits(running):
    async with grpc.aio.insecure_channel(running.address, compression=grpc.Compression.Gzip) as channel:
        methods = reflected(running.address, channel)
        plain, compressed = completion(methods), completion(methods, text="def f(x):\n")
        answers = [await methods["GenerateStream"](each) for each in (plain, compressed)]
        # How the tokens are divided into chunks depends on rounds.
        assert len({tuple(token for chunk in each for token in chunk.token_ids) for each in answers}) == 1
        bomb = await methods["GenerateStream"].error(completion(methods, text="x" * 50_000_000))  # 50 KB on the way
        assert bomb.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        long = await methods["GenerateStream"].error(completion(methods, text="x" * 4_000_000))
        assert long.code() is grpc.StatusCode.INVALID_ARGUMENT


# What others do


@asynccontextmanager
async def streams(methods, num, max_tokens):
    """Yields the times of the chunks of `num` streams in progress, stream by stream."""
    method = methods["GenerateStream"]
    path = f"/{method.descriptor.containing_service.full_name}/{method.descriptor.name}"
    request = completion(methods, max_tokens).SerializeToString()
    calls = [method.channel.unary_stream(path)(request) for _ in range(num)]
    times: list[list[float]] = [[] for _ in calls]

    async def read(call, times):
        async for _ in call:
            times.append(time.perf_counter())

    reading = [asyncio.ensure_future(read(*each)) for each in zip(calls, times, strict=True)]
    async with asyncio.timeout(60):
        while not all(times):  # noqa: ASYNC110  the client's own lists, and nobody who could set an event
            await asyncio.sleep(0.01)
    try:
        yield times
    finally:
        for call in calls:
            call.cancel()
        await asyncio.wait(reading)


def longest_gap_s(times):
    return max(later - earlier for each in times for earlier, later in itertools.pairwise(each))


async def test_a_flood_of_long_messages_is_refused_and_what_streams_goes_on(methods, running):
    """How long the longest gap is, `python -m bench edge` measures; here it has to be no stall of seconds."""
    permitted = [completion(methods, text="def f(x): " * 6_000)] * 4  # as long as the context lets a text be
    too_long = [completion(methods, text="x" * size) for size in (3_900_000, 8_000_000, 30_000_000)]
    async with streams(methods, 2, max_tokens=1500) as times, running.channel() as other:
        began_s, flood = time.perf_counter(), reflected(running.address, other)["Generate"]
        codes = [(await flood.error(message)).code() for _ in range(3) for message in (*permitted, *too_long)]
        assert len(codes) == 21
        flood_s = time.perf_counter() - began_s
        assert longest_gap_s(times) < max(2.0, flood_s / 10), "a busy machine takes longer for all of it"


async def test_a_full_service_refuses_streams_with_a_delay_and_takes_them_again_when_there_is_room(methods):
    await methods["GenerateStream"](completion(methods))  # after which the proxy knows how many places there are
    async with streams(methods, MAX_SESSIONS, max_tokens=1500):
        for name in ("Generate", "GenerateStream"):
            error = await methods[name].error(completion(methods))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds >= 1  # a forecast
        (health,) = await methods["Check"](methods["Check"].request())
        assert health.status == 1
        (info,) = await methods["GetModelInfo"](methods["GetModelInfo"].request())
        assert info.model
    assert await served_when_told_to_try_again(methods) >= 1


async def served_when_told_to_try_again(methods):
    """Chunks of a stream. A client's cancelled call has ended for it before the service has heard of that."""
    for _ in range(10):
        try:
            return len(await methods["GenerateStream"](completion(methods, max_tokens=1)))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(detail(error, error_details_pb2.RetryInfo).retry_delay.seconds)
    return 0


async def test_of_a_burst_of_calls_as_many_are_served_as_there_are_places_and_nobody_is_cancelled(methods):
    await asyncio.sleep(2.5)  # so that the proxy asks again

    async def attempt():
        try:
            return len(await methods["GenerateStream"](completion(methods, max_tokens=64)))
        except grpc.aio.AioRpcError as error:
            return error.code()

    outcomes = await asyncio.gather(*(attempt() for _ in range(5 * MAX_SESSIONS)))
    refused = [outcome for outcome in outcomes if outcome is grpc.StatusCode.RESOURCE_EXHAUSTED]
    served = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(served) >= MAX_SESSIONS
    assert len(served) + len(refused) == len(outcomes)
