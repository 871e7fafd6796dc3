"""The RPCs of GenerationService and Health: what a client says comes in, what it is told goes out.

Knows the messages, the service and how Serve's proxy takes errors; must not know Ray actors or leases. Serve routes by
the method's name and passes `grpc_context` by that name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse

from core.config import ServiceConfig
from core.errors import InvalidRequest, Overloaded, UnknownModel
from core.ports import Clock
from core.records import Chunk, GenerationRequest, ModelInfo, Sampling
from deploy import responses, translate
from deploy.gate import Gate
from deploy.meters import Meters
from deploy.status import DETAILS_KEY, Status, status_of
from orchestrator.pilot import ControlReport
from orchestrator.text import Tokenizer
from protos.outrider.v1 import generation_pb2 as pb

SERVICE_NAMES = frozenset({"", "outrider.v1.GenerationService", "grpc.health.v1.Health"})
"""What Health is asked about; empty means the whole server."""
MAX_WATCHES = 16
"""Streams of Health at once; Serve counts them among the calls that a replica takes."""
WATCH_RETRY_S = 10.0
THREAD_BYTES = 16_384
"""A message longer than this is tokenized in a thread, so that the streams of others do not wait for it."""

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)
Result = TypeVar("Result")
Params = ParamSpec("Params")


class CallContext(Protocol):
    """What Serve lets a method say about its call."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, bytes]]) -> None: ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...


class Completions(Protocol):
    """What produces completions: orchestrator.service.Service, or a fake."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]: ...

    def report(self) -> ControlReport: ...

    def wind_down(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Served:
    """The pair behind the service, as requests are checked against it."""

    target: ModelInfo
    draft: ModelInfo | None
    tokenizer: Tokenizer
    defaults: Sampling
    config: ServiceConfig


@dataclass(slots=True)
class Hosted:
    """One model that requests can ask for."""

    completions: Completions
    served: Served
    meters: Meters

    @property
    def name(self) -> str:
        return self.served.config.model_name

    def show_draft(self, draft: ModelInfo) -> None:
        """Name the draft in GetModelInfo from now on."""
        self.served = replace(self.served, draft=draft)


class Servicer:
    """Answers every RPC of the application, Health apart to those alone who pass the gate.

    It never shows a client a stack trace.
    """

    def __init__(self, models: Sequence[Hosted], clock: Clock, gate: Gate) -> None:
        self._models = {model.name: model for model in models}
        self._default = models[0]
        self._clock = clock
        self._gate = gate
        self._is_winding_down = asyncio.Event()
        self._num_watches = 0

    async def wind_down(self) -> int:
        """Take nothing new from now on, and say so to whoever asks Health; returns how many completions go on."""
        self._is_winding_down.set()
        return sum(model.completions.wind_down() for model in self._models.values())

    async def Generate(self, request: pb.GenerateRequest, grpc_context: CallContext) -> pb.GenerateResponse:
        """One completion, returned whole."""
        return await self._answer(self._generate, request, pb.GenerateResponse(), grpc_context)

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: CallContext
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """One completion, each piece sent as soon as it is committed."""
        try:
            self._gate.check(grpc_context.invocation_metadata())
            async with aclosing(self._stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:  # noqa: BLE001 - at the rim: no client may see a stack trace
            status = _tell(grpc_context, error)
            # A stream that merely returns ends as OK; of what is raised here, Serve sends only the code and details.
            raise RuntimeError(status.message) from None

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, grpc_context: CallContext) -> pb.GetModelInfoResponse:
        """The models that are served, what unset fields take, and how drafting is doing."""
        return await self._answer(self._model_info, request, pb.GetModelInfoResponse(), grpc_context)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: CallContext) -> pb.TokenizeResponse:
        """The ids of a text."""
        return await self._answer(self._tokenize, request, pb.TokenizeResponse(), grpc_context)

    async def Detokenize(self, request: pb.DetokenizeRequest, grpc_context: CallContext) -> pb.DetokenizeResponse:
        """The text of some ids."""
        return await self._answer(self._detokenize, request, pb.DetokenizeResponse(), grpc_context)

    async def Check(self, request: HealthCheckRequest, grpc_context: CallContext) -> HealthCheckResponse:
        """Whether the service takes requests. It is called only when it does: a replica without models has no RPCs."""
        if request.service not in SERVICE_NAMES:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details("there is no such service here")
            return HealthCheckResponse()
        return HealthCheckResponse(status=self._health)

    async def List(self, request: HealthListRequest) -> HealthListResponse:  # noqa: ARG002 - it has no fields
        """The same for every service by name."""
        status = HealthCheckResponse(status=self._health)
        return HealthListResponse(statuses=dict.fromkeys(sorted(SERVICE_NAMES), status))

    async def Watch(self, request: HealthCheckRequest, grpc_context: CallContext) -> AsyncIterator[HealthCheckResponse]:
        """The same as a stream that stays open; it breaks when the replica goes away.

        Each takes one of the calls that a replica may have at once, and asks for no token: so there are not many.
        """
        if self._num_watches >= MAX_WATCHES:
            raise RuntimeError(_tell(grpc_context, Overloaded("health is watched by too many", WATCH_RETRY_S)).message)
        self._num_watches += 1
        try:
            async with aclosing(self._watched(request)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            self._num_watches -= 1

    async def _watched(self, request: HealthCheckRequest) -> AsyncGenerator[HealthCheckResponse, None]:
        if request.service not in SERVICE_NAMES:
            yield HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
            await asyncio.Event().wait()
        if not self._is_winding_down.is_set():
            yield HealthCheckResponse(status=self._health)
            await self._is_winding_down.wait()
        yield HealthCheckResponse(status=self._health)
        await asyncio.Event().wait()

    @property
    def _health(self) -> HealthCheckResponse.ServingStatus:
        is_taking = not self._is_winding_down.is_set()
        return HealthCheckResponse.SERVING if is_taking else HealthCheckResponse.NOT_SERVING

    async def _answer(
        self, method: Callable[[Request], Awaitable[Reply]], request: Request, empty: Reply, context: CallContext
    ) -> Reply:
        """What `method` gives; or `empty`, with the error told to the caller: one that is raised loses its trailers."""
        try:
            self._gate.check(context.invocation_metadata())
            return await method(request)
        except Exception as error:  # noqa: BLE001 - at the rim: no client may see a stack trace
            status = _tell(context, error)
            context.set_trailing_metadata([(DETAILS_KEY, status.to_proto().SerializeToString())])
            return empty

    def _model(self, name: str) -> Hosted:
        """What a request calls by `name`. Raises: UnknownModel."""
        if not name:
            return self._default
        if (model := self._models.get(name)) is None:
            here = ", ".join(repr(each) for each in self._models)
            raise UnknownModel(f"there is no model {name[:100]!r} here; this server has {here}")
        return model

    async def _generate(self, message: pb.GenerateRequest) -> pb.GenerateResponse:
        model = self._model(message.model)
        with model.meters.request() as meter:
            request = await self._check(message, model.served)
            async with aclosing(model.completions.generate(request)) as chunks:
                return responses.to_response([meter.saw(chunk) async for chunk in chunks], request)

    async def _stream(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateChunk, None]:
        model = self._model(message.model)
        with model.meters.request() as meter:
            request = await self._check(message, model.served)
            async with aclosing(model.completions.generate(request)) as chunks:
                async for chunk in chunks:
                    yield responses.to_chunk(meter.saw(chunk), request)

    async def _check(self, message: pb.GenerateRequest, served: Served) -> GenerationRequest:
        _check_size(message, served)
        return await _in_thread_if_long(
            message,
            translate.to_generation_request,
            message,
            tokenizer=served.tokenizer,
            info=served.target,
            defaults=served.defaults,
            config=served.config,
            now=self._clock.now(),
        )

    async def _model_info(self, message: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        model = self._model(message.model)
        served, report = model.served, model.completions.report()
        return responses.to_model_info(served.config, served.target, served.draft, served.defaults, report)

    async def _tokenize(self, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        served = self._model(message.model).served
        _check_size(message, served)
        is_wrapped = message.add_special_tokens if message.HasField("add_special_tokens") else True
        encode = served.tokenizer.encode
        return pb.TokenizeResponse(token_ids=await _in_thread_if_long(message, encode, message.text, is_wrapped))

    async def _detokenize(self, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        served = self._model(message.model).served
        _check_size(message, served)
        ids = translate.token_ids(message.token_ids, "token_ids", served.target)
        decode = served.tokenizer.decode
        return pb.DetokenizeResponse(text=await _in_thread_if_long(message, decode, ids, message.skip_special_tokens))


def _check_size(message: Message, served: Served) -> None:
    """Serve's own limit is 2 GB and cannot be set for one application. Raises: InvalidRequest."""
    most, size = served.config.limits.max_message_bytes, message.ByteSize()
    if size > most:
        raise InvalidRequest("request", f"must be at most {most} bytes long, got {size}")


def _tell(context: CallContext, error: Exception) -> Status:
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.message)
    return status


async def _in_thread_if_long(
    message: Message, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
) -> Result:
    if message.ByteSize() <= THREAD_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
