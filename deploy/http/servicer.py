"""The endpoints of the HTTP API: a call comes in, the head of a reply and its bytes go out.

Knows bodies and the models; must not know Serve, sockets or leases. Nothing is written before it is taken: a slow
reader holds up its own stream, and no other.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus

from core.errors import Unavailable
from core.ports import Clock
from core.records import Chunk, GenerationRequest
from deploy import calls
from deploy.api import LONG_BYTES, Authenticator, Hosted, Models, Offload, Samples, completed
from deploy.http.bodies import AnyBody, ChatBody, CompletionBody, StreamOptions, parse
from deploy.http.failures import BodyTooLong, UnknownPath, WrongMethod, code_of, failure_of
from deploy.http.responses import ChatReply, CompletionReply, Reply, model_card
from deploy.http.structured import structure_of
from deploy.http.translate import to_requests
from deploy.http.wire import DONE, EVENTS, Call, Head, encoded, event

HEALTH = "/health"
MODELS = "/v1/models"
COMPLETIONS: Mapping[str, tuple[type[AnyBody], Callable[..., Reply]]] = {
    "/v1/completions": (CompletionBody, CompletionReply),
    "/v1/chat/completions": (ChatBody, ChatReply),
}
"""The paths that take a place for as long as they last, with what they take and give."""
REFUSED = {
    "/v1/embeddings": "this server generates text; it makes no embeddings",
    "/v1/responses": "this server does not have the Responses API; send /v1/chat/completions",
}
JSON_GROWTH = 6
"""Largest factor over the same request by gRPC: a byte of text is up to 6 characters (\\u0000)."""

Parts = AsyncGenerator[Head | bytes, None]


class HttpServicer:
    """Answers every call, health apart to those alone who pass the gate. It never shows a client a stack trace."""

    def __init__(self, models: Models, clock: Clock, authenticator: Authenticator, offload: Offload) -> None:
        self._models = models
        self._clock = clock
        self._authenticator = authenticator
        self._offload = offload
        self._created_s = int(time.time())

    async def respond(self, call: Call) -> Parts:
        """The head of the reply, then its body in pieces; an error after the head is the last event of the stream."""
        calls.enter(call.name)
        has_begun = False
        with calls.answering(_method(call), is_probe=call.path == HEALTH) as answer:
            try:
                async with aclosing(self._answer(call)) as parts:
                    async for part in parts:
                        has_begun = True
                        yield part
                answer.status = "OK"
            except Exception as error:  # noqa: BLE001 - at the rim: no client may see a stack trace
                failure, answer.status = failure_of(error), code_of(error)
                if not has_begun:
                    yield failure.head
                yield event(failure.body) if has_begun else failure.body

    def _answer(self, call: Call) -> Parts:
        """Raises: RequestError."""
        if call.path == HEALTH:
            return self._health(call)
        authorization = call.authorization
        caller = self._authenticator.check(() if authorization is None else (("authorization", authorization),))
        if call.path in COMPLETIONS:
            return self._complete(call, caller)
        if call.path == MODELS or call.path.startswith(f"{MODELS}/"):
            return self._show_models(call)
        raise UnknownPath(REFUSED.get(call.path, "there is nothing at this path"))

    async def _health(self, call: Call) -> Parts:
        _require_method(call, "GET")
        if self._models.is_winding_down:
            raise Unavailable("this orchestrator is shutting down")
        yield Head(HTTPStatus.OK)
        yield encoded({"status": "ok"})

    async def _show_models(self, call: Call) -> Parts:
        _require_method(call, "GET")
        name = call.path.removeprefix(MODELS).removeprefix("/")
        cards = [model_card(model, self._created_s) for model in ([self._models[name]] if name else self._models.all)]
        yield Head(HTTPStatus.OK)
        yield encoded(cards[0] if name else {"object": "list", "data": cards})

    async def _complete(self, call: Call, caller: str) -> Parts:
        _require_method(call, "POST")
        kind, form = COMPLETIONS[call.path]
        body = await self._parse(kind, call)
        model = self._models[body.model or ""]
        with model.meters.request() as meter:
            requests = await self._requests(body, call, caller, model)
            reply = _reply(form, body, model, requests, int(time.time()))
            async with aclosing(completed(model, requests, meter)) as pieces:
                parts = _streamed(reply, pieces) if body.stream else _whole(reply, pieces, len(requests))
                async for part in parts:
                    yield part

    async def _parse(self, kind: type[AnyBody], call: Call) -> AnyBody:
        most, size = JSON_GROWTH * self._models.max_request_bytes, len(call.body)
        if size > most:
            raise BodyTooLong(most)
        return await self._offload.run(size, parse, kind, call.body)

    async def _requests(self, body: AnyBody, call: Call, caller: str, model: Hosted) -> list[GenerationRequest]:
        served, size = model.served, len(call.body)
        work = max(size, LONG_BYTES) if structure_of(body) is not None else size  # a grammar is compiled
        if size > served.config.limits.max_message_bytes:
            raise BodyTooLong(served.config.limits.max_message_bytes)
        return await self._offload.run(
            work,
            to_requests,
            body,
            call.name.request_id,
            caller,
            tokenizer=served.tokenizer,
            info=served.target,
            defaults=served.defaults,
            config=served.config,
            now=self._clock.now(),
        )


async def _streamed(reply: Reply, pieces: Samples) -> Parts:
    """The head comes with the first piece: until then an error has a status of its own."""
    has_begun = False
    async for index, chunk in pieces:
        if not has_begun:
            yield Head(HTTPStatus.OK, EVENTS)
            has_begun = True
        yield event(encoded(reply.piece(index, chunk)))
    if (last := reply.last_piece()) is not None:
        yield event(encoded(last))
    yield DONE


async def _whole(reply: Reply, pieces: Samples, num_samples: int) -> Parts:
    chunks: list[list[Chunk]] = [[] for _ in range(num_samples)]
    async for index, chunk in pieces:
        chunks[index].append(chunk)
    body = encoded(reply.whole(chunks))  # before the head: what fails here has a status of its own
    yield Head(HTTPStatus.OK)
    yield body


def _reply(
    form: Callable[..., Reply], body: AnyBody, model: Hosted, requests: Sequence[GenerationRequest], created_s: int
) -> Reply:
    options = body.stream_options or StreamOptions()
    return form(
        model.name,
        requests,
        model.served.tokenizer,
        created_s,
        has_token_ids=bool(body.return_token_ids),
        has_usage_at_end=bool(options.include_usage),
        has_usage_always=bool(options.continuous_usage_stats),
        echoed=_echoed(body, model, requests[0]),
    )


def _echoed(body: AnyBody, model: Hosted, request: GenerationRequest) -> str | None:
    if isinstance(body, ChatBody) or not body.echo:
        return None
    return body.prompt if isinstance(body.prompt, str) else model.served.tokenizer.decode(request.prompt)


def _method(call: Call) -> str:
    """As a log has it, where a path that is not known is nobody's business."""
    is_known = call.path in (*COMPLETIONS, MODELS, HEALTH)
    return f"{call.method} {call.path if is_known else 'another path'}"


def _require_method(call: Call, allowed: str) -> None:
    if call.method != allowed:
        raise WrongMethod(call.method, allowed)
