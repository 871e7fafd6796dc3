"""The client for asyncio. `clients/python/blocking.py` generates the blocking one from this file."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, Unpack

import grpc

from outrider_client._attempts import Attempts, RetryBudget
from outrider_client._io import Cut
from outrider_client._io import aio as io
from outrider_client._proto import details_pb2
from outrider_client._proto import generation_pb2 as pb
from outrider_client._replies import to_completion, to_model_info, to_models
from outrider_client._resume import Resumption
from outrider_client._servers import Servers
from outrider_client._statuses import error_of
from outrider_client.errors import DeadlinePassed
from outrider_client.options import (
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_S,
    HEALTH_TIMEOUT_S,
    POLL_S,
    Connection,
    Retry,
    Tls,
)
from outrider_client.records import Chunk, Completion, ListedModel, ModelInfo
from outrider_client.request import GenerateFields, to_message


class AsyncClient:
    """Calls Outrider at one of several addresses. Use it as an async context manager, or `close` it.

    Belongs to the event loop that it is first used in. All methods that make calls raise OutriderError.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        retry: Retry | None = None,
        connection: Connection | None = None,
    ) -> None:
        """`token` is sent with each call as `authorization: Bearer`. If an address fails, the next is tried."""
        self._retry = retry or Retry()
        self._servers = Servers(address, io.open_channel, connection or Connection(), tls, token)
        self._budget = RetryBudget(self._retry.budget)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._servers)!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all streams and connections. Later calls raise."""
        for channel in self._servers.close():
            await io.close_channel(channel)

    def stream(self, prompt: str | None = None, **fields: Unpack[GenerateFields]) -> AsyncStream:
        """The chunks of one completion. The stream continues if a server dies."""
        request = to_message(prompt, fields)
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        return AsyncStream(self._servers, Resumption(request, self._attempts(timeout_s)))

    async def generate(self, prompt: str | None = None, **fields: Unpack[GenerateFields]) -> Completion:
        """One whole completion. Streamed internally, so that tokens already received survive a server failure."""
        async with self.stream(prompt, **fields) as stream:
            return to_completion([chunk async for chunk in stream], stream.request_id, stream.num_calls)

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> tuple[int, ...]:
        """Token ids of `text`, by default with the special tokens around a prompt."""
        request = pb.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        reply = await self._call("Tokenize", request, timeout_s)
        return tuple(reply.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> str:
        """The text of `token_ids`."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        reply = await self._call("Detokenize", request, timeout_s)
        return str(reply.text)

    async def list_models(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> tuple[ListedModel, ...]:
        """The models that requests can name. The first is the default."""
        return to_models(await self._call("ListModels", pb.ListModelsRequest(), timeout_s))

    async def model_info(self, *, model: str | None = None, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> ModelInfo:
        """The served model of that name, and its defaults."""
        return to_model_info(await self._call("GetModelInfo", pb.GetModelInfoRequest(model=model), timeout_s))

    async def is_serving(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server in use takes requests. If not, the client switches to the next address."""
        address, stub = self._servers.current()
        try:
            request = details_pb2.HealthCheckRequest()
            reply = await io.reply_of(stub.Check(request, timeout=timeout_s, metadata=self._servers.metadata))
        except (Cut, grpc.RpcError):
            self._servers.leave(address)
            return False
        return bool(reply.status == details_pb2.HealthCheckResponse.SERVING)

    async def wait_until_serving(self, timeout_s: float) -> None:
        """Return as soon as a server takes requests. Raises: DeadlinePassed."""
        end_s = time.monotonic() + timeout_s
        while not await self.is_serving():
            if time.monotonic() >= end_s:
                message = f"{self._servers} does not serve after {timeout_s:g} s"
                raise DeadlinePassed(grpc.StatusCode.DEADLINE_EXCEEDED, message)
            await io.sleep(POLL_S)

    async def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            address, stub = self._servers.current()
            begin = getattr(stub, method)
            try:
                timeout_s = attempts.begin()
                reply = await io.reply_of(begin(request, timeout=timeout_s, metadata=self._servers.metadata))
            except Cut:
                continue  # cut by `close` of this client; `current` raises
            except grpc.RpcError as error:
                pause_s = attempts.failed(error_of(error))
            else:
                attempts.progressed()
                return reply
            self._servers.leave(address)
            await io.sleep(pause_s)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._budget, timeout_s)


class AsyncStream(io.AsyncClosing, AsyncIterator[Chunk]):
    """An asynchronous iterator of chunks.

    The call is cancelled by leaving the `async with` block, by `close`, and by garbage collection.

    Waiting for a chunk may be cancelled, by a timeout for example, and begun again: nothing is lost by that.
    """

    def __init__(self, servers: Servers[io.Channel], resumption: Resumption) -> None:
        self._servers = servers
        self._resumption = resumption
        self._call: io.AsyncReading | None = None
        self._address = ""
        self._closing = io.Event()

    @property
    def request_id(self) -> str:
        """Name of the request in the server's logs."""
        return self._resumption.request_id

    @property
    def num_calls(self) -> int:
        """Number of calls made for this stream so far."""
        return self._resumption.num_calls

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the stream. Any task may do so; the iteration ends for the one that waits for a chunk."""
        self._closing.set()
        if self._call is not None:
            self._call.cancel()

    async def __anext__(self) -> Chunk:
        try:
            chunk = await self._next()
        except io.CANCELLED:
            self._call = None  # gRPC has cancelled the call; the next wait makes another
            raise
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self.close()
            raise StopAsyncIteration
        return chunk

    async def _next(self) -> Chunk | None:
        while not self._closing.is_set():
            message, pause_s = await self._read()
            if message is not None:
                if (chunk := self._resumption.take(message)) is not None:
                    return chunk
                continue
            self._call = None
            if self._resumption.is_finished:
                return None
            self._servers.leave(self._address)
            await io.wait(self._closing, pause_s)
        return None

    async def _read(self) -> tuple[pb.GenerateChunk | None, float]:
        """(message, 0), or (None, seconds to wait before the next call). Raises if there is no next call."""
        try:
            message = await (self._call or self._begin()).read()
        except Cut:
            return None, 0.0  # cut by `close` of this stream or of its client
        except grpc.RpcError as error:
            return None, 0.0 if self._closing.is_set() else self._resumption.broke(error_of(error))
        return (message, 0.0) if message is not None else (None, self._resumption.ended())

    def _begin(self) -> io.AsyncReading:
        self._address, stub = self._servers.current()
        begun = self._resumption.begin()
        call = stub.GenerateStream(begun.request, timeout=begun.timeout_s, metadata=self._servers.metadata)
        self._call = reading = io.AsyncReading(call)
        if self._closing.is_set():  # closed in the meantime, when there was no call to cancel yet
            reading.cancel()
        return reading
