"""Which call is being answered: its request id, and the trace that it belongs to, for errors, replies and log lines.

Knows metadata and W3C's traceparent; nothing of what is asked for. What a call is named by goes with its task, and with
the tasks that are started for it.
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
"""Names of headers and metadata, in lower case as gRPC has all names."""
MAX_REQUEST_ID_CHARS = 128
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
"""Of W3C Trace Context, section 3.2; version 00 has nothing behind its flags."""


@dataclass(frozen=True, slots=True)
class CallId:
    """What one call is named by."""

    request_id: str
    traceparent: str = ""
    """As the caller sent it, or nothing."""
    caller: str = ""
    """A name for whoever sends it, by its token; empty where nobody is told apart."""

    @property
    def trace_id(self) -> str:
        """Of the trace that the caller belongs to; empty without one."""
        return self.traceparent[3:35]

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What every reply carries; an id that is no ASCII is percent-encoded there."""
        request_id = self.request_id if self.request_id.isascii() else quote(self.request_id)
        trace = ((TRACEPARENT, self.traceparent),) if self.traceparent else ()
        return ((REQUEST_ID, request_id), *trace)


@dataclass(slots=True)
class Answer:
    """How a call was answered."""

    status: str = "CANCELLED"
    """A name of gRPC's status codes, in every language; a call that nobody ends was left by its caller."""


_current: ContextVar[CallId | None] = ContextVar("call", default=None)


def current() -> CallId | None:
    """The call that this task works for."""
    return _current.get()


def begin(metadata: Iterable[tuple[str, str | bytes]]) -> CallId:
    """Name the call by what its caller sends, else by an id of its own, from here on."""
    sent = {name: value for name, value in metadata if isinstance(value, str)}
    given, trace = sent.get(REQUEST_ID, ""), sent.get(TRACEPARENT, "").strip()
    request_id = given if given.isascii() and is_request_id(given) else uuid.uuid4().hex
    call = CallId(request_id, trace if _is_traceparent(trace) else "")
    _current.set(call)
    return call


def enter(call: CallId) -> None:
    """Go on with a call that was named elsewhere."""
    _current.set(call)


def rename(request_id: str) -> None:
    """The id that the message itself brings goes before, if it is fit to be one."""
    call = _current.get()
    if call is not None and is_request_id(request_id):
        _current.set(replace(call, request_id=request_id))


def belongs_to(caller: str) -> None:
    """Note the caller of this call, after its token has been checked."""
    call = _current.get()
    if call is not None:
        _current.set(replace(call, caller=caller))


def is_request_id(text: str) -> bool:
    """Whether a caller may name a request so."""
    return 0 < len(text) <= MAX_REQUEST_ID_CHARS and text.isprintable()


@contextmanager
def answering(method: str, *, is_probe: bool = False) -> Iterator[Answer]:
    """Around the answer to a call: one line in the log says how it ended. It has nothing of what was asked for.

    Probes come every second, and nobody wants to read of them.
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
