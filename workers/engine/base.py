"""Base of the target and draft engines: sessions, continuous batching, and KV memory.

An engine is a plain synchronous object: `add` requests, `step` until there is no work, collect replies. It does not
know event loops or Ray, so tests can drive it directly. `workers.engine.thread` runs it on a thread.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, Generic, TypeVar

import torch

from core.config import EngineConfig
from core.errors import first_line
from core.protocol import OVERTAKEN, missing_of, refusal_of
from core.records import DraftReply, EngineStats, Findings, Missing, Refused, SequenceSpec, VerifyReply
from core.speculation import TokenTree
from workers.engine import scheduler
from workers.engine.jobs import Job, Request, Share
from workers.engine.kv_room import KVRoom
from workers.engine.prefix_cache import Prefixes
from workers.engine.scheduler import PrefillPace, RowLimit
from workers.engine.sequences import HeldSequence, SequenceStore
from workers.grammar import Grammars
from workers.model import digest_of
from workers.noise import find_noise_kernel
from workers.runtime import HeadRuntime, KVHeadRuntime, ModelRuntime, Pacer, Scores
from workers.step import StepRows

logger = logging.getLogger(__name__)

COMPILATION_WAIT_S = 0.005
"""Polling interval for messages, in seconds, while the engine waits only for a grammar to compile."""

AnyRuntime = ModelRuntime | HeadRuntime | KVHeadRuntime
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


class Engine(ABC, Generic[Request, Reply]):
    """Serves many sessions from one model.

    Invariant: a session has at most one job; between steps its tokens and its KV agree (`check_integrity`).
    """

    kv_room_type: type[KVRoom] = KVRoom

    def __init__(self, runtime: AnyRuntime, config: EngineConfig, epoch: int) -> None:
        self.info = runtime.info
        self.epoch = epoch
        self._runtime = runtime
        self._config = config
        self._store = SequenceStore(runtime.cache)
        self._room = self.kv_room_type(self._store, runtime.cache, self._lose)
        self._is_waiting = False
        """Whether no job can run until a message arrives, a session ends, or a session times out."""
        self._prefixes = Prefixes(self._store, runtime.cache, is_shared=config.share_prefixes)
        self._pace = PrefillPace(config.prefill_stretch, config.prefill_chunk_tokens)
        self._limit = RowLimit(config.max_step_tokens)
        self._pacer = Pacer.named(config.paced_as) if config.paced_as is not None else None
        self._grammars = Grammars.of_engine(config, runtime.info)
        self._jobs: list[Job[Request]] = []
        self._replies: list[Reply | Missing | Refused] = []
        self._adapters: dict[str, int] = {}
        """Numbers of the loaded adapters, by digest."""
        self._num_steps = 0
        self._num_rows = 0
        self._postponed: Job[Request] | None = None
        """Last job that could not start for lack of memory; logged once."""
        self._step_time_s = 0.0
        self._forward_time_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._replies or (self._jobs and not self._is_waiting))

    def warm_up(self, progress: Callable[[str], None], machine: str = "", known: Findings | None = None) -> Findings:
        """Warm up, so that no request pays for first use. The returned findings make a later engine start faster.

        `known` are the findings of an earlier engine; `machine` names this machine. Raises: CheckpointError.
        """
        progress("warming up")
        self._grammars.prepare()
        find_noise_kernel(self._runtime.cache.keys[0].device)  # compile and check now, not at the first sampled request
        findings = self._runtime.warm_up(progress, machine, known)
        self.info = replace(
            self.info,
            digest=digest_of(self._config),
            arithmetic=self._runtime.arithmetic,
            is_deterministic=findings.tile_rows is not None,
        )
        times_s, pacer = findings.step_times_s, self._pacer
        if pacer is not None:
            pacer.warn_of_overruns(times_s)
            times_s = tuple((num_rows, pacer.lasts_s(num_rows, seconds)) for num_rows, seconds in times_s)
        for num_rows, seconds in times_s:
            self._pace.observe(num_rows, seconds)
        self.info = replace(self.info, step_times_s=times_s)
        return findings

    def build_more(self, *, is_idle: bool) -> bool:
        """Build something that the start left out and later steps gain by, if it is due; returns whether it was.

        Call between steps, and after their replies are sent. `is_idle`: no request waits.
        """
        return self._runtime.build_more(is_idle=is_idle)

    def close(self) -> None:
        """Stop the other ranks of the model, if any; no step may follow."""
        self._grammars.close()
        self._runtime.close()

    def stats(self) -> EngineStats:
        cache = self._runtime.cache
        return EngineStats(
            num_sessions=len(self._store),
            num_jobs=len(self._jobs),
            num_waiting=sum(not job.held.kv.blocks for job in self._jobs),
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_free_blocks,
            num_states=cache.states.num_states,
            num_free_states=cache.states.num_free if cache.states.is_used else 0,
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            num_eager_steps=self._runtime.num_eager_steps,
            num_overruns=self._pacer.num_overruns if self._pacer else 0,
            num_preemptions=self._room.num_preemptions,
            num_adopted_tokens=self._prefixes.num_adopted_tokens,
            step_time_s=self._step_time_s,
            forward_time_s=self._forward_time_s,
        )

    def check_integrity(self) -> None:
        """Raises: AssertionError unless every block is free or owned once, and tokens agree with KV."""
        self._store.check_integrity()

    # Requests

    def add(self, request: Request, arrived_s: float | None = None) -> None:
        """Queue a request; a later `step` returns its reply.

        `arrived_s`: monotonic time from which its wait is counted; now if None.
        """
        self._is_waiting = False
        held = self._store.find(request.stamp.lease)
        reply = self._refusal_of(request, held) or missing_of(request, held)
        if reply is not None:
            self._replies.append(reply)
            return
        if request.base.num_tokens == 0 and request.spec is not None:
            num_source = request.spec.num_source if self.info.max_source_tokens else 0
            held = self._store.open(request.stamp.lease, request.spec, tuple(request.suffix[:num_source]))
            held.adapter = 0 if request.spec.adapter is None else self._adapters[request.spec.adapter.digest]
            held.grammar = self._grammars.state(request.spec.grammar, held.grammar)
        assert held is not None, "else its base is missing"
        self._supersede(held)
        held.last_round, held.last_used_s = request.stamp.round, monotonic()
        self._begin(request, held, held.last_used_s if arrived_s is None else arrived_s)

    def _refusal_of(self, request: Request, held: HeldSequence | None) -> Refused | None:
        """Why the message is stale, malformed or too long for this engine; None if it is acceptable."""
        has_ended = self._store.has_ended(request.stamp.lease)
        refusal = refusal_of(
            request,
            held,
            epoch=self.epoch,
            has_ended=has_ended,
            vocab_size=self.info.vocab_size,
            feature_width=self.info.feature_width,
        )
        return (
            refusal
            or self._refusal_of_adapter(request)
            or self._refusal_of_source(request)
            or self._refusal_of_size(request, held)
        )

    def _refusal_of_source(self, request: Request) -> Refused | None:
        most = self.info.max_source_tokens
        if request.base.num_tokens or request.spec is None or not most or 0 < request.spec.num_source <= most:
            return None
        return Refused(
            request.stamp, f"{request.spec.num_source} tokens, but its encoder reads 1 to {most}", field="source"
        )

    def _refusal_of_adapter(self, request: Request) -> Refused | None:
        adapter = None if request.spec is None else request.spec.adapter
        if adapter is None or adapter.digest in self._adapters:
            return None
        return Refused(request.stamp, f"adapter {adapter.name!r} has been unloaded", field="model")

    def _text_limit(self, request: Request, held: HeldSequence | None) -> int:
        """Length of the longest text of the request's session, its source included."""
        spec = self._spec_of(request, held)
        return self.info.text_limit(0 if spec is None else spec.num_source)

    @staticmethod
    def _spec_of(request: Request, held: HeldSequence | None) -> SequenceSpec | None:
        return request.spec if held is None or request.base.num_tokens == 0 else held.spec

    def _refusal_of_size(self, request: Request, held: HeldSequence | None) -> Refused | None:
        guesses, limit = self._needed_guesses(request), self._text_limit(request, held)
        num_rows = num_positions = request.num_committed + len(guesses)
        if num_rows > limit:
            num_positions = request.num_committed + max(guesses.depths, default=0)
        if num_positions > limit:
            return Refused(request.stamp, f"{num_positions} tokens exceed the context of {limit}")
        if self._runtime.cache.num_blocks_for(num_rows) > self._runtime.cache.num_blocks:
            return self._refusal_of_rows(request, held, num_rows)
        if len(guesses) > self._runtime.cache.states.max_guesses():
            return Refused(request.stamp, f"{len(guesses)} guesses exceed the recurrent states of this engine")
        return None

    def _refusal_of_rows(self, request: Request, held: HeldSequence | None, num_rows: int) -> Refused:
        """Beams grow apart until they exceed the KV cache, which no earlier check can know; to try again is no use."""
        spec = self._spec_of(request, held)
        if spec is None or not spec.num_likeliest:
            return Refused(request.stamp, f"{num_rows} tokens exceed the KV cache of this engine")
        size = self.info.kv_cache_tokens
        return Refused(request.stamp, f"have {num_rows} tokens, but the KV cache has room for {size}", field="beams")

    def _supersede(self, held: HeldSequence) -> None:
        """Refuse the session's open request: a later message replaces it."""
        for job in [job for job in self._jobs if job.held is held]:
            self._answer(job, Refused(job.request.stamp, OVERTAKEN))

    def _answer(self, job: Job[Request], reply: Reply | Missing | Refused) -> None:
        self._jobs.remove(job)
        job.held.last_used_s = monotonic()
        self._replies.append(reply)

    def release(self, sessions: Sequence[str]) -> None:
        """Free the KV and tokens of these sessions; later messages of an ended session have no effect."""
        self._is_waiting = False
        for session in sessions:
            if (held := self._store.find(session)) is not None:
                self._supersede(held)
            self._store.release(session)

    def expire(self) -> list[str]:
        """Free sessions that sent no message for `session_timeout_s`, and return their names."""
        self._is_waiting = False
        limit_s = monotonic() - self._config.session_timeout_s
        busy = {job.held.session for job in self._jobs}
        silent = [held.session for held in self._store if held.last_used_s < limit_s and held.session not in busy]
        for session in silent:
            self._store.drop(session)
        return silent

    # Steps

    def step(self) -> list[Reply | Missing | Refused]:
        """Run one forward pass over the jobs that are ready; return the replies it completes."""
        if self._jobs:
            started_s = monotonic()
            self._limit.recover(started_s)
            self._make_step(started_s)
            self._step_time_s += monotonic() - started_s
        replies, self._replies = self._replies, []
        return replies

    def _ready_jobs(self) -> list[Job[Request]]:
        """Jobs that may join the next step. A job that waits for its grammar does not block others."""
        jobs = self._with_room([job for job in self._jobs if job.is_ready])
        if not jobs:
            unready = next((job for job in self._jobs if not job.is_ready), None)
            if unready is not None:
                unready.wait_until_ready(COMPILATION_WAIT_S)
            self._is_waiting = unready is None
        return jobs

    def _with_room(self, jobs: Sequence[Job[Request]]) -> list[Job[Request]]:
        """Jobs that already have KV, and jobs that may start now."""
        if all(job.held.kv.blocks for job in jobs):
            return list(jobs)
        self._room.begin_step(self._jobs)
        self._prefixes.begin_step()
        running: set[Job[Request]] = set()
        for job in sorted(jobs, key=self._room.start_order):
            try:
                if self._may_run(job):
                    running.add(job)
            except torch.OutOfMemoryError as error:  # jobs that started earlier continue
                if not running:
                    raise
                self._postpone(job, first_line(error))
                break
        return [job for job in jobs if job in running]

    def _postpone(self, job: Job[Request], problem: str) -> None:
        """Return the job's partially allocated memory; the next step tries it again."""
        job.restart()
        self._store.truncate(job.held, 0)
        torch.cuda.empty_cache()  # no effect on other devices
        if self._postponed is not job:
            logger.error("no memory to begin a sequence; %d others go on: %s", len(self._jobs) - 1, problem)
        self._postponed = job

    def _may_run(self, job: Job[Request]) -> bool:
        """Start a job without KV from cached blocks, unless it must wait for memory or for a prefix being computed."""
        if not job.held.kv.blocks:
            if self._prefixes.should_wait(job) or not self._room.may_begin(job):
                return False
            self._prefixes.adopt(job)
            self._room.begin(job)
        self._prefixes.mark_running(job)
        return True

    def _make_step(self, started_s: float) -> None:
        """Run a step. If it runs out of memory, none of its rows count as computed and the next step is smaller.

        Raises: MemoryError if no step of any size fits.
        """
        shares: list[Share] = []
        before: list[tuple[Job[Request], int, list[int]]] = []
        try:
            shares = scheduler.plan(self._ready_jobs(), self._limit.rows, self._pace.chunk_rows)
            shares = self._room.reserve(shares, self._jobs)
            before = [(share.job, len(share.job.held.log), share.job.pending) for share in shares]
            if not shares:
                return
            self._compute(shares, started_s)
        except torch.OutOfMemoryError as error:
            if self._config.num_ranks > 1:  # the other ranks are still in the step
                raise
            problem = first_line(error)  # keep no reference to the error: its frames hold the step's tensors
        else:
            self._limit.record_success()
            return
        for job, num_tokens, pending in before:
            if job in self._jobs:  # otherwise it has been answered
                self._undo(job, num_tokens, pending)
        torch.cuda.empty_cache()  # no effect on other devices
        num_rows = sum(share.num_rows for share in shares)
        logger.error("no memory for a step of %d rows of %d sessions: %s", num_rows, len(shares), problem)
        if (to_blame := self._limit.handle_out_of_memory(shares, problem, monotonic())) is not None:
            self._refuse(to_blame, f"{num_rows} rows of this sequence in a step need more memory than this engine has")

    def _undo(self, job: Job[Request], num_tokens: int, pending: list[int]) -> None:
        """Restore the job's state before a step: `num_tokens` tokens computed, `pending` still to compute."""
        held = job.held
        self._runtime.cache.mark_nan(held.kv)  # the results were never checked for NaN
        if len(held.log) > num_tokens:
            self._store.truncate(held, num_tokens)
        self._store.drop_rows_ahead(held)  # the rows of this step
        job.pending = [*self._store.rewind(held), *pending]

    def _refuse(self, job: Job[Request], reason: str) -> None:
        self._answer(job, Refused(job.request.stamp, reason))

    def _compute(self, shares: Sequence[Share], started_s: float) -> None:
        batch = [share.job.rows(share) for share in shares]
        num_rows = sum(rows.num_rows for rows in batch)
        forward_s = monotonic()
        scores = self._runtime.scores(batch)
        if self._pacer is not None:
            self._pacer.wait(num_rows, forward_s)
        scores = self._store_scores(shares, batch, scores)
        self._forward_time_s += monotonic() - forward_s
        self._num_steps += 1
        self._num_rows += num_rows
        num_sessions = len(self._store)
        for share in shares:
            share.job.record_step(started_s, num_rows, num_sessions)
            share.job.advance(share.num_tokens)
        if self._finish([share.job for share in shares if share.is_last], scores):
            self._pace.observe(num_rows, monotonic() - forward_s)

    # Where target and draft differ

    def _lose(self, session: str) -> None:
        """Record that a session's KV was dropped to free memory: its open request is answered by `Missing`."""

    def _store_scores(self, shares: Sequence[Share], batch: Sequence[StepRows], scores: Scores) -> Scores:  # noqa: ARG002
        """Consume the scores of scored prompt rows; return those of all other rows."""
        return scores

    @abstractmethod
    def _needed_guesses(self, request: Request) -> TokenTree:
        """Guesses in the request that need KV beyond its committed tokens."""

    @abstractmethod
    def _begin(self, request: Request, held: HeldSequence, arrived_s: float) -> None:
        """Update `held` to match the request, and add a job for the remaining computation."""

    @abstractmethod
    def _finish(self, jobs: Sequence[Any], scores: Scores) -> bool:
        """Consume the scores of jobs whose last rows were computed in this step; return whether it waited for the
        device.

        The jobs are of the type that `_begin` creates. `scores` has the rows of the jobs that want them, in order: the
        row of the last token if one was pending, then the rows of the guesses.
        """
