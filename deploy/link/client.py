"""The orchestrator's end of a link. Each batch is sent as one frame; replies come back as they are ready.

Knows frames and records; must not know Ray or sessions. One event loop, no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from core.errors import WorkerLost
from core.records import DraftUpdate
from deploy.link.address import LinkAddress
from deploy.link.handshake import HANDSHAKE_TIMEOUT_S, MAX_HANDSHAKE_BYTES, answer, check_welcome
from deploy.link.replies import Reply, decode_replies
from deploy.link.requests import Request, encode_requests
from deploy.link.stream import MAX_FRAME_BYTES, FrameReader, LinkError, framed, parse, tune
from deploy.link.tls import TLS_DIR, Certificates
from protos.outrider.link.v1 import link_pb2 as pb


@dataclass(eq=False, slots=True)
class _Call:
    """The replies to one batch, collected and passed on as they arrive; draft updates are only passed on."""

    first_number: int
    future: asyncio.Future[list[Any]]
    replies: list[Reply | None]
    take: Callable[[Any], None] | None
    heard_s: float
    """Loop time at which the engine last reported on this call, or at which it was sent."""
    num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = len(self.replies)

    def fill(self, number: int, reply: Reply) -> None:
        """Add a reply or pass on an update. The last reply completes the call, unless its caller was cancelled."""
        self.heard_s = self.future.get_loop().time()
        if self.take is not None:
            self._pass_on(reply, self.take)
        if isinstance(reply, DraftUpdate):
            return
        self.replies[number - self.first_number] = reply
        self.num_open -= 1
        if self.num_open == 0 and not self.future.done():
            self.future.set_result(self.replies)

    def _pass_on(self, reply: Reply, take: Callable[[Any], None]) -> None:
        """Give a reply to the caller, unless its call has ended."""
        if self.future.done():
            return
        try:
            take(reply)
        except Exception as error:  # noqa: BLE001  the caller handles it; others use the same link
            self.future.set_exception(error)


class _Watch:
    """Ends a call with TimeoutError after `silence_s` without a report on it from the engine."""

    def __init__(self, call: _Call, silence_s: float) -> None:
        self._call = call
        self._silence_s = silence_s
        self._loop = call.future.get_loop()
        self._timer = self._loop.call_at(call.heard_s + silence_s, self._look)

    def _look(self) -> None:
        """Checked when the timer fires, not with every reply: most calls have ended by then."""
        due_s = self._call.heard_s + self._silence_s
        if due_s > self._loop.time():
            self._timer = self._loop.call_at(due_s, self._look)
        elif not self._call.future.done():
            self._call.future.set_exception(TimeoutError())

    def end(self) -> None:
        self._timer.cancel()


class Link(asyncio.Protocol):
    """One connection to one engine. It opens once and closes once."""

    def __init__(self, address: LinkAddress) -> None:
        self._address = address
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._challenge: pb.Challenge | None = None
        self._hello: pb.Hello | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, _Call] = {}
        self._next_number = 0
        self._end: str | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, address: LinkAddress, certificates: Certificates | None = None) -> Link:
        """Open a link; returns once the engine has accepted it. Raises: LinkError, with the reason.

        With `certificates`, the link is encrypted or fails.
        """
        _check_tls(address, certificates)
        loop = asyncio.get_running_loop()
        tls = certificates.for_orchestrator() if certificates is not None else None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                _, link = await loop.create_connection(lambda: cls(address), address.host, address.port, ssl=tls)
                try:
                    await link._opened
                except BaseException:
                    link.close("the attempt to open it was cancelled")
                    raise
        except OSError as error:  # includes TimeoutError
            raise LinkError(str(error) or f"no answer within {HANDSHAKE_TIMEOUT_S:g} s") from error
        return link

    @property
    def is_closed(self) -> bool:
        return self._end is not None

    async def exchange(
        self, batch: Sequence[Request], take: Callable[[Any], None] | None = None, silence_s: float | None = None
    ) -> list[Any]:
        """Send a batch; returns one reply for each request, in order. `take` gets each reply as it arrives.

        Raises: WorkerLost if the link is closed or closes meanwhile; TimeoutError if the engine does not read or does
        not report on the call for `silence_s`; FrameTooLong, in which case nothing was sent; any error of `take`.
        """
        if not self._may_write.is_set():
            async with asyncio.timeout(silence_s):
                await self._may_write.wait()
        if self._end is not None:
            raise WorkerLost(self._end)
        if not batch:
            return []
        call = self._send(batch, take)
        watch = _Watch(call, silence_s) if silence_s is not None else None
        try:
            return await call.future
        finally:
            if watch is not None:
                watch.end()
            for number in range(call.first_number, call.first_number + len(batch)):
                self._calls.pop(number, None)

    async def grow(self, request: Request, take: Callable[[DraftUpdate], None]) -> Any:
        """Send a request; `take` gets each update. Returns the last reply. Raises: as `exchange`."""

        def take_update(reply: Reply) -> None:
            if isinstance(reply, DraftUpdate):
                take(reply)

        (reply,) = await self.exchange([request], take_update)
        return reply

    def _send(self, batch: Sequence[Request], take: Callable[[Any], None] | None) -> _Call:
        assert self._transport is not None, "a link is used once it has been opened"
        loop, first_number = asyncio.get_running_loop(), self._next_number
        frame = framed(encode_requests(first_number, batch))
        call = _Call(first_number, loop.create_future(), [None] * len(batch), take, loop.time())
        self._next_number += len(batch)
        self._calls.update(dict.fromkeys(range(first_number, self._next_number), call))
        self._transport.write(frame)
        return call

    def close(self, reason: str) -> None:
        """Close the link; open calls raise WorkerLost. Later calls have no effect."""
        if self._end is not None:
            return
        self._end = reason
        if self._transport is not None:
            self._transport.abort()
        self._may_write.set()
        if not self._opened.done():
            self._opened.set_exception(LinkError(reason))
        for call in set(self._calls.values()):
            if not call.future.done():
                call.future.set_exception(WorkerLost(reason))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        tune(transport)

    def connection_lost(self, error: Exception | None) -> None:
        why = "" if self._opened.done() else " before it was open; the engine's log says why"
        self.close((f"the link broke: {error}" if error else "the engine closed the link") + why)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._on_replies(frame) if self._opened.done() else self._on_handshake(frame)
        except LinkError as error:
            self.close(f"the link is closed: {error}")

    def _on_handshake(self, frame: bytes) -> None:
        assert self._transport is not None, "data comes from a connection"
        if self._challenge is None or self._hello is None:
            self._challenge = parse(pb.Challenge, frame)
            self._hello = answer(self._challenge, self._address)
            self._transport.write(framed(self._hello.SerializeToString()))
            return
        check_welcome(parse(pb.Welcome, frame), self._challenge, self._hello, self._address)
        self._reader.max_bytes = MAX_FRAME_BYTES
        self._opened.set_result(None)

    def _on_replies(self, frame: bytes) -> None:
        replies, lost, working = decode_replies(frame)
        for number in working:
            if (call := self._calls.get(number)) is not None:
                call.heard_s = call.future.get_loop().time()
        for number, reply in replies:
            if (call := self._calls.get(number)) is not None:  # else its caller was cancelled
                if not isinstance(reply, DraftUpdate):
                    del self._calls[number]
                call.fill(number, reply)
        if lost is not None:
            self.close(lost)


def _check_tls(address: LinkAddress, certificates: Certificates | None) -> None:
    """Raises: LinkError if only one end has TLS. The connection would otherwise fail without a reason."""
    if address.has_tls and certificates is None:
        raise LinkError(f"the engine requires TLS, but here neither engine.link_tls nor {TLS_DIR} is set")
    if certificates is not None and not address.has_tls:
        raise LinkError(f"the engine has no TLS, but it is required here (engine.link_tls or {TLS_DIR})")
