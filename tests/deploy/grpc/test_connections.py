"""What a connection may hold, with the options of Serve's gRPC server: metadata, and probes of silent streams."""

from __future__ import annotations

import asyncio

import grpc
import pytest

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
