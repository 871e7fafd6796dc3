"""The identity of the current call: its request id and trace, for errors, replies and log lines.

Knows metadata and W3C's traceparent; must not know the request. The identity is a context variable, so tasks started
during a call inherit it.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from urllib.parse import quote

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
"""Header and metadata names, in lower case as gRPC requires."""
MAX_REQUEST_ID_CHARS = 128
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
"""The format in W3C Trace Context, section 3.2. Version 00 has nothing after the flags."""


@dataclass(frozen=True, slots=True)
class CallId:
    """The identity of one call."""

    request_id: str
    traceparent: str = ""
    """The caller's header, unchanged; empty if it sent none."""
    caller: str = ""
    """Name of the caller, derived from its token; empty without authentication."""

    @property
    def trace_id(self) -> str:
        """Id of the caller's trace; empty without one."""
        return self.traceparent[3:35]

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of every reply. A request id that is not ASCII is percent-encoded."""
        request_id = self.request_id if self.request_id.isascii() else quote(self.request_id)
        trace = ((TRACEPARENT, self.traceparent),) if self.traceparent else ()
        return ((REQUEST_ID, request_id), *trace)


@dataclass(slots=True)
class Answer:
    status: str = "CANCELLED"
    """Name of a gRPC status code, also for HTTP. The default means that the caller left before the call ended."""


_current: ContextVar[CallId | None] = ContextVar("call", default=None)


def current() -> CallId | None:
    """The call that the current task serves."""
    return _current.get()


def begin(metadata: Iterable[tuple[str, str | bytes]]) -> CallId:
    """Identify the current call by the caller's request id, or by a new one."""
    sent = {name: value for name, value in metadata if isinstance(value, str)}
    given, trace = sent.get(REQUEST_ID, ""), sent.get(TRACEPARENT, "").strip()
    request_id = given if given.isascii() and is_request_id(given) else uuid.uuid4().hex
    call = CallId(request_id, trace if _is_traceparent(trace) else "")
    _current.set(call)
    return call


def enter(call: CallId) -> None:
    """Continue a call that was identified elsewhere."""
    _current.set(call)


def rename(request_id: str) -> None:
    """Use the request id in the message in place of the current one, if it is valid."""
    call = _current.get()
    if call is not None and is_request_id(request_id):
        _current.set(replace(call, request_id=request_id))


def belongs_to(caller: str) -> None:
    """Record the caller, once its token has been checked."""
    call = _current.get()
    if call is not None:
        _current.set(replace(call, caller=caller))


def is_request_id(text: str) -> bool:
    return 0 < len(text) <= MAX_REQUEST_ID_CHARS and text.isprintable()


@contextmanager
def answering(method: str, *, is_probe: bool = False) -> Iterator[Answer]:
    """Log one line when a call ends, with its status and duration. The line shows nothing of the request.

    Probes come every second and are logged at debug level.
    """
    answer, began_s = Answer(), time.monotonic()
    try:
        yield answer
    finally:
        duration_s = time.monotonic() - began_s
        facts = {"method": method, "status": answer.status, "duration_s": round(duration_s, 4)}
        level = logging.DEBUG if is_probe else logging.INFO
        logger.log(level, "%s: %s in %.3f s", method, answer.status, duration_s, extra=facts)


def _is_traceparent(text: str) -> bool:
    match = _TRACEPARENT.fullmatch(text)
    return match is not None and (not text.startswith("00") or match[2] is None)
