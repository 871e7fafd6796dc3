"""A client that knows nothing of the service but what its reflection tells."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


@dataclass(frozen=True)
class Method:
    """One RPC, with messages of its own or with bytes."""

    descriptor: MethodDescriptor
    channel: grpc.aio.Channel

    def __str__(self) -> str:
        return str(self.descriptor.full_name)

    def request(self, **fields: Any) -> Message:
        return message_factory.GetMessageClass(self.descriptor.input_type)(**fields)

    async def __call__(self, *requests: Message | bytes) -> list[Message]:
        """The replies to a call with just these messages, however many. Raises: AioRpcError."""
        reply = message_factory.GetMessageClass(self.descriptor.output_type)
        path = f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"
        encoded = [each if isinstance(each, bytes) else each.SerializeToString() for each in requests]
        # A stream of messages whose call is refused before the first one is sent fails in the client (grpcio 1.85).
        is_one = len(encoded) == 1
        sent = encoded[0] if is_one else _each(encoded)
        if self.descriptor.server_streaming:
            begin = self.channel.unary_stream if is_one else self.channel.stream_stream
            return [message async for message in begin(path, None, reply.FromString)(sent)]
        begin = self.channel.unary_unary if is_one else self.channel.stream_unary
        return [await begin(path, None, reply.FromString)(sent)]

    async def error(self, *requests: Message | bytes) -> grpc.aio.AioRpcError:
        """The error of such a call."""
        try:
            replies = await self(*requests)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"{self} served what it was to refuse: {replies}")


async def _each(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def reflected(address: str, channel: grpc.aio.Channel) -> dict[str, Method]:
    """All methods of all services but reflection's own, by name."""
    with grpc.insecure_channel(address) as plain:
        database = ProtoReflectionDescriptorDatabase(plain)
        pool = DescriptorPool(database)
        services = [pool.FindServiceByName(name) for name in database.get_services() if "reflection" not in name]
    return {method.name: Method(method, channel) for method in _methods(services)}


def _methods(services: list[Any]) -> Iterator[MethodDescriptor]:
    for service in services:
        yield from service.methods
