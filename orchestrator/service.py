"""One request from admission to its last chunk."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from core.config import ServiceConfig
from core.errors import DeadlinePassed, OutriderError, RequestCancelled, Unavailable
from core.ports import Clock, Grammars, Leases
from core.records import Chunk, GenerationRequest, ModelInfo
from orchestrator.admission import Admission, Place, QueueReport
from orchestrator.dispatch import Runner
from orchestrator.guessers import Guessers
from orchestrator.policy import Controller, ControlReport, Policies
from orchestrator.session import BeamSession, DraftWait, Pace, Pair, Session
from orchestrator.text import IncrementalDetokenizer, Tokenizer


class Service:
    """Serves completions from one pair of models."""

    def __init__(
        self,
        config: ServiceConfig,
        target: ModelInfo,
        draft: ModelInfo | None,
        tokenizer: Tokenizer,
        leases: Leases,
        clock: Clock,
        policies: Policies | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Open the guessers.

        `grammars` compiles the output grammars that serve as guessers.
        Raises: ConfigError if a source of guesses is not available.
        """
        guessers = Guessers.open(config.speculation, tokenizer, grammars)
        drafts = (draft, *(None for _ in config.extra_drafts))
        self._pair = Pair(target, drafts, config.speculation, config.limits, guessers)
        self._tokenizer = tokenizer
        self._clock = clock
        self._policies = policies if policies is not None else Controller(config.speculation, target.step_times_s)
        self._beam_paces = defaultdict[int, Pace](Pace)
        """Whether drafting pays, by number of beams."""
        self._extra_policies = [Controller(config.speculation, target.step_times_s) for _ in config.extra_drafts]
        """One per extra draft: margins and pass times are calibrated for each draft separately."""
        self._admission = Admission(config.limits, clock)
        self._runner = Runner(leases, clock, len(drafts))
        self._is_closing = False
        self._num_started = 0

    def use_draft(self, draft: ModelInfo, number: int = 0) -> None:
        """Use this draft for completions that start from now on. Extra drafts are numbered from 1."""
        known = list(self._pair.drafts)
        known[number] = draft
        self._pair = replace(self._pair, drafts=tuple(known))

    @property
    def num_sessions(self) -> int:
        return self._runner.num_sessions

    @property
    def num_drafted(self) -> int:
        """Number of sessions that hold a lease on a draft."""
        return self._runner.num_drafted

    @property
    def draft_wait(self) -> DraftWait:
        """Seconds spent waiting for drafts since the start, over all sessions."""
        return self._runner.draft_wait

    def report(self) -> ControlReport:
        """Return the current draft length, the reason, and the estimates behind it."""
        return self._policies.report()

    @property
    def num_waiting(self) -> int:
        """Number of completions in the admission queue."""
        return self._admission.num_waiting

    @property
    def expected_wait_s(self) -> float:
        """Expected wait in seconds of a request that arrives now."""
        return self._admission.expected_wait_s

    @property
    def full_wait_s(self) -> float:
        """Expected wait in seconds with every place taken and the queue full."""
        return self._admission.full_wait_s

    def queue_report(self) -> QueueReport:
        """Return the queue's length, and the waits of the requests admitted since the last report."""
        return self._admission.report()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one completion as they are committed. The last chunk has a finish reason.

        Closing the iterator, or cancelling the task that waits for it, frees what the completion holds on both engines.
        Raises: OutriderError.
        """
        async with self.admit([request]) as (stream,), aclosing(stream):
            async for chunk in stream:
                yield chunk

    @asynccontextmanager
    async def admit(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[Sequence[AsyncGenerator[Chunk, None]], None]:
        """Wait for a place for each sample of a call, then yield one stream per sample; see `generate`.

        Raises: OutriderError. Nothing is then counted against the caller's quotas.
        """
        if self._is_closing:
            raise Unavailable("this orchestrator is shutting down")
        deadline = requests[0].deadline
        if deadline is not None and deadline <= self._clock.now():
            raise DeadlinePassed("the request's deadline had passed when it arrived")
        async with self._admission.places(requests) as places:
            yield [self._complete(*each) for each in zip(requests, places, strict=True)]

    async def _complete(self, request: GenerationRequest, place: Place) -> AsyncGenerator[Chunk, None]:
        pieces: asyncio.Queue[Chunk | OutriderError] = asyncio.Queue()
        session = self._session(request)
        self._runner.start(session, pieces.put_nowait, request.deadline)
        num_tokens = 0
        try:
            async for chunk in _until_last_chunk(pieces, request.num_outputs):
                num_tokens += len(chunk.token_ids)
                place.num_tokens = num_tokens
                yield chunk
        finally:
            self._runner.abandon(session.id, RequestCancelled("the client went away"))
            place.leave(num_tokens)

    def _session(self, request: GenerationRequest) -> Session | BeamSession:
        session_id = self._new_session_id(request)
        if request.beams is not None:
            pace = self._beam_paces[request.beams.width]
            return BeamSession(request, request.beams, self._pair, self._tokenizer, session_id, pace)
        return Session(
            request,
            self._pair,
            self._policies.policy(request),
            IncrementalDetokenizer(self._tokenizer, request.stop, request.include_stop),
            session_id,
            [policies.policy(request) for policies in self._extra_policies],
        )

    def wind_down(self) -> int:
        """Refuse new requests. Return the number of completions whose last chunk has not been taken yet."""
        self._is_closing = True
        self._admission.refuse_waiting(Unavailable("this orchestrator is shutting down; ask another"))
        return self._admission.num_admitted

    async def close(self) -> None:
        """Refuse new requests, end running ones with UNAVAILABLE, and wait until all leases are released."""
        self.wind_down()
        await self._runner.close(Unavailable("this orchestrator is shutting down; resume the output at another"))

    def _new_session_id(self, request: GenerationRequest) -> str:
        """Return an id that is unique in this service, whatever ids clients choose."""
        self._num_started += 1
        return f"{request.request_id}#{self._num_started}"


async def _until_last_chunk(pieces: asyncio.Queue[Chunk | OutriderError], num_outputs: int) -> AsyncIterator[Chunk]:
    """The chunks up to the last one of each output."""
    while num_outputs:
        piece = await pieces.get()
        if isinstance(piece, OutriderError):
            try:
                raise piece
            finally:
                del piece  # the traceback references this frame; the cycle would keep the session until a collection
        yield piece
        num_outputs -= piece.finish_reason is not None
