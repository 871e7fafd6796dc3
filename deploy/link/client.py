"""The orchestrator's end of a link. Each batch is sent as one frame; replies come back as they are ready.

Knows frames and records; must not know Ray or sessions. One event loop, no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from core.errors import WorkerLost
from core.records import Refused, Stamp, is_last
from deploy.link.address import LinkAddress
from deploy.link.handshake import HANDSHAKE_TIMEOUT_S, MAX_HANDSHAKE_BYTES, answer, check_welcome
from deploy.link.replies import Reply, decode_replies
from deploy.link.requests import Request, encode_requests
from deploy.link.stream import MAX_FRAME_BYTES, FrameReader, FrameTooLong, LinkError, framed, parse, tune
from deploy.link.tls import TLS_DIR, Certificates
from protos.outrider.link.v1 import link_pb2 as pb


@dataclass(eq=False, slots=True)
class _SentBatch:
    """The requests of one batch that have no last reply yet."""

    open: set[Stamp]
    take: Callable[[Any], None]
    ended: asyncio.Future[None]
    reported_s: float
    """Loop time at which the engine last reported on one of them, or at which they were sent."""

    def note_report(self) -> None:
        self.reported_s = self.ended.get_loop().time()

    def pass_on(self, reply: Reply) -> None:
        """Give a reply to the caller, unless the batch has failed. The last one ends it."""
        if self.ended.done():
            return
        try:
            self.take(reply)
        except Exception as error:  # noqa: BLE001  the caller handles it; others use the same link
            self.ended.set_exception(error)
            return
        if is_last(reply):
            self.open.discard(reply.stamp)
            if not self.open:
                self.ended.set_result(None)


class _Watch:
    """Fails a batch with TimeoutError after `silence_s` without a report on it from the engine."""

    def __init__(self, sent: _SentBatch, silence_s: float) -> None:
        self._sent = sent
        self._silence_s = silence_s
        self._loop = sent.ended.get_loop()
        self._timer = self._loop.call_at(sent.reported_s + silence_s, self._look)

    def _look(self) -> None:
        """Checked when the timer fires, not with every reply: most batches have ended by then."""
        due_s = self._sent.reported_s + self._silence_s
        if due_s > self._loop.time():
            self._timer = self._loop.call_at(due_s, self._look)
        elif not self._sent.ended.done():
            self._sent.ended.set_exception(TimeoutError())

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
        self._open: dict[Stamp, _SentBatch] = {}
        """The batch of each request without a last reply."""
        self._end: str | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._num_waiting = 0
        """Number of calls that wait until they may write, or for an earlier one to do so."""
        self._turn = asyncio.Lock()
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
        self, batch: Sequence[Request], take: Callable[[Any], None], silence_s: float | None = None
    ) -> None:
        """Send requests and pass each reply to `take`; see `core.ports.EnginePort`. A request too long for a frame is
        refused.

        Raises: WorkerLost if the link is closed or closes meanwhile; TimeoutError if the engine does not read or does
        not report on these requests for `silence_s`; any error of `take`.
        """
        if not self._may_write.is_set() or self._num_waiting:
            await self._wait_to_write(silence_s)
        if self._end is not None:
            raise WorkerLost(self._end)
        if not batch:
            return
        loop = asyncio.get_running_loop()
        sent = _SentBatch({request.stamp for request in batch}, take, loop.create_future(), loop.time())
        self._open.update(dict.fromkeys(sent.open, sent))
        watch = _Watch(sent, silence_s) if silence_s is not None else None
        try:
            self._send(batch)
            await sent.ended
        finally:
            if watch is not None:
                watch.end()
            for stamp in sent.open:
                self._open.pop(stamp, None)

    async def _wait_to_write(self, silence_s: float | None) -> None:
        """Calls write in the order in which they were made, also right after the engine has read on."""
        self._num_waiting += 1
        try:
            async with asyncio.timeout(silence_s), self._turn:
                await self._may_write.wait()
        finally:
            self._num_waiting -= 1

    def _send(self, batch: Sequence[Request]) -> None:
        """Send the requests in one frame, or in several if one would be too long."""
        assert self._transport is not None, "a link is used once it has been opened"
        try:
            frame = framed(encode_requests(batch))
        except FrameTooLong as error:
            if len(batch) == 1:
                self._on_reply(Refused(batch[0].stamp, f"the request is too long for a link: {error}", field="prompt"))
                return
            middle = len(batch) // 2
            self._send(batch[:middle])
            self._send(batch[middle:])
            return
        self._transport.write(frame)

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
        for sent in set(self._open.values()):
            if not sent.ended.done():
                sent.ended.set_exception(WorkerLost(reason))

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
        for stamp in working:
            if (sent := self._open.get(stamp)) is not None:
                sent.note_report()
        for reply in replies:
            self._on_reply(reply)
        if lost is not None:
            self.close(lost)

    def _on_reply(self, reply: Reply) -> None:
        sent = self._open.pop(reply.stamp, None) if is_last(reply) else self._open.get(reply.stamp)
        if sent is not None:  # else its caller was cancelled
            sent.note_report()
            sent.pass_on(reply)


def _check_tls(address: LinkAddress, certificates: Certificates | None) -> None:
    """Raises: LinkError if only one end has TLS. The connection would otherwise fail without a reason."""
    if address.has_tls and certificates is None:
        raise LinkError(f"the engine requires TLS, but here neither engine.link_tls nor {TLS_DIR} is set")
    if certificates is not None and not address.has_tls:
        raise LinkError(f"the engine has no TLS, but it is required here (engine.link_tls or {TLS_DIR})")
