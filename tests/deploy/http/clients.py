"""The official clients, unchanged, in front of a servicer in this process: no sockets, no Ray, no models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import openai

from core.config import HttpConfig
from core.records import Chunk, FinishReason, Usage
from deploy.api.authentication import Authenticator
from deploy.api.hosted import Hosted, Models
from deploy.api.offload import Offload
from deploy.calls import CallId
from deploy.clock import MonotonicClock
from deploy.http.servicer import HttpServicer
from deploy.http.wire import Call, Head
from deploy.metrics.meters import Meters
from tests.deploy.grpc.rpc import CONFIG, INFO, TOKENIZER, Recorded, Script, ids_of, served
from tests.vocabularies import as_product, byte_level

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %};"
    "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
)
"""A chat template of Hermes's kind."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NO_FORMATS = HttpConfig(tool_call_parser="none", reasoning_parser="none")


def said(
    *texts: str,
    finish: FinishReason = FinishReason.STOP,
    stop: str | int | None = None,
    prompt: int = 3,
    cached: int = 0,
) -> list[Chunk]:
    """An output that comes in these texts."""
    chunks, num_tokens = [], 0
    for index, text in enumerate(texts):
        ids = ids_of(text)
        num_tokens += len(ids)
        chunk = Chunk(text, ids, (False,) * len(ids), Usage(prompt, num_tokens, cached))
        is_last = index == len(texts) - 1
        chunks.append(replace(chunk, finish_reason=finish, matched_stop=stop) if is_last else chunk)
    return chunks


def text_of_prompt(script: Script) -> str:
    """The prompt of the one request."""
    (request,) = script.requests
    return TOKENIZER.decode(request.prompt)


def hosted(script: Script, template: str | None = TEMPLATE, http: HttpConfig | None = None) -> Models:
    config = replace(CONFIG, http=http or HttpConfig())
    pair = replace(
        served(config), tokenizer=as_product(byte_level(), template), target=replace(INFO, max_context_tokens=900)
    )
    return Models([Hosted(script, pair, Meters(Recorded(), MonotonicClock().now))])


def servicer(script: Script, authenticator: Authenticator | None = None, **given: Any) -> HttpServicer:
    return HttpServicer(hosted(script, **given), MonotonicClock(), authenticator or Authenticator(None), Offload())


def app(http: HttpServicer) -> Any:
    """ASGI, as the proxy's process has it before the servicer."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        key = headers.get("x-api-key")
        authorization = headers.get("authorization") or (f"Bearer {key}" if key else None)
        call = Call(scope["method"], scope["path"], authorization, CallId("mine"), body)
        async for part in http.respond(call):
            if isinstance(part, Head):
                pairs = [(name.encode(), value.encode()) for name, value in part.headers]
                await send({"type": "http.response.start", "status": part.status, "headers": pairs})
            else:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer


def _transport(http: HttpServicer) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app(http)))


@asynccontextmanager
async def by_openai(script: Script, **given: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    http_client = _transport(servicer(script, **given))
    async with openai.AsyncOpenAI(
        base_url="http://here/v1", api_key="key", max_retries=0, http_client=http_client
    ) as client:
        yield client


@asynccontextmanager
async def by_anthropic(script: Script, **given: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http_client = _transport(servicer(script, **given))
    async with anthropic.AsyncAnthropic(
        base_url="http://here", api_key="key", max_retries=0, http_client=http_client
    ) as client:
        yield client
