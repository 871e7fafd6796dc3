"""Limits of a connection with the options of Serve's gRPC server: metadata, and probes of silent streams."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from queue import SimpleQueue

import grpc
import pytest

from deploy.grpc.reading import Reader
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.deploy.grpc.rpc import Script, greeting, server

REQUEST = pb.GenerateRequest(text="say")


@pytest.mark.parametrize(("num_bytes", "is_taken"), [(12 * 1024, True), (40 * 1024, False)])
def test_metadata_is_bounded_and_the_connection_goes_on(num_bytes, is_taken):
    with server(Script(*greeting())) as address, grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        metadata = [("x-padding", "x" * num_bytes)]
        if is_taken:
            assert stub.Generate(REQUEST, metadata=metadata, timeout=30).text == "hello word"
        else:
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(REQUEST, metadata=metadata, timeout=30)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Generate(REQUEST, timeout=30).text == "hello word"


# Calls that are opened, and send nothing


def open_calls(channel: grpc.Channel, num: int) -> tuple[list[grpc.Call], threading.Event]:
    """Calls without a message until the event is set."""
    may_end = threading.Event()

    def nothing():
        may_end.wait(60)
        yield from ()

    begin = channel.stream_unary("/outrider.v1.GenerationService/Generate")
    return [begin.future(nothing(), timeout=60) for _ in range(num)], may_end


def test_a_call_whose_message_does_not_come_is_ended_and_the_connection_goes_on():
    reader = Reader(timeout_s=0.2)
    with server(Script(*greeting()), reader=reader) as address, grpc.insecure_channel(address) as channel:
        (silent,), may_end = open_calls(channel, 1)
        assert silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.2 s" in silent.details()
        may_end.set()
        assert generation_pb2_grpc.GenerationServiceStub(channel).Generate(REQUEST, timeout=30).text == "hello word"


def test_calls_without_a_message_are_bounded_and_leave_room_when_they_end():
    reader = Reader(max_unread=3)
    with server(Script(*greeting()), reader=reader) as address, grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        silent, may_end = open_calls(channel, 4)
        ended: SimpleQueue[grpc.Call] = SimpleQueue()
        for call in silent:
            call.add_done_callback(ended.put)
        refused = ended.get(timeout=30)
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "3 calls have sent no message yet" in refused.details()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(REQUEST, timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        may_end.set()
        assert {call.code() for call in silent if call is not refused} == {grpc.StatusCode.UNIMPLEMENTED}
        assert stub.Generate(REQUEST, timeout=30).text == "hello word"


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The preface of HTTP/2, with settings that change nothing (RFC 9113, 3.4)."""
MAX_CONCURRENT_STREAMS = 3
"""A setting's number."""


def test_a_connection_is_told_how_many_calls_it_may_have():
    with server(Script()) as address, socket.create_connection(address.split(":"), 30) as connection:
        connection.sendall(PREFACE)
        with connection.makefile("rb") as replies:
            length, kind = struct.unpack(">I", b"\0" + replies.read(3))[0], replies.read(6)[0]
            assert kind == 4, "the server's settings come first"
            settings = dict(struct.iter_unpack(">HI", replies.read(length)))
    assert settings[MAX_CONCURRENT_STREAMS] == 4096


class Silent(Script):
    """Says its first piece, and the second after a minute."""

    async def generate(self, request):
        async for chunk in super().generate(request):
            yield chunk
            if chunk is self.steps[0]:
                await asyncio.sleep(60)


@pytest.mark.slow
def test_a_client_may_probe_every_eleven_seconds_while_its_stream_is_silent():
    probing = [("grpc.keepalive_time_ms", 11_000), ("grpc.http2.max_pings_without_data", 0)]
    with server(Silent(*greeting())) as address, grpc.insecure_channel(address, probing) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert [chunk.text for chunk in stub.GenerateStream(REQUEST)] == ["hello", " word"]
