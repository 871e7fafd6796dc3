"""What passes between Serve's HTTP proxy and an orchestrator, and the bytes that replies are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from deploy.calls import CallId

Headers = tuple[tuple[str, str], ...]

JSON: Headers = (("content-type", "application/json"),)
EVENTS: Headers = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
DONE = b"data: [DONE]\n\n"
"""What ends a stream that came to its end."""
COMMENT = b": keep-alive\n\n"
"""Readers of server-sent events skip it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, read to its end."""

    method: str
    path: str
    authorization: str | None
    name: CallId
    body: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """How a reply begins; its body follows as bytes."""

    status: int
    headers: Headers = JSON


def whole(body: bytes, status: int = HTTPStatus.OK, headers: Headers = JSON) -> tuple[Head, bytes]:
    """A reply of known length."""
    return Head(status, (*headers, ("content-length", str(len(body))))), body


def encoded(value: Mapping[str, Any]) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(data: bytes, name: str = "") -> bytes:
    """One server-sent event; some APIs name theirs."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
