"""Server reflection in both versions: newer clients ask for v1 only, Serve (Ray 2.60) has v1alpha.

The versions differ only in the name of the package. Runs in the proxy's process.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from ray.serve._private import grpc_util
from ray.serve.generated.serve_pb2 import DESCRIPTOR as SERVE

ALPHA, V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICE, METHOD = f"{V1}.ServerReflection", "ServerReflectionInfo"
FILE = "grpc/reflection/v1/reflection.proto"


def reflect_by_both_versions() -> None:
    """Make Serve's gRPC servers offer both versions of reflection. Must run before one is created."""
    grpc_util.enable_server_reflection = enable_both


def enable_both(server: Any) -> None:
    """Enable v1alpha and v1 for all services except Serve's own."""
    names = grpc_util.get_service_names(server.generic_rpc_handlers) - {
        service.full_name for service in SERVE.services_by_name.values()
    }
    _describe_v1()
    for name in (reflection.SERVICE_NAME, SERVICE):
        server.add_passthrough_service(name)
    served = {*names, reflection.SERVICE_NAME, SERVICE}
    servicer = reflection.aio.ReflectionServicer(served)  # type: ignore[attr-defined]  # its stubs lack it
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handlers = {
        METHOD: grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)


def _describe_v1() -> None:
    """Register v1's file descriptor, so that clients can ask for it."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileContainingSymbol(SERVICE)
    except KeyError:
        file = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        renamed = text_format.Parse(text_format.MessageToString(file).replace(ALPHA, V1), FileDescriptorProto())
        renamed.name = FILE
        pool.AddSerializedFile(renamed.SerializeToString())
