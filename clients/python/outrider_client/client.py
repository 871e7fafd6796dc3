"""The blocking client, generated from `aio.py`: change that, and run `python clients/python/blocking.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, Unpack

import grpc

from outrider_client._attempts import Attempts, RetryBudget
from outrider_client._io import Cut
from outrider_client._io import blocking as io
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


class Client:
    """Calls Outrider at one of several addresses. Use it as a context manager, or `close` it.

    May be shared by threads. All methods that make calls raise OutriderError.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all streams and connections. Later calls raise."""
        for channel in self._servers.close():
            io.close_channel(channel)

    def stream(self, prompt: str | None = None, **fields: Unpack[GenerateFields]) -> Stream:
        """The chunks of one completion. The stream continues if a server dies."""
        request = to_message(prompt, fields)
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        return Stream(self._servers, Resumption(request, self._attempts(timeout_s)))

    def generate(self, prompt: str | None = None, **fields: Unpack[GenerateFields]) -> Completion:
        """One whole completion. Streamed internally, so that tokens already received survive a server failure."""
        with self.stream(prompt, **fields) as stream:
            return to_completion(list(stream), stream.request_id, stream.num_calls)

    def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> tuple[int, ...]:
        """Token ids of `text`, by default with the special tokens around a prompt."""
        request = pb.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        reply = self._call("Tokenize", request, timeout_s)
        return tuple(reply.token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> str:
        """The text of `token_ids`."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        reply = self._call("Detokenize", request, timeout_s)
        return str(reply.text)

    def list_models(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> tuple[ListedModel, ...]:
        """The models that requests can name. The first is the default."""
        return to_models(self._call("ListModels", pb.ListModelsRequest(), timeout_s))

    def model_info(self, *, model: str | None = None, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> ModelInfo:
        """The served model of that name, and its defaults."""
        return to_model_info(self._call("GetModelInfo", pb.GetModelInfoRequest(model=model), timeout_s))

    def is_serving(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether the server in use takes requests. If not, the client switches to the next address."""
        address, stub = self._servers.current()
        try:
            request = details_pb2.HealthCheckRequest()
            reply = io.reply_of(stub.Check(request, timeout=timeout_s, metadata=self._servers.metadata))
        except (Cut, grpc.RpcError):
            self._servers.leave(address)
            return False
        return bool(reply.status == details_pb2.HealthCheckResponse.SERVING)

    def wait_until_serving(self, timeout_s: float) -> None:
        """Return as soon as a server takes requests. Raises: DeadlinePassed."""
        end_s = time.monotonic() + timeout_s
        while not self.is_serving():
            if time.monotonic() >= end_s:
                message = f"{self._servers} does not serve after {timeout_s:g} s"
                raise DeadlinePassed(grpc.StatusCode.DEADLINE_EXCEEDED, message)
            io.sleep(POLL_S)

    def _call(self, method: str, request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            address, stub = self._servers.current()
            begin = getattr(stub, method)
            try:
                timeout_s = attempts.begin()
                reply = io.reply_of(begin(request, timeout=timeout_s, metadata=self._servers.metadata))
            except Cut:
                continue  # cut by `close` of this client; `current` raises
            except grpc.RpcError as error:
                pause_s = attempts.failed(error_of(error))
            else:
                attempts.progressed()
                return reply
            self._servers.leave(address)
            io.sleep(pause_s)

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retry, self._budget, timeout_s)


class Stream(io.Closing, Iterator[Chunk]):
    """An iterator of chunks.

    The call is cancelled by leaving the `with` block, by `close`, and by garbage collection.
    """

    def __init__(self, servers: Servers[io.Channel], resumption: Resumption) -> None:
        self._servers = servers
        self._resumption = resumption
        self._call: io.Reading | None = None
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the stream. Any thread may do so; the iteration ends for the one that waits for a chunk."""
        self._closing.set()
        if self._call is not None:
            self._call.cancel()

    def __next__(self) -> Chunk:
        try:
            chunk = self._next()
        except io.CANCELLED:
            self._call = None  # gRPC has cancelled the call; the next wait makes another
            raise
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self.close()
            raise StopIteration
        return chunk

    def _next(self) -> Chunk | None:
        while not self._closing.is_set():
            message, pause_s = self._read()
            if message is not None:
                if (chunk := self._resumption.take(message)) is not None:
                    return chunk
                continue
            self._call = None
            if self._resumption.is_finished:
                return None
            self._servers.leave(self._address)
            io.wait(self._closing, pause_s)
        return None

    def _read(self) -> tuple[pb.GenerateChunk | None, float]:
        """(message, 0), or (None, seconds to wait before the next call). Raises if there is no next call."""
        try:
            message = (self._call or self._begin()).read()
        except Cut:
            return None, 0.0  # cut by `close` of this stream or of its client
        except grpc.RpcError as error:
            return None, 0.0 if self._closing.is_set() else self._resumption.broke(error_of(error))
        return (message, 0.0) if message is not None else (None, self._resumption.ended())

    def _begin(self) -> io.Reading:
        self._address, stub = self._servers.current()
        begun = self._resumption.begin()
        call = stub.GenerateStream(begun.request, timeout=begun.timeout_s, metadata=self._servers.metadata)
        self._call = reading = io.Reading(call)
        if self._closing.is_set():  # closed in the meantime, when there was no call to cancel yet
            reading.cancel()
        return reading
