"""The faults of calls, grants and guesses in a chaotic run, and the log of its events.

Knows wires, engines and randomness; must not know sessions. Everything follows from a seed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any, TypeVar, cast

from core.errors import Unavailable, WorkerLost
from core.records import DraftReply, DraftRequest, DraftUpdate, Features, Verdict, VerifyReply, VerifyRequest
from core.speculation import Guesser, Guesses
from simulation.chaos.corruptions import (
    DRAFT_CORRUPTIONS,
    FEATURE_CORRUPTIONS,
    GUESSER_CORRUPTIONS,
    TARGET_CORRUPTIONS,
    VERDICT_FEATURE_CORRUPTIONS,
    FeatureCorruption,
)
from simulation.engines import HopLaw, SimEngine, SimTarget
from simulation.wire import Wire

Request = TypeVar("Request", bound=VerifyRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)


class CallFault(StrEnum):
    """Faults of one call."""

    LATE = "late"
    REQUEST_LOST = "request lost"
    REPLY_LOST = "reply lost"
    TWICE = "arrived twice"
    FORGOTTEN = "KV forgotten"
    CORRUPT = "corrupt"
    TOO_FEW = "too few replies"
    FOREIGN = "somebody else's reply"
    RAISED = "raised"


@dataclass(slots=True)
class EventLog:
    """The events of one run: counts for its checks, and lines to read."""

    now: Callable[[], float]
    counts: Counter[str] = field(default_factory=Counter)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def note(self, kind: str, detail: str = "") -> None:
        self.counts[kind] += 1
        self.lines.append((self.now(), f"{kind} {detail}".rstrip()))

    def count(self, prefix: str) -> int:
        """Total count of the kinds that begin with `prefix`."""
        return sum(number for kind, number in self.counts.items() if kind.startswith(prefix))

    def has_met(self, kind: str, stream: str) -> bool:
        """Whether an event of this kind happened to a session of this stream."""
        return any(line.startswith(f"{kind} {stream}#") for _, line in self.lines)


@dataclass(frozen=True, slots=True)
class Rates:
    """Probabilities of faults per call, grant or answer. No faults happen after `until_s`."""

    until_s: float
    target: float = 0.0
    draft: float = 0.0
    refused_target: float = 0.0
    refused_draft: float = 0.0
    slow_grant: float = 0.0
    echo: float = 0.0
    """Probability that an answer is delivered to its session twice."""
    mean_delay_s: float = 0.1
    corrupts_drafts: bool = True
    features: float = 0.0
    """Probability that the features of a message or of a verdict are corrupt."""

    @property
    def guesser(self) -> float:
        """Probability that a guesser's answer is corrupt. Guessers fail only in runs where drafts fail."""
        return self.draft / 4


GROWTH_FAULTS = (CallFault.LATE, CallFault.REQUEST_LOST, CallFault.FORGOTTEN, CallFault.RAISED)
"""Faults of a message to a draft that grows continuously. Faults of its updates are in `DRAFT_CORRUPTIONS`."""


class FaultyWire(Wire):
    """A wire that delays, loses, repeats and corrupts calls, and refuses leases."""

    def __init__(self, hop: HopLaw, random: Random, rates: Rates, events: EventLog) -> None:
        super().__init__(hop, random)
        self.rates = rates
        self._events = events
        self._strays: set[asyncio.Task[None]] = set()

    async def call(
        self, engine: SimEngine[Request, Reply], batch: Sequence[Request], take: Callable[[Reply], None]
    ) -> None:
        """Raises: WorkerLost, and errors that no port should raise."""
        kind = "target" if isinstance(engine, SimTarget) else "draft"
        batch, take = [self._with_bad_features(request) for request in batch], self._with_bad_verdicts(take)
        trees = [request for request in batch if isinstance(request, VerifyRequest) and not request.block.is_chain]
        self._events.counts["tree verified"] += len(trees)
        if not self.draws_fault(self.rates.target if kind == "target" else self.rates.draft):
            await super().call(engine, batch, take)
            return
        fault = self._random.choice([*CallFault, *[CallFault.CORRUPT] * 3])
        self._events.note(f"{kind} call {fault}", ", ".join(request.stamp.lease for request in batch))
        await self._before(fault, engine, batch)
        replies: list[Reply] = []
        await super().call(engine, batch, replies.append)
        for reply in await self._after(fault, replies):  # all replies arrive together, at the end of the call
            take(reply)

    async def grow(self, engine: SimEngine[Request, Reply], request: Request, take: Callable[[Reply], None]) -> None:
        """Raises: WorkerLost, and errors that no port should raise."""
        request = self._with_bad_features(request)
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take_perhaps(reply: Reply) -> None:
            if broken.done():
                return
            try:
                for each in self._corrupted(reply):
                    take(each)
            except ValueError as error:
                broken.set_exception(WorkerLost(f"the link is closed: {error}"))
            except WorkerLost as lost:
                broken.set_exception(lost)

        if self.draws_fault(self.rates.draft):
            fault = self._random.choice(GROWTH_FAULTS)
            self._events.note(f"draft growth {fault}", request.stamp.lease)
            await self._before(fault, engine, [request])
        growing = asyncio.ensure_future(super().grow(engine, request, take_perhaps))
        try:
            await asyncio.wait([growing, broken], return_when=asyncio.FIRST_COMPLETED)
            await (broken if broken.done() else growing)
        finally:
            growing.cancel()
            broken.cancel()

    def _with_bad_features(self, request: Request) -> Request:
        """The message, possibly with features that its engine must refuse."""
        if not (isinstance(request, DraftRequest) and request.features is not None):
            return request
        features = self._features(request.features, "a head", FEATURE_CORRUPTIONS, request.stamp.lease)
        return cast("Request", replace(request, features=features))

    def _with_bad_verdicts(self, take: Callable[[Reply], None]) -> Callable[[Reply], None]:
        """Like `take`, but some verdicts arrive with features that a session must leave out."""

        def take_perhaps(reply: Reply) -> None:
            if isinstance(reply, Verdict) and reply.features is not None:
                session, corruptions = reply.stamp.lease, VERDICT_FEATURE_CORRUPTIONS
                features = self._features(reply.features, "a session", corruptions, session)
                reply = cast("Reply", replace(reply, features=features))
            take(reply)

        return take_perhaps

    def _features(
        self, features: Features, receiver: str, corruptions: Mapping[str, FeatureCorruption], session: str
    ) -> Features | None:
        if not self.draws_fault(self.rates.features):
            return features
        name = self._random.choice(list(corruptions))
        self._events.note(f"{receiver} is sent features: {name}", session)
        return corruptions[name](features, self._random)

    def _corrupted(self, reply: Reply) -> Iterator[Reply]:
        """Raises: ValueError if the link would detect the corruption."""
        if not isinstance(reply, DraftUpdate) or not self.draws_fault(self.rates.draft):
            yield reply
            return
        name = self._random.choice(("lost", "sent twice", *DRAFT_CORRUPTIONS))
        self._events.note(f"draft's growth: {name}", reply.stamp.lease)
        if name == "sent twice":
            yield reply
            yield reply
        elif name != "lost" and self.rates.corrupts_drafts:
            yield cast("Reply", DRAFT_CORRUPTIONS[name](reply, self._random))

    async def grant(self, kind: str, session: str) -> None:
        """Raises: Unavailable, and errors that no cluster should raise."""
        await super().grant(kind, session)
        if self.draws_fault(self.rates.slow_grant):
            self._events.note(f"{kind} lease granted late", session)
            try:
                await self.pause()
            except asyncio.CancelledError:
                self._events.note(f"{kind} lease granted too late", session)
                raise
        if self.draws_fault(self.rates.refused_target if kind == "target" else self.rates.refused_draft):
            self._events.note(f"{kind} lease refused", session)
            raise self._random.choice((Unavailable(f"no {kind} granted a lease"), RuntimeError("password=1234")))

    async def drain(self) -> None:
        """Wait for calls that arrive a second time."""
        while self._strays:
            await asyncio.wait(self._strays)

    def draws_fault(self, rate: float) -> bool:
        """Decide at random, with this probability, whether a fault happens now."""
        is_over = asyncio.get_running_loop().time() >= self.rates.until_s
        return not is_over and rate > 0 and self._random.random() < rate

    async def pause(self) -> None:
        await asyncio.sleep(self.delay_s())

    def delay_s(self) -> float:
        return self._random.expovariate(1.0 / self.rates.mean_delay_s)

    async def _before(self, fault: CallFault, engine: SimEngine[Request, Reply], batch: Sequence[Request]) -> None:
        match fault:
            case CallFault.LATE:
                await self.pause()
            case CallFault.REQUEST_LOST:
                await asyncio.Event().wait()  # until the caller's timeout
            case CallFault.TWICE:
                self._stray(self._again(engine, batch))
            case CallFault.FORGOTTEN:
                for request in batch:
                    engine.forget(request.stamp.lease)
            case CallFault.RAISED:
                raise RuntimeError("no port should raise this")

    async def _after(self, fault: CallFault, replies: Sequence[Reply]) -> Sequence[Reply]:
        match fault:
            case CallFault.REPLY_LOST:
                await asyncio.Event().wait()
            case CallFault.CORRUPT:
                return [self._corrupt(reply) for reply in replies]
            case CallFault.TOO_FEW:
                return replies[:-1]
            case CallFault.FOREIGN:
                foreign = replace(replies[0], stamp=replace(replies[0].stamp, round=-1))
                return [*replies[1:], foreign]
        return replies

    async def _again(self, engine: SimEngine[Request, Reply], batch: Sequence[Request]) -> None:
        """Send the same messages to the engine again, later than the first time. The replies are ignored."""
        await self.travel()
        await asyncio.sleep(self.delay_s() + 1.0)
        with suppress(WorkerLost):
            await engine.exchange(batch, lambda _: None)

    def _stray(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="a call that arrives twice")
        self._strays.add(task)
        task.add_done_callback(self._strays.discard)

    def _corrupt(self, reply: Reply) -> Reply:
        corruptions: dict[str, Callable[[Any, Random], Any]]
        match reply:
            case Verdict():
                kind, corruptions = "target", TARGET_CORRUPTIONS
            case DraftUpdate() if self.rates.corrupts_drafts:
                kind, corruptions = "draft", DRAFT_CORRUPTIONS
            case _:
                return reply
        name = self._random.choice(list(corruptions))
        self._events.note(f"{kind} says {name}")
        try:
            return cast("Reply", corruptions[name](reply, self._random))
        except ValueError as error:
            raise WorkerLost(f"the link is closed: {error}") from error


class FaultyGuesser:
    """A guesser that sometimes returns invalid guesses, or raises."""

    def __init__(self, guesser: Guesser, random: Random, rates: Rates, events: EventLog) -> None:
        self._guesser = guesser
        self._random = random
        self._rates = rates
        self._events = events

    def propose(self, text: Sequence[int]) -> Guesses:
        """Raises: RuntimeError."""
        guesses = self._guesser.propose(text)
        if self._events.now() >= self._rates.until_s or self._random.random() >= self._rates.guesser:
            return guesses
        name = self._random.choice(list(GUESSER_CORRUPTIONS))
        self._events.note(f"a guesser says {name}")
        return cast("Guesses", GUESSER_CORRUPTIONS[name](guesses, self._random))
