"""Ends a call in the proxy at the deadline in its message.

The orchestrator applies the same timeout and counts it, but its clock starts a hop later and its reply takes another
hop: 20 to 30 ms each on a busy CPU. Therefore the proxy answers the client, and the orchestrator ends the call on its
own.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from google.protobuf.message import DecodeError

from core.errors import DeadlinePassed
from deploy import calls
from protos.outrider.v1 import generation_pb2 as pb

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]

CANCEL_GRACE_S = 5.0
"""Seconds after the deadline at which a call that has not ended is cancelled."""

TOO_LATE = "the request's time ran out"

_detached: set[asyncio.Task[None]] = set()
"""Strong references to tasks; asyncio keeps only weak ones."""


def with_deadline(handler: Handler) -> Handler:
    """The handler, raising DeadlinePassed as soon as the `timeout_s` of its message has passed."""

    async def unary(message: bytes, context: Any) -> bytes:
        answer = handler(message, context)
        end_s = _end_s(message)
        reply: bytes = await (answer if end_s is None else _before(end_s, answer))
        return reply

    async def stream(message: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        end_s = _end_s(message)
        replies = handler(message, context)
        async with aclosing(replies if end_s is None else _stream_before(end_s, replies)) as timely:
            async for reply in timely:
                yield reply

    return stream if inspect.isasyncgenfunction(handler) else unary


def timeout_of(message: bytes) -> float | None:
    """`timeout_s` of the request in seconds; None if it is missing or invalid, which the orchestrator reports.

    Also sets the call's request id to the one in the message.
    """
    try:
        request = pb.GenerateRequest.FromString(message)
    except DecodeError:
        return None
    calls.rename(request.request_id)
    is_time = request.HasField("timeout_s") and math.isfinite(request.timeout_s) and request.timeout_s > 0
    return request.timeout_s if is_time else None


def _end_s(message: bytes) -> float | None:
    timeout_s = timeout_of(message)
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s


async def _before(end_s: float, answer: Coroutine[Any, Any, bytes]) -> bytes:
    work = asyncio.ensure_future(answer)
    if not await _is_done(work, end_s):
        _run_detached(_drain_late(work))
        raise DeadlinePassed(TOO_LATE)
    return work.result()


async def _stream_before(end_s: float, replies: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    while True:
        work = asyncio.ensure_future(anext(replies, None))
        if not await _is_done(work, end_s):
            _run_detached(_drain_late(work, replies))
            raise DeadlinePassed(TOO_LATE)
        if (reply := work.result()) is None:
            return
        try:
            yield reply
        except GeneratorExit:
            await replies.aclose()
            raise


async def _is_done(work: asyncio.Future[Any], end_s: float) -> bool:
    """Wait for `work` until `end_s`; returns whether it is done. A cancellation cancels `work` and waits for it."""
    left_s = max(0.0, end_s - asyncio.get_running_loop().time())
    try:
        await asyncio.wait([work], timeout=left_s)
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait([work])
        raise
    return work.done()


async def _drain_late(work: Awaitable[Any], replies: AsyncGenerator[bytes, None] | None = None) -> None:
    """Wait for the end of a late call, at most CANCEL_GRACE_S."""
    try:
        async with asyncio.timeout(CANCEL_GRACE_S):
            await work
            if replies is not None:
                async for _ in replies:
                    pass
    except TimeoutError:
        logger.warning("a call had not ended %g s after its deadline and is cancelled", CANCEL_GRACE_S)


def _run_detached(rest: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(rest)
    _detached.add(task)
    task.add_done_callback(_detached.discard)
