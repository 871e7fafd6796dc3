"""Both versions of reflection, on Serve's own gRPC server in this process."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2 as pb
from ray.serve._private import grpc_util
from ray.serve.config import gRPCOptions

from deploy.grpc import reflect_by_both_versions
from protos.outrider.v1 import generation_pb2_grpc

OURS = "outrider.v1.GenerationService"


def _handler(service_method, streaming_type):
    async def handle(request, context):
        raise AssertionError

    return handle


async def answers(version, *questions, is_enabled=True, monkeypatch=None):
    """Answers of a server that is started like Serve's."""
    monkeypatch.setattr(grpc_util, "enable_server_reflection", grpc_util.enable_server_reflection)
    monkeypatch.setattr(grpc_util, "gRPCGenericServer", _Server)
    reflect_by_both_versions()
    options = gRPCOptions(port=0, enable_reflection=is_enabled)
    monkeypatch.setattr(
        gRPCOptions,
        "grpc_servicer_func_callable",
        [generation_pb2_grpc.add_GenerationServiceServicer_to_server],
    )
    _, server = await grpc_util.start_grpc_server(_handler, options, event_loop=asyncio.get_running_loop())
    try:
        async with grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            ask = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                pb.ServerReflectionRequest.SerializeToString,
                pb.ServerReflectionResponse.FromString,
            )
            asked = iter([pb.ServerReflectionRequest(**each) for each in questions])
            return [reply async for reply in ask(asked)]
    finally:
        await server.stop(None)


class _Server(grpc_util.gRPCGenericServer):
    """Says where it listens."""

    def add_insecure_port(self, address):
        self.port = super().add_insecure_port("localhost:0")
        return self.port


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_each_version_lists_the_services_and_describes_them_and_itself(version, monkeypatch):
    itself = f"grpc.reflection.{version}.ServerReflection"
    questions = [{"list_services": ""}, *({"file_containing_symbol": name} for name in (OURS, itself))]
    listed, *described = await answers(version, *questions, monkeypatch=monkeypatch)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {OURS, "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
    packages = [
        FileDescriptorProto.FromString(reply.file_descriptor_response.file_descriptor_proto[0]).package
        for reply in described
    ]
    assert packages == ["outrider.v1", f"grpc.reflection.{version}"]


async def test_a_service_that_is_set_to_reflect_nothing_does_not(monkeypatch):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answers("v1", {"list_services": ""}, is_enabled=False, monkeypatch=monkeypatch)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
