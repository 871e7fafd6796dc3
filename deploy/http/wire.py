"""The types that pass between Serve's HTTP proxy and an orchestrator, and helpers to encode replies."""

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
PLAIN: Headers = (("content-type", "text/plain; charset=utf-8"),)
DONE = b"data: [DONE]\n\n"
"""End of a completed stream."""
COMMENT = b": keep-alive\n\n"
"""Keeps a silent stream alive. Readers of server-sent events ignore comments."""


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
    """Status and headers of a reply. Its body follows as bytes."""

    status: int
    headers: Headers = JSON


def whole(body: bytes, status: int = HTTPStatus.OK, headers: Headers = JSON) -> tuple[Head, bytes]:
    """A reply of known length."""
    return Head(status, (*headers, ("content-length", str(len(body))))), body


def encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(data: bytes, name: str = "") -> bytes:
    """One server-sent event; some APIs name their events."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
