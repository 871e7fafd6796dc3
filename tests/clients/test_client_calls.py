"""Calls over the wire and back: statuses, trailers, tokens, addresses, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from outrider_client import (
    AsyncClient,
    CallTrace,
    Client,
    Connection,
    DeadlinePassed,
    Inconsistent,
    InvalidRequest,
    ListedModel,
    NotFound,
    OutriderError,
    Overloaded,
    Retry,
    ServiceError,
    Timing,
    Tls,
    Unauthenticated,
    VerifiedBlock,
)
from outrider_client._proto import generation_pb2 as pb
from tests.clients.scripted import Refusal, Scripted, chunk, listening
from tests.clients.story import Story
from tests.clients.tls import certificate
from tests.deploy.grpc.rpc import server

pytestmark = pytest.mark.thorough

WHOLE = [chunk(1, 2, total=2), chunk(3, total=3, is_last=True)]
IDS = (1, 2, 3)
NO_RETRY = Retry(max_retries=0)


def trailers(code, *details):
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message="m", details=packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)


def hang(context):
    """Until the client goes away."""
    gone = threading.Event()
    if context.add_callback(gone.set):
        gone.wait(10)


# Health, models and traces


def test_health_is_what_the_server_says_of_it(connect):
    with server(Story(())) as address:
        client = connect(["localhost:1", address])
        assert not client.call("is_serving")
        assert client.call("is_serving"), "the next address is in use"
        client.call("wait_until_serving", 5.0)


def test_a_server_without_health_does_not_serve(connect):
    with listening(Scripted([])) as address:
        assert not connect(address).call("is_serving")


def test_waiting_for_a_server_that_does_not_come_ends(connect):
    with pytest.raises(DeadlinePassed, match=r"localhost:1 does not serve after 0\.2 s"):
        connect("localhost:1").call("wait_until_serving", 0.2)


def test_every_method_may_name_a_model(connect):
    scripted = Scripted([pb.TokenizeResponse()], [pb.DetokenizeResponse()], [pb.GetModelInfoResponse(verification=1)])
    with listening(scripted) as address:
        client = connect(address)
        client.call("tokenize", "x", model="m")
        client.call("detokenize", [1], model="m")
        client.call("model_info", model="m")
    assert [request.model for request in scripted.requests] == ["m"] * 3


def test_models_are_listed(connect):
    message = pb.ListedModel(name="one", max_context_tokens=4096, vocab_size=512, has_draft=True)
    with listening(Scripted([pb.ListModelsResponse(models=[message])])) as address:
        assert connect(address).call("list_models") == (ListedModel("one", 4096, 512, True),)


def test_a_trace_comes_with_the_chunks_that_its_calls_led_to(connect):
    last = chunk(1, total=1, is_last=True)
    last.trace.add(call=pb.CALL_GROWTH, sent_s=0.5, received_s=1.0, guesses=4, used=2)
    last.trace.add(call=pb.CALL_VERIFY, sent_s=1.0, received_s=2.0, timing=pb.Timing(computed_s=0.75, rows=3))
    block = {"token_ids": (5, 6), "parents": (-1, -1), "sources": ("draft", "ngram"), "path": (1,), "next_token_id": 7}
    last.trace[1].verified.CopyFrom(pb.VerifiedBlock(**block))
    scripted = Scripted([last])
    with listening(scripted) as address:
        completion = connect(address).generate(trace=True)
    growth = CallTrace("growth", 0.5, 1.0, 4, 2, None)
    assert completion.trace == (
        growth,
        CallTrace("verify", 1.0, 2.0, 0, 0, Timing(0.0, 0.75, 0, 3), VerifiedBlock(**block)),
    )
    assert scripted.requests[0].speculation.trace


# Statuses


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "ABORTED", "CANCELLED", "RESOURCE_EXHAUSTED"])
def test_what_may_get_better_is_tried_again(connect, code):
    scripted = Scripted([chunk(1, 2, total=2), Refusal(grpc.StatusCode[code])], [chunk(3, total=3, is_last=True)])
    with listening(scripted) as address:
        assert connect(address).generate().token_ids == IDS
    assert list(scripted.requests[1].resume_token_ids) == [1, 2]


FINAL = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": NotFound,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": Unauthenticated,
    "DEADLINE_EXCEEDED": DeadlinePassed,
    "FAILED_PRECONDITION": OutriderError,
    "OUT_OF_RANGE": OutriderError,
    "UNIMPLEMENTED": OutriderError,
    "UNKNOWN": OutriderError,
    "ALREADY_EXISTS": OutriderError,
}


@pytest.mark.parametrize("code", FINAL)
def test_what_cannot_get_better_is_not_tried_again(connect, code):
    scripted = Scripted([chunk(1, 2, total=2), Refusal(grpc.StatusCode[code], "because")])
    with listening(scripted) as address:
        client = connect(address)
        for call in (client.generate, lambda: client.call("tokenize", "x")):
            with pytest.raises(OutriderError, match=f"^{code}: ") as caught:
                call()
            assert type(caught.value) is FINAL[code] or code == "DEADLINE_EXCEEDED"
            scripted.answers = [[Refusal(grpc.StatusCode[code], "because")]]
    assert len(scripted.requests) == 2


def test_a_message_that_is_too_long_is_not_asked_for_again(connect):
    scripted = Scripted([chunk(1, total=1), chunk(*[5] * 5000, total=5001)])
    with listening(scripted) as address:
        client = connect(address, connection=Connection(max_message_bytes=2000))
        with pytest.raises(OutriderError, match=r"RESOURCE_EXHAUSTED: .*larger than max"):
            client.generate()
    assert len(scripted.requests) == 1


@pytest.mark.parametrize(
    ("details", "field"),
    [("sampling.top_p: must be in (0, 1]", "sampling.top_p"), ("stopping.stop[3]: long", "stopping.stop[3]")],
)
def test_the_field_is_read_from_a_streams_message_for_serve_drops_its_trailers(connect, details, field):
    scripted = Scripted([Refusal(grpc.StatusCode.INVALID_ARGUMENT, details)])
    with listening(scripted) as address, pytest.raises(InvalidRequest) as caught:
        connect(address).chunks()
    assert (caught.value.field, caught.value.message) == (field, details)


def test_the_field_is_read_from_trailers_where_there_are_any(connect):
    violation = error_details_pb2.BadRequest.FieldViolation(field="token_ids[0]", description="no")
    code = grpc.StatusCode.INVALID_ARGUMENT
    refusal = Refusal(code, "no", trailers(code, error_details_pb2.BadRequest(field_violations=[violation])))
    with listening(Scripted([refusal])) as address, pytest.raises(InvalidRequest) as caught:
        connect(address).call("detokenize", [1])
    assert caught.value.field == "token_ids[0]"


def test_a_message_that_names_no_field_has_none(connect):
    scripted = Scripted([Refusal(grpc.StatusCode.INVALID_ARGUMENT, "Bad request: no")])
    with listening(scripted) as address, pytest.raises(InvalidRequest) as caught:
        connect(address).chunks()
    assert caught.value.field is None


def test_an_overloaded_server_is_left_alone_for_as_long_as_it_says(connect):
    code, delay = grpc.StatusCode.RESOURCE_EXHAUSTED, duration_pb2.Duration(nanos=300_000_000)
    refusal = Refusal(code, "full", trailers(code, error_details_pb2.RetryInfo(retry_delay=delay)))
    with listening(Scripted([refusal], [pb.TokenizeResponse(token_ids=[7])])) as address:
        begun = time.monotonic()
        assert connect(address).call("tokenize", "x") == (7,)
        assert time.monotonic() - begun >= 0.3
    with listening(Scripted([refusal])) as address, pytest.raises(Overloaded) as caught:
        connect(address, retry=NO_RETRY).call("tokenize", "x")
    assert caught.value.retry_after_s == pytest.approx(0.3)


def test_each_call_that_is_answered_gives_its_retry_back(connect):
    refused, answered = [Refusal(grpc.StatusCode.UNAVAILABLE)], [pb.TokenizeResponse(token_ids=[7])]
    with listening(Scripted(*[refused, answered] * 3)) as address:
        client = connect(address, retry=Retry(initial_backoff_s=0.0, budget=1))
        assert [client.call("tokenize", "x") for _ in range(3)] == [(7,)] * 3


def test_trailers_that_are_no_status_hide_nothing(connect):
    refusal = Refusal(grpc.StatusCode.NOT_FOUND, "no model", (("grpc-status-details-bin", b"\xff\xff"),))
    with listening(Scripted([refusal])) as address, pytest.raises(NotFound, match="no model"):
        connect(address).call("tokenize", "x")


def test_a_stream_that_ends_well_without_its_last_chunk_goes_on(connect):
    scripted = Scripted([chunk(1, total=1)], [], WHOLE[1:])
    scripted.answers[2] = [chunk(2, total=2), chunk(3, total=3, is_last=True)]
    with listening(scripted) as address:
        assert connect(address).generate().token_ids == IDS


def test_a_server_that_does_not_continue_what_was_received_is_found_out(connect):
    scripted = Scripted([chunk(1, 2, total=2), Refusal(grpc.StatusCode.UNAVAILABLE)], [chunk(1, 2, 3, total=3)])
    with listening(scripted) as address, pytest.raises(Inconsistent, match="5 tokens"):
        connect(address).generate()


# Addresses


def test_the_next_address_is_tried_and_kept(connect):
    broken = Scripted([chunk(1, total=1), Refusal(grpc.StatusCode.UNAVAILABLE)])
    whole = Scripted([chunk(2, total=2), chunk(3, total=3, is_last=True)], WHOLE)
    with listening(broken) as first, listening(whole) as second:
        client = connect([first, second])
        assert client.generate().token_ids == client.generate().token_ids == IDS
    assert (len(broken.requests), len(whole.requests)) == (1, 2)


def test_an_address_where_nobody_listens_is_passed_over_by_all_calls(connect):
    with listening(Scripted([pb.TokenizeResponse(token_ids=[7])])) as address:
        assert connect(["localhost:1", address]).call("tokenize", "x") == (7,)
    with listening(Scripted(WHOLE)) as address:
        assert connect(["localhost:1", address]).generate().num_calls == 2


def test_nobody_anywhere_is_an_error_once_retries_are_spent(connect):
    with pytest.raises(ServiceError, match="UNAVAILABLE"):
        connect(["localhost:1", "localhost:2"]).generate()


def test_a_client_without_addresses_is_none(kind):
    with pytest.raises(ValueError, match="address"):
        Client([])


class Continuing(Scripted):
    """Says what the client has not received yet."""

    def _answer(self, request, context):
        received = len(request.resume_token_ids)
        yield chunk(*IDS[received:], total=len(IDS), is_last=True)


def test_a_server_that_comes_back_at_its_address_is_found_again(connect):
    first = Scripted([chunk(1, 2, total=2), hang])
    with listening(first) as address:
        client = connect(address, retry=Retry(initial_backoff_s=0.05))
        results = []
        reader = threading.Thread(target=lambda: results.append(client.generate()))
        reader.start()
        assert first.is_asked.wait(5)
    with listening(Continuing(), port=int(address.rpartition(":")[2])):
        reader.join(20)
    assert results[0].token_ids == IDS
    assert results[0].num_calls > 1


# Credentials


def test_a_token_goes_with_each_call_and_is_not_shown(connect):
    scripted = Scripted(WHOLE)
    with listening(scripted) as address:
        client = connect(address, token="secret")
        client.generate()
        assert scripted.metadata()["authorization"] == "Bearer secret"
        scripted.answers = [[pb.TokenizeResponse()]]
        client.call("tokenize", "x")
        assert scripted.metadata()["authorization"] == "Bearer secret"
        assert "secret" not in repr(client.client)
        assert address in repr(client.client)
        connect(address).call("tokenize", "x")
        assert "authorization" not in scripted.metadata()


def test_tls_encrypts_and_checks_the_server(connect):
    root, key = certificate("outrider.test")
    credentials = grpc.ssl_server_credentials([(key, root)])
    with listening(Scripted(WHOLE), credentials) as address:
        tls = Tls(root_certificates=root, server_name="outrider.test")
        assert connect(address, tls=tls, token="secret").generate().token_ids == IDS
        for wrong in (None, Tls(), Tls(root_certificates=root)):
            with pytest.raises(ServiceError):
                connect(address, tls=wrong, retry=NO_RETRY).generate()


def test_a_server_can_check_the_client(connect):
    root, key = certificate("outrider.test")
    credentials = grpc.ssl_server_credentials([(key, root)], root, require_client_auth=True)
    with listening(Scripted(WHOLE), credentials) as address:
        tls = Tls(root, certificate=root, private_key=key, server_name="outrider.test")
        assert connect(address, tls=tls).generate().token_ids == IDS
        with pytest.raises(ServiceError):
            connect(address, tls=Tls(root, server_name="outrider.test"), retry=NO_RETRY).generate()
        assert "PRIVATE" not in repr(tls)


# Time


def test_the_callers_time_covers_all_calls_and_what_is_left_goes_with_each(connect):
    scripted = Scripted([lambda _: time.sleep(0.2), Refusal(grpc.StatusCode.UNAVAILABLE)], WHOLE)
    with listening(scripted) as address:
        connect(address).generate(timeout_s=5.0)
    first, second = (request.timeout_s for request in scripted.requests)
    assert first == pytest.approx(5.0, abs=0.1)
    assert 4.0 < second <= first - 0.2
    assert scripted.contexts[1].time_remaining() is not None


def test_a_stream_ends_when_the_callers_time_does(connect):
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address, pytest.raises(DeadlinePassed):
        connect(address).generate(timeout_s=0.3)


def test_retries_end_when_the_callers_time_does(connect):
    scripted = Scripted([Refusal(grpc.StatusCode.UNAVAILABLE, "gone")])
    with listening(scripted) as address, pytest.raises(DeadlinePassed) as caught:
        connect(address, retry=Retry(max_retries=10**6, initial_backoff_s=0.05)).generate(timeout_s=1.0)
    assert 1 < len(scripted.requests) < 200
    assert isinstance(caught.value.__cause__, ServiceError) or caught.value.__cause__ is None


# Leaving


def test_a_stream_that_is_left_is_cancelled():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address, Client(address) as client:
        with client.stream("x") as stream:
            assert next(stream).token_ids == (1,)
        assert scripted.is_cancelled.wait(5)
        assert list(stream) == []


def test_a_stream_that_is_forgotten_is_cancelled():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address, Client(address) as client:
        next(client.stream("x"))
        gc.collect()
        assert scripted.is_cancelled.wait(5)


def test_another_thread_may_close_a_stream_that_waits():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address, Client(address) as client:
        stream = client.stream("x")
        next(stream)
        closer = threading.Timer(0.1, stream.close)
        closer.start()
        assert list(stream) == []
        assert scripted.is_cancelled.wait(5)
        closer.join()


def test_a_stream_that_pauses_before_it_goes_on_can_be_closed():
    scripted = Scripted([Refusal(grpc.StatusCode.UNAVAILABLE)])
    long = Retry(initial_backoff_s=1000.0, max_backoff_s=1000.0)
    with listening(scripted) as address, Client(address, retry=long) as client:
        stream = client.stream("x")
        closer = threading.Timer(0.3, stream.close)
        closer.start()
        assert list(stream) == []
        closer.join()


def test_a_client_that_is_closed_ends_its_streams_and_takes_no_calls():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address:
        client = Client(address)
        stream = client.stream("x")
        next(stream)
        closer = threading.Timer(0.1, client.close)
        closer.start()
        with pytest.raises(OutriderError, match="closed"):
            next(stream)
        closer.join()
        assert scripted.is_cancelled.wait(5)
        for call in (lambda: client.generate("x"), lambda: client.tokenize("x")):
            with pytest.raises(OutriderError, match="closed"):
                call()


def test_a_stream_that_failed_stays_at_its_end():
    with listening(Scripted([Refusal(grpc.StatusCode.NOT_FOUND)])) as address, Client(address) as client:
        stream = client.stream("x")
        with pytest.raises(NotFound):
            next(stream)
        assert list(stream) == []


async def waited(event):
    return await asyncio.to_thread(event.wait, 5)


async def test_asyncio_a_stream_that_is_left_is_cancelled():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address:
        async with AsyncClient(address) as client:
            async with client.stream("x") as stream:
                assert (await anext(stream)).token_ids == (1,)
            assert await waited(scripted.is_cancelled)
            assert [chunk async for chunk in stream] == []


async def test_asyncio_a_stream_that_is_forgotten_is_cancelled():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address:
        async with AsyncClient(address) as client:
            await anext(client.stream("x"))
            gc.collect()
            assert await waited(scripted.is_cancelled)


async def test_asyncio_a_task_that_is_cancelled_cancels_its_call():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address:
        async with AsyncClient(address) as client:
            task = asyncio.ensure_future(client.generate("x"))
            assert await waited(scripted.is_asked)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await waited(scripted.is_cancelled)
    assert len(scripted.requests) == 1


async def test_asyncio_another_task_may_close_a_stream_that_waits():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address:
        async with AsyncClient(address) as client:
            stream = client.stream("x")
            await anext(stream)
            asyncio.get_running_loop().call_later(0.1, stream.close)
            assert [chunk async for chunk in stream] == []
    assert len(scripted.requests) == 1


async def test_asyncio_waiting_may_time_out_and_begin_again_without_loss():
    scripted = Scripted([chunk(1, total=1), hang], [chunk(2, 3, total=3, is_last=True)])
    with listening(scripted) as address:
        async with AsyncClient(address) as client:
            stream = client.stream("x")
            received = list((await anext(stream)).token_ids)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.2)
            async for piece in stream:
                received += piece.token_ids
    assert received == [1, 2, 3]


async def test_asyncio_a_client_that_is_closed_ends_its_streams_and_takes_no_calls():
    scripted = Scripted([chunk(1, total=1), hang])
    with listening(scripted) as address:
        client = AsyncClient(address)
        stream = client.stream("x")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(client.close()))
        with pytest.raises(OutriderError, match="closed"):
            await anext(stream)
        assert await waited(scripted.is_cancelled)
        for call in (client.generate, client.tokenize):
            with pytest.raises(OutriderError, match="closed"):
                await call("x")


async def test_asyncio_a_client_that_is_closed_ends_its_calls():
    scripted = Scripted([hang])
    with listening(scripted) as address:
        client = AsyncClient(address)
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(client.close()))
        with pytest.raises(OutriderError, match="closed"):
            await client.tokenize("x")
