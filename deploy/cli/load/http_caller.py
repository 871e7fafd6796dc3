"""Sends requests by HTTP. Knows OpenAI's server-sent events, and this project's fields in them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import aiohttp

from deploy.cli.load.callers import CallFailed, Fields
from deploy.cli.load.records import Arrival, Counts, LoadRequest

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Longest line of a stream."""


class HttpCaller:
    """Sends requests to OpenAI's /v1/completions, streamed."""

    def __init__(self, address: str, token: str | None, fields: Fields) -> None:
        self._url = f"http://{address}/v1/completions"
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),  # a limit would queue requests in the client
            timeout=aiohttp.ClientTimeout(total=None),  # the driver limits the time
            read_bufsize=MAX_EVENT_BYTES,
        )
        self._fields = fields

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Arrival, None]:
        """Raises: CallFailed."""
        try:
            async with self._session.post(self._url, json=self._body(request)) as response:
                if response.status != HTTPStatus.OK:
                    raise _refused(response.status, await response.text())
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        yield _arrival(event)
        except aiohttp.ClientError as error:
            raise CallFailed(type(error).__name__, str(error), is_refusal=False) from None

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        fields = self._fields
        given = {
            "model": fields.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "temperature": fields.temperature,
            "ignore_eos": fields.ignore_eos,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"max_draft_tokens": 0} if fields.no_draft else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    async def vocab_size(self) -> int:
        """Always 256: OpenAI's API does not report the size, and byte-level vocabularies have at least 256 tokens."""
        return 256

    async def close(self) -> None:
        await self._session.close()


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[Mapping[str, Any], None]:
    """The server-sent events up to [DONE]. Raises: CallFailed when the stream ends without it."""
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[len(b"data: ") :])
    raise CallFailed("BROKEN", "the stream ended without [DONE]", is_refusal=False)


def _arrival(event: Mapping[str, Any]) -> Arrival:
    """Raises: CallFailed for an error within the stream."""
    if "error" in event:
        raise CallFailed(str(event["error"].get("type")), str(event["error"].get("message")), is_refusal=False)
    usage = event.get("usage") or {}
    choices = event.get("choices") or [{}]
    stats = (choices[0].get("outrider") or {}).get("speculation")
    counts = Counts(*(int(stats[name]) for name in Counts.__slots__)) if stats else None
    return Arrival(len(choices[0].get("token_ids") or ()), usage.get("prompt_tokens", 0), counts)


def _refused(status: int, body: str) -> CallFailed:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200]
    return CallFailed(f"HTTP {status}", str(message), is_refusal=status == HTTPStatus.TOO_MANY_REQUESTS)
