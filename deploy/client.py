"""A thin client: one channel, the generated stubs, and errors that a person can read.

Knows the wire format alone; nothing of Ray or the models. The command line, the demo and tests call the service by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A reply with many logprobs is longer than gRPC's own limit of 4 MiB."""
POLL_S = 0.1


class CallFailed(Exception):
    """The server refused a call, ended it early, or cannot be reached; `str()` of it is what the server says."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Completion:
    """A stream that has come to its end."""

    token_ids: tuple[int, ...]
    usage: pb.Usage
    finish: pb.Finish
    duration_s: float
    """From the call to the last chunk, as the client saw it."""


class Client:
    """Calls one server. Use it as a context manager, or `close` it."""

    def __init__(self, address: str, token: str | None = None) -> None:
        """`token`: what the server asks its callers for."""
        self.address = address
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        self._channel = grpc.insecure_channel(address, options)
        self._service = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        """One completion, whole. Raises: CallFailed."""
        with _Failures():
            response: pb.GenerateResponse = self._service.Generate(
                request, timeout=_timeout_s(request), metadata=self._metadata
            )
        return response

    def stream(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateChunk]:
        """One completion, piece by piece; a stream that is not read to its end is cancelled. Raises: CallFailed."""
        with _Failures():
            call = self._service.GenerateStream(request, timeout=_timeout_s(request), metadata=self._metadata)
            try:
                yield from call
            finally:
                call.cancel()

    def complete(
        self, request: pb.GenerateRequest, show: Callable[[pb.GenerateChunk], None] = lambda _: None
    ) -> Completion:
        """Stream to the end; `show` is given each chunk as it comes. Raises: CallFailed."""
        started, duration_s = time.monotonic(), 0.0
        token_ids: list[int] = []
        chunk = pb.GenerateChunk()
        for chunk in self.stream(request):  # to its very end, where an error may still come
            duration_s = time.monotonic() - started
            token_ids += chunk.token_ids
            show(chunk)
        if not chunk.HasField("finish"):
            raise CallFailed(grpc.StatusCode.DATA_LOSS, "the stream ended without saying how")
        return Completion(tuple(token_ids), chunk.usage, chunk.finish, duration_s)

    def model_info(self, timeout_s: float = 10.0, model: str = "") -> pb.GetModelInfoResponse:
        """What is served by that name, and its defaults. Raises: CallFailed."""
        request = pb.GetModelInfoRequest(model=model)
        with _Failures():
            response: pb.GetModelInfoResponse = self._service.GetModelInfo(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return response

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; a special one has none. Raises: CallFailed."""
        request = pb.DetokenizeRequest(token_ids=[token_id], skip_special_tokens=True)
        with _Failures():
            response: pb.DetokenizeResponse = self._service.Detokenize(request, metadata=self._metadata)
        return response.text

    def is_serving(self, timeout_s: float = 2.0) -> bool:
        """Whether the server is there and takes requests."""
        try:
            reply: health_pb2.HealthCheckResponse = self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
        is_serving: bool = reply.status == health_pb2.HealthCheckResponse.SERVING
        return is_serving

    def wait_until_serving(self, timeout_s: float) -> None:
        """Return as soon as the server takes requests. Raises: TimeoutError."""
        end = time.monotonic() + timeout_s
        while not self.is_serving():
            if time.monotonic() >= end:
                raise TimeoutError(f"{self.address} does not serve after {timeout_s:g} s")
            time.sleep(POLL_S)


def _timeout_s(request: pb.GenerateRequest) -> float | None:
    """The deadline of the call: it does not reach the replica, so the request carries it, too."""
    return request.timeout_s if request.HasField("timeout_s") else None


class _Failures:
    """Turns gRPC's errors into CallFailed."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, grpc.RpcError):
            raise CallFailed(error.code(), error.details() or "the server gave no reason") from None
