"""A fake model that says one thing, behind the real ingress on a real socket, and breaks off where it is told to.

The text, the ending and the accounting of each chunk are the product's own (`orchestrator.session.output`), those of
resumed streams included; made up are only the tokens, the blocks in which they come, and the failures.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from core.errors import InvalidRequest, WorkerLost
from core.records import Chunk, GenerationRequest, SpeculationStats, TokenLogprobs
from orchestrator.session.output import Output
from orchestrator.text.detokenize import IncrementalDetokenizer
from orchestrator.text.tokenizer import Tokenizer
from tests.deploy.grpc.rpc import INFO, TOKENIZER, Script

NEVER = 10**9
LOST = WorkerLost("the replica died")


@dataclass(frozen=True)
class Plan:
    """The course of one call: how its tokens are cut into chunks, and the error after a number of them."""

    sizes: tuple[int, ...] = ()
    """Sizes of the first chunks; the rest come one by one."""
    num_chunks: int = NEVER
    error: Exception = LOST


class Story(Script):
    """Says `token_ids`, going on wherever a request resumes; each call has the next of the plans, then none."""

    def __init__(self, token_ids: Sequence[int], plans: Sequence[Plan] = (), tokenizer: Tokenizer = TOKENIZER) -> None:
        super().__init__()
        self.token_ids = tuple(token_ids)
        self.plans = list(plans)
        self.tokenizer = tokenizer

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        plan = self.plans[len(self.requests)] if len(self.requests) < len(self.plans) else Plan()
        self.requests.append(request)
        try:
            for num_sent, chunk in enumerate(self._chunks(request, plan.sizes)):
                if num_sent == plan.num_chunks:
                    raise plan.error
                yield chunk
                await asyncio.sleep(0)
            if plan.num_chunks != NEVER:
                raise plan.error
        finally:
            self.num_closed += 1

    def _chunks(self, request: GenerationRequest, sizes: Sequence[int]) -> Iterator[Chunk]:
        position = len(request.resume_tokens)
        if request.resume_tokens != self.token_ids[:position]:
            raise InvalidRequest("resume_token_ids", "is not what was said")
        detokenizer = IncrementalDetokenizer(self.tokenizer, request.stop, request.include_stop)
        output = Output(request, frozenset(INFO.eos_token_ids), detokenizer)
        if request.resume_tokens and (last := output.resume(request.resume_tokens)) is not None:
            yield replace(last, stats=SpeculationStats())
            return
        for size in [*sizes, *([1] * len(self.token_ids))]:
            chunk = self._chunk(output, position, size, request)
            yield replace(chunk, stats=SpeculationStats()) if output.is_finished else chunk
            if output.is_finished:
                return
            position += size

    def _chunk(self, output: Output, start: int, size: int, request: GenerationRequest) -> Chunk:
        """Guesses and logprobs can be told from the position of the token alone."""
        ids = self.token_ids[start : start + size]
        positions = range(start, start + len(ids))
        logprobs = tuple(TokenLogprobs(-float(i + 1), ((i % 7, -0.5),)) for i in positions)
        chunk = output.commit(ids, logprobs if request.num_logprobs is not None else ())
        return replace(chunk, is_guess=tuple(i % 3 == 0 for i in positions[: len(chunk.token_ids)]))


class Relay:
    """A TCP proxy before a server, which resets each connection after so many bytes of the server's."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self.limits: list[int] = []
        """Limits of the connections to come; after these there is none."""
        self.num_resets = 0
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        _reset(self._listener)
        self.cut()

    def cut(self) -> None:
        """Reset what is open."""
        while self._open:
            _reset(*self._open.pop())

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            limit = self.limits.pop(0) if self.limits else NEVER
            server = socket.create_connection(self._server)
            self._open.append((client, server))
            for source, sink, most in ((client, server, NEVER), (server, client, limit)):
                threading.Thread(target=self._pass_on, args=(source, sink, most), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, limit: int) -> None:
        with suppress(OSError):
            while limit > 0 and (data := source.recv(65536)):
                sink.sendall(data[:limit])
                limit -= len(data)
        if limit <= 0:
            self.num_resets += 1
        _reset(source, sink)


def _reset(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):  # by the other direction's thread, or by its peer
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST, not FIN
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@contextmanager
def relay(address: str) -> Iterator[Relay]:
    made = Relay(address)
    try:
        yield made
    finally:
        made.close()
