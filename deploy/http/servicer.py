"""The endpoints of the HTTP API: from a call to the head of a reply and its bytes.

Knows bodies and the models; must not know Serve, sockets or leases. A piece is produced only when it is requested, so a
slow reader slows down only its own stream.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus

from core.errors import Unavailable
from core.ports import Clock
from core.records import Chunk, GenerationRequest
from deploy import calls
from deploy.api import (
    LONG_BYTES,
    Authenticator,
    Hosted,
    Models,
    Offload,
    Samples,
    Watch,
    completed,
    completed_prompts,
    load_of,
    merged,
)
from deploy.http.anthropic import CountBody
from deploy.http.bodies import Body
from deploy.http.failures import AnyBody, BodyTooLong, Failure, UnknownPath, WrongMethod, code_of, failure_of, parse
from deploy.http.openai import LoadAdapterBody, UnloadAdapterBody, load_adapter, model_card, unload_adapter
from deploy.http.page import page_now
from deploy.http.page.status import status_fields
from deploy.http.reply import Reply, ReplyOrder
from deploy.http.routes import (
    COMPLETIONS,
    COUNT_TOKENS,
    HEALTH,
    JSON_GROWTH,
    LOAD_ADAPTER,
    METRICS,
    MODELS,
    PAGE,
    STATUS,
    UNLOAD_ADAPTER,
    is_known,
    refusal_of,
)
from deploy.http.structured import structure_of
from deploy.http.translate import later_named_as_in, named_as_in, prompt_of, reading_of, to_requests
from deploy.http.wire import COMMENT, EVENTS, JSON, PLAIN, Call, Head, encoded, whole
from deploy.metrics.load import TEXT, exposition
from deploy.receipts import fingerprint

MANY_PROMPTS = 16
"""With more prompts than this, a call is checked in the offload thread, even if the prompts are short."""
Parts = AsyncGenerator[Head | bytes, None]


class HttpServicer:
    """Answers every call. All but health, load and the page require authentication. Clients never get a stack trace."""

    def __init__(self, models: Models, clock: Clock, authenticator: Authenticator, offload: Offload) -> None:
        self._models = models
        self._clock = clock
        self._authenticator = authenticator
        self._offload = offload
        self._created_s = int(time.time())

    async def respond(self, call: Call) -> Parts:
        """The head of the reply, then its body in pieces. An error after the head becomes the last event."""
        calls.enter(call.name)
        has_begun, ending = False, _Ending()
        with calls.answering(_method(call), is_probe=call.path in (HEALTH, METRICS)) as answer:
            try:
                async with aclosing(self._answer(call, ending)) as parts:
                    async for part in parts:
                        has_begun = True
                        yield part
                answer.status = "OK"
            except Exception as error:  # noqa: BLE001 - the outermost handler: no client may see a stack trace
                failure, answer.status = failure_of(error, call.path), code_of(error)
                if not has_begun:
                    yield failure.head
                yield ending.of(failure) if has_begun else failure.body

    def _answer(self, call: Call, ending: _Ending) -> Parts:
        """Raises: RequestError."""
        if call.path == HEALTH:
            return self._health(call)
        if call.path == METRICS:
            return self._show_load(call)
        if call.path == PAGE and self._models[""].served.config.http.page:
            return self._show_page(call)  # needs no key: the page fetches its data through the API
        authorization = call.authorization
        caller = self._authenticator.check(() if authorization is None else (("authorization", authorization),))
        if call.path in COMPLETIONS:
            return self._complete(call, caller, ending)
        if call.path == COUNT_TOKENS:
            return self._count(call)
        if call.path == LOAD_ADAPTER:
            return self._load_adapter(call)
        if call.path == UNLOAD_ADAPTER:
            return self._unload_adapter(call)
        if call.path == MODELS or call.path.startswith(f"{MODELS}/"):
            return self._show_models(call)
        if call.path == STATUS:
            return self._show_status(call)
        raise UnknownPath(refusal_of(call.path))

    async def _health(self, call: Call) -> Parts:
        _require_method(call, "GET")
        if self._models.is_winding_down:
            raise Unavailable("this orchestrator is shutting down")
        for part in whole(encoded({"status": "ok"})):
            yield part

    async def _show_load(self, call: Call) -> Parts:
        _require_method(call, "GET")
        loads = [await load_of(model) for model in self._models.all]
        yield Head(HTTPStatus.OK, TEXT)
        yield exposition(loads)

    async def _show_models(self, call: Call) -> Parts:
        _require_method(call, "GET")
        name = call.path.removeprefix(MODELS).removeprefix("/")
        cards = [model_card(model, self._created_s) for model in ([self._models[name]] if name else self._models.named)]
        pages = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        for part in whole(encoded(cards[0] if name else {"object": "list", "data": cards, **pages})):
            yield part

    async def _show_status(self, call: Call) -> Parts:
        _require_method(call, "GET")
        body = encoded({"models": [status_fields(model) for model in self._models.all]})
        for part in whole(body, headers=(*JSON, ("cache-control", "no-store"))):
            yield part

    async def _show_page(self, call: Call) -> Parts:
        _require_method(call, "GET")
        for part in page_now():
            yield part

    async def _complete(self, call: Call, caller: str, ending: _Ending) -> Parts:
        _require_method(call, "POST")
        route = COMPLETIONS[call.path]
        body = await self._parse(route.body, call)
        model = self._models[body.model or ""]
        with model.request() as watch:
            requests = await self._requests(body, call, caller, model)
            reading = reading_of(body, requests[0], model.served)
            order = ReplyOrder(
                body,
                model.name,
                requests,
                model.served.tokenizer,
                reading,
                int(time.time()),
                fingerprint(model.served.target, model.served.tokenizer.digest, model.served.adapter),
                partial(named_as_in, body, model.served),
            )
            reply = ending.reply = route.reply(order)
            pieces = _completed(model, requests, len(body.prompts_given), watch)
            keep_alive_s = model.served.config.http.keep_alive_s
            parts = _streamed(reply, pieces, keep_alive_s) if body.stream else _whole(reply, pieces, len(requests))
            with later_named_as_in(body, model.served):
                async with aclosing(parts):
                    async for part in parts:
                        yield part

    async def _count(self, call: Call) -> Parts:
        _require_method(call, "POST")
        body = await self._parse(CountBody, call)
        served = self._models[body.model or ""].served
        prompt = await self._offload.run(len(call.body), prompt_of, body, served)
        for part in whole(encoded({"input_tokens": len(prompt)})):
            yield part

    async def _load_adapter(self, call: Call) -> Parts:
        _require_method(call, "POST")
        body = await self._parse(LoadAdapterBody, call)
        for part in whole(await load_adapter(self._models, body), headers=PLAIN):
            yield part

    async def _unload_adapter(self, call: Call) -> Parts:
        _require_method(call, "POST")
        body = await self._parse(UnloadAdapterBody, call)
        for part in whole(await unload_adapter(self._models, body), headers=PLAIN):
            yield part

    async def _parse(self, kind: type[AnyBody], call: Call) -> AnyBody:
        _check_size(call.body, self._models.max_request_bytes)
        return await self._offload.run(len(call.body), parse, kind, call.body)

    async def _requests(self, body: Body, call: Call, caller: str, model: Hosted) -> list[GenerationRequest]:
        served, size = model.served, len(call.body)
        asked = body.tools_asked
        has_template = body.speculation is not None and body.speculation.template is not None
        has_grammar = has_template or structure_of(body, asked) is not None or (asked is not None and asked.is_forced)
        is_long = has_grammar or len(body.prompts_given) > MANY_PROMPTS  # compiling a grammar takes long
        work = max(size, LONG_BYTES) if is_long else size
        _check_size(call.body, served.config.limits.max_message_bytes)
        return await self._offload.run(work, to_requests, body, served, self._clock.now(), call.name.request_id, caller)


def _check_size(body: bytes, most_bytes: int) -> None:
    """`most_bytes` is the limit of the same request by gRPC. Raises: BodyTooLong."""
    if len(body) > JSON_GROWTH * most_bytes:
        raise BodyTooLong(JSON_GROWTH * most_bytes)


def _completed(model: Hosted, requests: Sequence[GenerationRequest], num_prompts: int, watch: Watch) -> Samples:
    """`requests` are the samples of each prompt, one prompt after the other."""
    if num_prompts <= 1:
        return completed(model, requests, watch)
    size = len(requests) // num_prompts
    return completed_prompts(model, [requests[at : at + size] for at in range(0, len(requests), size)], watch)


class _Ending:
    """Writes the end of a failed stream. Uses the form of the reply once it is known."""

    reply: Reply | None = None

    def of(self, failure: Failure) -> bytes:
        return failure.event if self.reply is None else self.reply.failing(failure)


async def _streamed(reply: Reply, pieces: Samples, keep_alive_s: float) -> Parts:
    """Stream a reply. The head is sent with the first piece, because until then an error can have its own status.

    If the first piece takes long, the head is sent with a comment: load balancers close a connection that is silent for
    about a minute.
    """
    has_begun = False
    async with aclosing(merged([pieces], keep_alive_s)) as parts:
        async for part in parts:
            if not has_begun:
                yield Head(HTTPStatus.OK, EVENTS)
                has_begun = True
            if data := COMMENT if part is None else reply.piece(*part):
                yield data
    yield reply.last_piece()


async def _whole(reply: Reply, pieces: Samples, num_samples: int) -> Parts:
    chunks: list[list[Chunk]] = [[] for _ in range(num_samples)]
    async with aclosing(pieces):
        async for index, chunk in pieces:
            chunks[index].append(chunk)
    for part in whole(encoded(reply.whole(chunks))):
        yield part


def _method(call: Call) -> str:
    """Method and path for the log. Unknown paths are not logged."""
    return f"{call.method} {call.path if is_known(call.path) else 'another path'}"


def _require_method(call: Call, allowed: str) -> None:
    """Raises: WrongMethod. HEAD counts as GET; the HTTP server omits the body."""
    is_head = call.method == "HEAD" and allowed == "GET"
    if call.method != allowed and not is_head:
        raise WrongMethod(call.method, "GET, HEAD" if allowed == "GET" else allowed)
