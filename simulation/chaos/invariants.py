"""The invariants after every event of a chaotic run, and at its end.

Knows the expected output of each stream. It may look inside the orchestrator, unlike any other module, because a leak
or a growing queue cannot be seen from outside in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import DeadlinePassed, OutriderError, Overloaded, Unavailable
from core.records import MAX_FEATURE_TOKENS, Call, Chunk, FinishReason, SequenceSpec
from core.text import TokenLog
from orchestrator.service import Service
from orchestrator.session import BeamSession, Session
from simulation.chaos.faults import CallFault, EventLog
from simulation.chaos.script import StreamScript, ending_of
from simulation.clock import VirtualLoop
from simulation.engines import logprob_of
from simulation.rig import Rig, SimTokenizer

MAX_TASKS_A_SESSION = 14
"""Largest number of tasks of one session: lateness, deadline, two leases, four messages to the current draft and to
one just left, and ending tasks."""
MAX_TASKS_A_DRAFT = 10
"""Number of additional tasks for each further draft."""
HORIZON_S = 600.0
"""Time in seconds by which every stream must have ended, whatever the faults."""


def require(condition: bool, what: str) -> None:
    """Raises: AssertionError."""
    if not condition:
        raise AssertionError(what)


@dataclass(eq=False, slots=True)
class Stream:
    """One completion as its client sees it. Every chunk is compared with the plain continuation."""

    script: StreamScript
    tokens: list[int] = field(init=False)
    """Output so far, including resumed tokens."""
    num_relaxed: int = 0
    """Number of output tokens that are not the target's own."""
    text: str = ""
    is_live: bool = False
    """Whether the client is reading it."""
    last: Chunk | None = None
    """The last chunk, which has the finish reason."""
    error: OutriderError | None = None
    was_cancelled: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.script.request.resume_tokens)

    @property
    def name(self) -> str:
        return self.script.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_over(self) -> bool:
        return self.last is not None or self.error is not None or self.was_cancelled

    def take(self, chunk: Chunk) -> None:
        """Raises: AssertionError."""
        require(not self.is_over, f"{self.name}: a chunk came after the end")
        begin = self.num_tokens
        self.text += chunk.text
        is_exact = self.script.request.rule.is_lossless
        right = self.script.expected[begin : begin + len(chunk.token_ids)] if is_exact else self._allowed(chunk)
        self.tokens += chunk.token_ids
        require(chunk.token_ids == right, f"{self.name}: tokens {chunk.token_ids} at {begin}, should be {right}")
        require(len(chunk.is_guess) == len(right), f"{self.name}: tokens and marks of guesses differ in number")
        require(chunk.usage.completion_tokens == self.num_tokens, f"{self.name}: usage is {chunk.usage}")
        if self.script.request.num_logprobs is not None:
            require(chunk.logprobs == tuple(map(logprob_of, right)), f"{self.name}: logprobs of others at {begin}")
        if self.script.has_infallible_draft:
            wasted = [c for c in chunk.trace if c.call is Call.VERIFY and c.num_used < c.num_guesses]
            require(not wasted, f"{self.name}: what an infallible draft guessed was rejected: {wasted}")
        if chunk.finish_reason is not None:
            self._finish(chunk)

    def _allowed(self, chunk: Chunk) -> tuple[int, ...]:
        """The longest prefix of the chunk that a relaxed rule allows here.

        Each token must be the target's own after the tokens before it, or a guess that the target tolerates.
        """
        request, allowed = self.script.request, list[int]()
        spec = SequenceSpec.of(request)
        for token, is_guess in zip(chunk.token_ids, chunk.is_guess, strict=False):
            position = self.script.text.position(TokenLog((*request.prompt, *self.tokens, *allowed)), spec)
            is_own = token == position.next_token
            if not (is_own or (is_guess and self.script.text.tolerates(position, token, spec))):
                break
            self.num_relaxed += not is_own
            allowed.append(token)
        return tuple(allowed)

    def _ending(self) -> tuple[tuple[int, ...], FinishReason]:
        """The expected whole output, and why it ends."""
        request = self.script.request
        if request.rule.is_lossless:
            return self.script.expected, self.script.reason
        expected, reason = ending_of(self.tokens, request.stop_token_ids, request.ignore_eos)
        is_long = reason is FinishReason.STOP or len(expected) == request.max_tokens
        require(is_long, f"{self.name}: ended after {len(expected)} of {request.max_tokens} tokens")
        return expected, reason

    def fail(self, error: OutriderError) -> None:
        """Raises: AssertionError."""
        require(not self.is_over, f"{self.name}: {error!r} came after the end")
        self.error = error

    def _finish(self, chunk: Chunk) -> None:
        self.last, script = chunk, self.script
        expected, reason = self._ending()
        num_right = len(expected)
        require(self.num_tokens == num_right, f"{self.name}: ended after {self.num_tokens} of {num_right} tokens")
        require(chunk.finish_reason is reason, f"{self.name}: ended by {chunk.finish_reason}, not {reason}")
        require(chunk.stats is not None, f"{self.name}: ended without statistics")
        num_reported = chunk.stats.num_relaxed_tokens if chunk.stats is not None else 0
        is_reported = num_reported >= self.num_relaxed and (num_reported == 0 or not script.request.rule.is_lossless)
        require(is_reported, f"{self.name}: {self.num_relaxed} tokens are relaxed, and {num_reported} told")
        num_shown = num_right - (reason is FinishReason.STOP)
        right = SimTokenizer().decode(expected[len(script.request.resume_tokens) : num_shown])
        require(self.text == right, f"{self.name}: its text is {self.text!r}, should be {right!r}")


@dataclass(slots=True)
class InvariantChecker:
    rig: Rig
    loop: VirtualLoop
    events: EventLog
    streams: Sequence[Stream]
    problems: list[AssertionError] = field(default_factory=list)
    """Violations found by clients."""

    def check(self) -> None:
        """Check the invariants. Called tens of thousands of times per second, so messages are built on failure only.

        Raises: AssertionError.
        """
        runner = self.rig.service._runner
        fleets = [fleet.breaches for fleet in self.rig.cluster.fleets]
        for breaches in (self.problems, self.rig.breaches, *fleets):
            for problem in breaches:
                raise problem
        for batcher in runner._targets._batchers.values():
            if len(waiting := batcher._waiting) > 1:
                names = [request.stamp.lease for request in waiting]
                require(len(set(names)) == len(names), f"a session asks twice: {names} wait for one engine")
        max_tasks = MAX_TASKS_A_SESSION + MAX_TASKS_A_DRAFT * (len(runner._drafts) - 1)
        num_live = sum(stream.is_live for stream in self.streams)
        if len(runner._running) > num_live:
            raise AssertionError(f"{len(runner._running)} sessions run for {num_live} clients: {list(runner._running)}")
        for running in runner._running.values():
            if len(running.tasks) > max_tasks:
                raise AssertionError(f"{running.session!r} has {len(running.tasks)} tasks")
            _check_features(running.session)
        if self.loop.time() > HORIZON_S:
            raise AssertionError(f"a stream does not end: {list(runner._running.values())}")

    def check_failure(self, stream: Stream, num_others: int) -> None:
        """Check that a fault explains the error that ended this stream. Raises: AssertionError."""
        deadline, limits = stream.script.request.deadline, self.rig.blueprint.limits
        match stream.error:
            case DeadlinePassed():
                is_explained = deadline is not None and self.loop.time() >= deadline
            case Overloaded():
                is_explained = num_others >= limits.max_sessions + limits.max_queued
            case Unavailable():
                no_target = self.events.count("target lease refused") + self.events.count("shutdown")
                is_explained = (
                    no_target > 0
                    or self.events.has_met("target lease granted too late", stream.name)
                    or self._can_have_failed(limits.max_target_retries + 1)
                )
            case _:
                is_explained = False
        require(is_explained, f"{stream.name}: ended by {stream.error!r}, which nothing explains")

    def check_success(self, stream: Stream) -> None:
        """Check that faults explain all target failures that this stream survived. Raises: AssertionError."""
        assert stream.last is not None, "only what has finished is a success"
        assert stream.last.stats is not None, "checked when the last chunk came"
        num_failures = stream.last.stats.num_target_failures
        require(self._can_have_failed(num_failures), f"{stream.name}: {num_failures} targets failed it for no reason")

    def _can_have_failed(self, num_times: int) -> bool:
        """Whether the faults can explain `num_times` target failures of one stream. One engine fault can cause many."""
        count = self.events.count
        num_harmless = count(f"target call {CallFault.TWICE}") + count(f"target call {CallFault.FORGOTTEN}")
        return count("target engine") > 0 or num_times <= count("target call") - num_harmless

    def check_nothing_is_left(self) -> None:
        """Check for leaks after the service was closed. Raises: AssertionError."""
        _check_is_idle(self.rig.service)
        for fleet in self.rig.cluster.fleets:
            require(not fleet.held, f"leases are still held: {sorted(fleet.held)}")
            for replica in fleet.replicas:
                sessions = replica.engine.sessions
                require(not sessions, f"{replica.engine!r} still holds {sessions}")
        left = [task.get_name() for task in asyncio.all_tasks(self.loop) if task is not asyncio.current_task()]
        require(not left, f"tasks are left: {left}")


def _check_features(session: Session | BeamSession) -> None:
    """Check that a session keeps features of its own tokens alone, each once, and no more than heads read.

    Raises: AssertionError.
    """
    if isinstance(session, BeamSession):
        return
    log, num_tokens = session._drafts._features, len(session.tokens)
    num_known = sum(piece.num_tokens for piece in log._pieces)
    if log.end >= num_tokens or num_known != log.end - log.first or num_known > 2 * MAX_FEATURE_TOKENS:
        raise AssertionError(f"{session!r} has {num_known} features, {log.first} to {log.end} of {num_tokens} tokens")


def _check_is_idle(service: Service) -> None:
    runner = service._runner
    require(not runner._running and not runner._leased, f"sessions are left: {runner._running}, {runner._leased}")
    require(runner.num_engines == 0, f"{runner.num_engines} engines are still spoken to")
    require(service._admission.num_admitted == 0, f"{service._admission.num_admitted} places are still taken")
