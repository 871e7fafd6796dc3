"""The common part of both simulated engines: the real protocol, and continuous batching with a law for pass times.

Knows messages, rows and time; subclasses compute (`target`, `draft`). Messages are checked by `core.protocol`, as in
the real engines, so the orchestrator sees the same behaviour.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from core.config import DECODE_TOKENS, MIN_CHUNK_TOKENS
from core.errors import WorkerLost
from core.protocol import OVERTAKEN, EndedSessions, HeldTokens, missing_of, refusal_of
from core.records import (
    DraftReply,
    DraftRequest,
    Refused,
    Stamp,
    Timing,
    VerifyReply,
    VerifyRequest,
    is_last,
)
from simulation.engines.hardware import EngineLaw
from simulation.engines.texts import Text

Request = TypeVar("Request", bound=VerifyRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


@dataclass(eq=False)
class Job(Generic[Request]):
    """A request in progress."""

    request: Request
    held: HeldTokens
    pending: list[int]
    """Committed tokens that no pass has taken yet."""
    arrived_s: float
    started_s: float | None = None
    num_passes: int = 0
    num_rows: int = 0
    num_sessions: int = 0
    num_held: int = 0
    """Number of tokens that the engine held when the request came."""

    @property
    def is_decoding(self) -> bool:
        """Whether the job decodes. The last chunk of a prompt is scheduled like its other chunks."""
        return len(self.pending) <= (MIN_CHUNK_TOKENS if self.num_passes else DECODE_TOKENS)

    def timing(self, now_s: float) -> Timing:
        started_s = now_s if self.started_s is None else self.started_s
        waited_s, computed_s = started_s - self.arrived_s, now_s - started_s
        return Timing(waited_s, computed_s, self.num_passes, self.num_rows, self.num_sessions)


class SimEngine(ABC, Generic[Request, Reply]):
    """One incarnation of an engine.

    A step takes all jobs that are ready; later ones wait for the next step. After `kill` every call raises WorkerLost.
    """

    feature_width = 0
    """Numbers per token of the features that a head reads."""

    def __init__(self, engine_id: str, epoch: int, text: Text, law: EngineLaw) -> None:
        self.engine_id = engine_id
        self.epoch = epoch
        self.slowness = 1.0
        """Factor on the duration of every pass."""
        self.busy_s = 0.0
        self.num_passes = 0
        self.num_rows = 0
        self.is_dead = False
        self._text = text
        self._law = law
        self._sessions: dict[str, HeldTokens] = {}
        self._ended = EndedSessions()
        self._jobs: list[Job[Request]] = []
        self._open: dict[Stamp, Callable[[Reply | WorkerLost], None]] = {}
        """Callback of each request without a last reply."""
        self._worker: asyncio.Task[None] | None = None
        self._thaw = asyncio.Event()
        self._thaw.set()
        self.stepped_s = 0.0
        """When the last pass ended, in seconds."""
        self._free_since_s: float | None = None
        """When the last pass ended, if another follows at once; else None."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.engine_id} epoch {self.epoch}, {len(self._jobs)} jobs>"

    @property
    def sessions(self) -> Sequence[str]:
        """Sessions that have state here."""
        return tuple(self._sessions)

    # Messages

    async def exchange(self, batch: Sequence[Request], take: Callable[[Reply], None]) -> None:
        """Send requests and pass each reply to `take`; see `core.ports.EnginePort`. Raises: WorkerLost."""
        await self._thaw.wait()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A message that arrives twice is answered once.
        stamps = {request.stamp for request in batch} - self._open.keys()
        num_open = len(stamps)

        def pass_on(reply: Reply | WorkerLost) -> None:
            nonlocal num_open
            if ended.done():  # the caller has left
                return
            if isinstance(reply, WorkerLost):
                ended.set_exception(reply)
                return
            num_open -= is_last(reply)
            take(reply)
            if not num_open:
                ended.set_result(None)

        for request in batch:
            if request.stamp in stamps:
                stamps.remove(request.stamp)
                self._open[request.stamp] = pass_on
                self._put(request)
        if num_open:
            await ended

    def has(self, stamp: Stamp) -> bool:
        """Whether the engine has this request and has not answered it."""
        return any(job.request.stamp == stamp for job in self._jobs)

    def release(self, sessions: Sequence[str]) -> None:
        """Free the state of these sessions. Later messages for them have no effect."""
        for session in sessions:
            self._ended.add(session)
            if (held := self._sessions.pop(session, None)) is not None:
                self._supersede(held)

    def forget(self, session: str) -> None:
        """Drop the state of an idle session, as a full engine does."""
        if not any(job.request.stamp.lease == session for job in self._jobs):
            self._sessions.pop(session, None)

    def _put(self, request: Request) -> None:
        if self.is_dead:
            self._open.pop(request.stamp)(WorkerLost(f"{self.engine_id} is gone"))
        elif isinstance(work := self._admit(request), Job):
            self._jobs.append(work)
            if self._worker is None:
                self._worker = asyncio.create_task(self._work(), name=f"work of {self.engine_id}")
        elif work is not None:
            self._reply(work)

    def _reply(self, reply: Reply) -> None:
        (self._open.pop if is_last(reply) else self._open.__getitem__)(reply.stamp)(reply)

    def _admit(self, request: Request) -> Job[Request] | Reply | None:
        """A job for this request; or its reply, if there is nothing to compute; None if the reply has been sent."""
        stamp = request.stamp
        held, has_ended = self._sessions.get(stamp.lease), stamp.lease in self._ended
        refusal = refusal_of(
            request,
            held,
            epoch=self.epoch,
            has_ended=has_ended,
            vocab_size=self._text.vocab_size,
            feature_width=self.feature_width,
        )
        if (reply := refusal or missing_of(request, held)) is not None:
            return cast("Reply", reply)
        if request.base.num_tokens == 0 and request.spec is not None:
            held = self._sessions.setdefault(stamp.lease, HeldTokens(request.spec))
            held.take_spec(request.spec)
        assert held is not None, "else its base is missing"
        self._supersede(held)
        held.last_round = stamp.round
        return self._begin(request, held, asyncio.get_running_loop().time())

    def _supersede(self, held: HeldTokens) -> None:
        for job in [job for job in self._jobs if job.held is held]:
            self._conclude(job, cast("Reply", Refused(job.request.stamp, OVERTAKEN)))

    def _conclude(self, job: Job[Request], reply: Reply) -> None:
        self._jobs.remove(job)
        self._reply(reply)

    # Passes

    async def _work(self) -> None:
        try:
            while self._has_work():
                if not self._thaw.is_set():
                    await self._thaw.wait()
                    self._free_since_s = None
                await self._step()
        finally:
            self._worker = self._free_since_s = None

    def _has_work(self) -> bool:
        return bool(self._jobs)

    async def _step(self) -> tuple[float, float]:
        """Run one forward pass over the jobs that are ready, and answer them. Return when the pass began and ended.

        A real engine reads messages between passes. Therefore a message that arrives during the pass already finds the
        pass's tokens held.
        """
        shares = self._plan(self._ready())
        num_rows = sum(num_tokens + num_guesses for _, num_tokens, num_guesses in shares)
        duration_s = self._law.pass_s(num_rows) * self.slowness
        loop = asyncio.get_running_loop()
        began_s = loop.time() if self._free_since_s is None else self._free_since_s
        for job, _, _ in shares:
            job.started_s = loop.time() if job.started_s is None else job.started_s
            job.num_passes += 1
            job.num_rows += num_rows
            job.num_sessions = len(self._sessions)
        for job, num_tokens, _ in shares:
            job.held.log.extend(job.pending[:num_tokens])
            job.pending = job.pending[num_tokens:]
        self.num_passes, self.num_rows = self.num_passes + 1, self.num_rows + num_rows
        await until(began_s + duration_s)
        self._free_since_s = self.stepped_s = ended_s = loop.time()
        self.busy_s += duration_s
        # a job may have been overtaken during the pass, or its session ended
        self._end_pass([job for job, _, _ in shares if job in self._jobs and not job.pending], ended_s)
        return began_s, ended_s

    def _ready(self) -> list[Job[Request]]:
        """Jobs with rows for the next pass."""
        return self._jobs

    def _plan(self, jobs: Sequence[Job[Request]]) -> list[tuple[Job[Request], int, int]]:
        """(job, number of tokens, number of guesses) of the next pass: decoding first, then prefill in chunks."""
        shares: list[tuple[Job[Request], int, int]] = []
        rows_left = self._law.max_step_tokens
        for job in sorted(jobs, key=lambda job: not job.is_decoding):
            num_guesses, is_decoding = self._num_guesses(job), job.is_decoding
            if shares and not is_decoding:
                rows_left = min(rows_left, self._law.prefill_chunk_tokens)
            if len(job.pending) + num_guesses <= rows_left or (is_decoding and not shares):
                share = (job, len(job.pending), num_guesses)
            elif not is_decoding and rows_left > 0:
                share = (job, min(rows_left, len(job.pending) - 1), 0)
            else:
                continue
            shares.append(share)
            rows_left -= share[1] + share[2]
        return shares

    # Faults

    def kill(self) -> None:
        """End this incarnation; open calls raise WorkerLost."""
        self.is_dead = True
        self._thaw.set()
        if self._worker is not None:
            self._worker.cancel()
        self._jobs.clear()
        self._sessions.clear()
        lost, self._open = self._open, {}
        for pass_on in lost.values():
            pass_on(WorkerLost(f"{self.engine_id} died"))

    def freeze(self) -> None:
        """Stop after the current pass without dying. Like a stopped process, the engine then reads no messages."""
        self._thaw.clear()

    def thaw(self) -> None:
        self._thaw.set()

    # Interface for subclasses

    @abstractmethod
    def _begin(self, request: Request, held: HeldTokens, now_s: float) -> Job[Request] | Reply | None:
        """Bring the held tokens to the prefix of an accepted request. Returns like `_admit`."""

    @abstractmethod
    def _num_guesses(self, job: Job[Request]) -> int:
        """Number of guesses fed together with the job's last committed token."""

    @abstractmethod
    def _end_pass(self, jobs: Sequence[Job[Request]], now_s: float) -> None:
        """Handle the jobs whose last committed token and guesses were in the pass: answer them, or prepare the next."""


async def until(time_s: float) -> None:
    """Wait until the loop's clock shows this time."""
    loop = asyncio.get_running_loop()
    reached: asyncio.Future[None] = loop.create_future()
    timer = loop.call_at(time_s, reached.set_result, None)
    try:
        await reached
    finally:
        timer.cancel()
