"""The RPCs of GenerationService and Health.

Knows the messages, the service and how Serve's proxy passes errors on; must not know Ray actors or leases. Serve calls
methods by their names and passes `grpc_context` by keyword.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError, Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse

from core.errors import InvalidRequest, Overloaded, UnknownService
from core.ports import Clock
from core.records import Chunk, GenerationRequest
from deploy import api, calls
from deploy.api import LONG_BYTES, Authenticator, Models, Offload, Places, SamplesUsage, Served
from deploy.grpc import responses, translate
from deploy.grpc.status import status_of
from deploy.grpc.wire import fault_in
from protos.outrider.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext as CallContext

SERVICE_NAMES = frozenset({"", "outrider.v1.GenerationService", "grpc.health.v1.Health"})
"""Service names that Health accepts; the empty one means the whole server."""
MAX_WATCHES = 16
"""Most Health streams at once. Serve counts them among the calls of a replica."""
WATCH_RETRY_S = 10.0
Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


def _rpc(
    kind: type[Request], empty: type[Reply], *, is_health: bool = False
) -> Callable[[Callable[[Any, Request], Awaitable[Reply]]], Callable[[Any, bytes, CallContext], Awaitable[Reply]]]:
    """Decorator: a method that answers one message becomes an RPC for Serve. All but health RPCs authenticate.

    Errors are set on the call's context, next to an empty reply, because a raised one would lose its details.
    """

    def decorated(answer_to: Callable[[Any, Request], Awaitable[Reply]]) -> Callable[..., Awaitable[Reply]]:
        async def rpc(self: Servicer, request: bytes, grpc_context: CallContext) -> Reply:
            calls.begin(grpc_context.invocation_metadata())
            with calls.answering(answer_to.__name__, is_probe=is_health) as answer:
                try:
                    message = parse(kind, request) if is_health else await self._admit(kind, request, grpc_context)
                    reply = await answer_to(self, message)
                    answer.status = "OK"
                except Exception as error:  # noqa: BLE001 - the outermost handler: no client may see a stack trace
                    answer.status = _set_error(grpc_context, error)
                    return empty()
                return reply

        rpc.__name__ = answer_to.__name__  # shown in Serve's log
        return rpc

    return decorated


class Servicer:
    """Answers every RPC of the application; all but Health require authentication, if it is configured.

    Clients never get a stack trace.
    """

    def __init__(self, models: Models, clock: Clock, authenticator: Authenticator, offload: Offload) -> None:
        self._models = models
        self._clock = clock
        self._authenticator = authenticator
        self._offload = offload
        self._is_winding_down = asyncio.Event()
        self._num_watches = 0

    async def wind_down(self) -> int:
        """Refuse new requests and report NOT_SERVING. Returns the number of completions in progress."""
        self._models.is_winding_down = True
        self._is_winding_down.set()
        return sum(model.completions.wind_down() for model in self._models.all)

    async def cut_off(self) -> None:
        """End completions in progress with UNAVAILABLE. Returns when their leases have ended."""
        await asyncio.gather(*(model.completions.close() for model in self._models.all))

    async def places(self) -> Places:
        """This orchestrator's limits, for proxies."""
        return self._models.places

    @_rpc(pb.GenerateRequest, pb.GenerateResponse)
    async def Generate(self, message: pb.GenerateRequest) -> pb.GenerateResponse:
        model = self._models[message.model]
        with model.request() as watch:
            requests = await self._check(message, model.served)
            usage, chunks = SamplesUsage(requests), [list[Chunk]() for _ in requests]
            async with aclosing(api.completed(model, requests, watch)) as pieces:
                async for index, chunk in pieces:
                    usage.observe(index, chunk)
                    chunks[index].append(chunk)
            return responses.to_response(chunks, requests, usage.total)

    async def GenerateStream(self, request: bytes, grpc_context: CallContext) -> AsyncGenerator[pb.GenerateChunk, None]:
        """One completion; each piece is sent as soon as it is committed.

        An error is sent as a last, empty chunk, whose call carries code and details through Serve; `deploy.grpc.proxy`
        drops the chunk. Serve would send a raised error without details, and log its trace twice.
        """
        calls.begin(grpc_context.invocation_metadata())
        with calls.answering("GenerateStream") as answer:
            try:
                message = await self._admit(pb.GenerateRequest, request, grpc_context)
                async with aclosing(self._stream(message)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                answer.status = "OK"
            except Exception as error:  # noqa: BLE001 - the outermost handler: no client may see a stack trace
                answer.status = _set_error(grpc_context, error)
                yield pb.GenerateChunk()

    @_rpc(pb.ListModelsRequest, pb.ListModelsResponse)
    async def ListModels(self, _message: pb.ListModelsRequest) -> pb.ListModelsResponse:
        return responses.to_model_list([model.served for model in self._models.named])

    @_rpc(pb.GetModelInfoRequest, pb.GetModelInfoResponse)
    async def GetModelInfo(self, message: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        """One model: target and draft, the defaults of unset fields, and the state of the policy."""
        model = self._models[message.model]
        served, report = model.served, model.completions.report()
        return responses.to_model_info(served.config, served.target, served.draft, served.defaults, report)

    @_rpc(pb.TokenizeRequest, pb.TokenizeResponse)
    async def Tokenize(self, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        served = self._models[message.model].served
        _check_size(message, served)
        return await self._offload.run(message.ByteSize(), _tokens_of, message, served)

    @_rpc(pb.DetokenizeRequest, pb.DetokenizeResponse)
    async def Detokenize(self, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        served = self._models[message.model].served
        _check_size(message, served)
        return await self._offload.run(message.ByteSize(), _text_of, message, served)

    @_rpc(HealthCheckRequest, HealthCheckResponse, is_health=True)
    async def Check(self, message: HealthCheckRequest) -> HealthCheckResponse:
        """Whether the service accepts requests. A replica that is still loading offers no RPCs at all."""
        if message.service not in SERVICE_NAMES:
            raise UnknownService("there is no such service here")
        return HealthCheckResponse(status=self._health)

    @_rpc(HealthListRequest, HealthListResponse, is_health=True)
    async def List(self, _message: HealthListRequest) -> HealthListResponse:
        """The health of every service, by name."""
        status = HealthCheckResponse(status=self._health)
        return HealthListResponse(statuses=dict.fromkeys(sorted(SERVICE_NAMES), status))

    async def Watch(self, request: bytes, grpc_context: CallContext) -> AsyncIterator[HealthCheckResponse]:
        """Health as a stream that stays open. It breaks when the replica goes away.

        A stream occupies one of the replica's calls and needs no token, so their number is limited.
        """
        calls.begin(grpc_context.invocation_metadata())
        try:
            message = self._admit_watch(request)
        except Exception as error:  # noqa: BLE001 - the outermost handler: no client may see a stack trace
            _set_error(grpc_context, error)
            yield HealthCheckResponse()
            return
        self._num_watches += 1
        try:
            async with aclosing(self._watched(message)) as replies:
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

    def _admit_watch(self, request: bytes) -> HealthCheckRequest:
        if self._num_watches >= MAX_WATCHES:
            raise Overloaded("too many Health watches are open", WATCH_RETRY_S)
        return parse(HealthCheckRequest, request)

    @property
    def _health(self) -> HealthCheckResponse.ServingStatus:
        is_taking = not self._is_winding_down.is_set()
        return HealthCheckResponse.SERVING if is_taking else HealthCheckResponse.NOT_SERVING

    async def _admit(self, kind: type[Request], request: bytes, context: CallContext) -> Request:
        """Authenticate the caller, check the size and decode the message. Raises: RequestError."""
        calls.belongs_to(self._authenticator.check(context.invocation_metadata()))
        most = self._models.max_request_bytes
        if len(request) > most:
            raise InvalidRequest("request", f"must be at most {most} bytes long, got {len(request)}")
        message = await self._offload.run(len(request), parse, kind, request)
        calls.rename(getattr(message, "request_id", ""))
        return message

    async def _stream(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateChunk, None]:
        model = self._models[message.model]
        with model.request() as watch:
            requests = await self._check(message, model.served)
            usage = SamplesUsage(requests)
            async with aclosing(api.completed(model, requests, watch)) as pieces:
                async for index, chunk in pieces:
                    yield responses.to_chunk(chunk, requests[index], index, usage.observe(index, chunk))

    async def _check(self, message: pb.GenerateRequest, served: Served) -> list[GenerationRequest]:
        _check_size(message, served)
        size = message.ByteSize()
        return await self._offload.run(
            max(size, LONG_BYTES) if _has_grammar(message) else size,  # compiling a grammar takes long
            translate.to_requests,
            message,
            served,
            self._clock.now(),
            calls.current(),
        )


def parse(kind: type[Request], data: bytes) -> Request:
    """Decode `data`. Raises: InvalidRequest, which names the first field that cannot be decoded."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise fault_in(data, kind) from None


def _tokens_of(message: pb.TokenizeRequest, served: Served) -> pb.TokenizeResponse:
    is_wrapped = message.add_special_tokens if message.HasField("add_special_tokens") else True
    api.check_length(message.text, "text", served.tokenizer, served.target.max_context_tokens)
    return pb.TokenizeResponse(token_ids=served.tokenizer.encode(message.text, is_wrapped))


def _text_of(message: pb.DetokenizeRequest, served: Served) -> pb.DetokenizeResponse:
    ids = api.token_ids(message.token_ids, "token_ids", served.target)
    return pb.DetokenizeResponse(text=served.tokenizer.decode(ids, message.skip_special_tokens))


def _check_size(message: Message, served: Served) -> None:
    """Check the size against the model's limit. Raises: InvalidRequest."""
    most, size = served.config.limits.max_message_bytes, message.ByteSize()
    if size > most:
        raise InvalidRequest("request", f"must be at most {most} bytes long, got {size}")


def _has_grammar(message: pb.GenerateRequest) -> bool:
    return message.HasField("structured_output") or message.speculation.HasField("template")


def _set_error(context: CallContext, error: Exception) -> str:
    """Set the error's status and details on the call, to go out with its next message. Returns the status's name."""
    status = status_of(error)
    context.set_code(status.code)
    context.set_details(status.message)
    context.set_trailing_metadata(status.to_trailers())
    return status.code.name
