"""One chaotic run from one seed: a few streams, a small cluster, and faults of every kind.

The same seed gives the same run, event by event. `python -m simulation --seed N` prints the events; with `--heads`
drafts are heads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from core.errors import OutriderError
from orchestrator.guessers import CorpusIndex, Panel, encode_index
from simulation.chaos.engine_faults import inject
from simulation.chaos.faults import EventLog, FaultyGuesser, FaultyWire
from simulation.chaos.invariants import InvariantChecker, Stream, require
from simulation.chaos.script import Script, script_of
from simulation.clock import new_loop
from simulation.rig import Rig


@dataclass(frozen=True, slots=True)
class RunReport:
    """The outcome of one seed."""

    seed: int
    counts: Counter[str]
    lines: Sequence[tuple[float, str]]
    error: AssertionError | None
    has_heads: bool = False

    @property
    def command(self) -> str:
        """The command that replays it."""
        return f"python -m simulation --seed {self.seed}{' --heads' if self.has_heads else ''}"


def run_seed(seed: int, *, has_heads: bool = False) -> RunReport:
    """Run one seed. The report's `error` is None if every invariant held."""
    logger = logging.getLogger("orchestrator")
    level, logger.level = logger.level, logging.CRITICAL  # every survived fault is logged, and there are many
    try:
        return replace(_Run(script_of(seed, has_heads=has_heads)).run(), has_heads=has_heads)
    finally:
        logger.setLevel(level)


class _Run:
    """One run in progress."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._loop = new_loop(lambda: self._checker.check())
        self._events = EventLog(self._loop.time)
        self._random = random = Random(script.seed)  # noqa: S311  randomness must be reproducible
        self._rig = Rig(
            script.blueprint,
            self._loop,
            random,
            lambda hop, random: FaultyWire(hop, random, script.rates, self._events),
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._streams = [Stream(each) for each in script.streams]
        self._checker = InvariantChecker(self._rig, self._loop, self._events, self._streams)
        self._make_guessers_faulty()
        self._deliver_some_twice()

    def run(self) -> RunReport:
        error: AssertionError | None = None
        try:
            self._loop.run_until_complete(self._all())
        except AssertionError as caught:
            error = caught
            self._loop.abandon()
        finally:
            self._loop.close()
        return RunReport(self._script.seed, self._counts(), self._events.lines, error)

    async def _all(self) -> None:
        """Run all streams and faults, close the service, and check for leaks."""
        for timed_fault in self._script.timed_faults:
            self._spawn(inject(timed_fault, self._rig.cluster, self._events), "timed fault")
        for stream in self._streams:
            self._spawn(self._client(stream), f"client of {stream.name}")
        if self._script.shutdown_s is not None:
            await asyncio.sleep(self._script.shutdown_s)
            self._events.note("shutdown")
            await self._rig.service.close()
        await asyncio.gather(*self._tasks)
        await self._rig.service.close()
        for wire in (self._rig.target_wire, self._rig.draft_wire):
            await wire.drain()
        await asyncio.sleep(2 * self._script.blueprint.limits.reply_timeout_s)  # let unanswered calls time out
        self._checker.check_nothing_is_left()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _client(self, stream: Stream) -> None:
        """Read a stream, possibly leaving it early."""
        script = stream.script
        await asyncio.sleep(script.start_s)
        reading = asyncio.create_task(self._read(stream), name=f"reader of {stream.name}")
        if script.cancel_after_s is not None:
            await asyncio.wait([reading], timeout=script.cancel_after_s)
            stream.was_cancelled = reading.cancel()
            if stream.was_cancelled:
                self._events.note("cancelled", stream.name)
        with suppress(asyncio.CancelledError):
            await reading

    async def _read(self, stream: Stream) -> None:
        num_others = sum(other.is_live for other in self._streams)
        stream.is_live = True
        try:
            async with aclosing(self._rig.service.generate(stream.script.request)) as chunks:
                async for chunk in chunks:
                    stream.take(chunk)
                    await asyncio.sleep(stream.script.pause_s)
            require(stream.last is not None, f"{stream.name}: stopped without an end")
            self._checker.check_success(stream)
        except OutriderError as error:
            self._on_error(stream, error, num_others)
        except AssertionError as problem:
            self._checker.problems.append(problem)
        finally:
            stream.is_live = False

    def _on_error(self, stream: Stream, error: OutriderError, num_others: int) -> None:
        self._events.note(f"failed {type(error).__name__}", f"{stream.name}: {error}")
        try:
            stream.fail(error)
            self._checker.check_failure(stream, num_others)
        except AssertionError as problem:
            self._checker.problems.append(problem)

    def _make_guessers_faulty(self) -> None:
        """Make each guesser return corrupt guesses or raise, at random. Uses its own random source."""
        script, guessers = self._script, self._rig.service._pair.guessers
        random = Random(f"lies of guessers {script.seed}")  # noqa: S311  randomness must be reproducible
        guessers._index = _index_of(script)
        make = guessers.panel

        def faulty(*given: Any, **named: Any) -> Panel:
            panel = make(*given, **named)
            for name, guesser in panel._guessers.items():
                panel._guessers[name] = FaultyGuesser(guesser, random, script.rates, self._events)
            return panel

        guessers.panel = faulty  # type: ignore[method-assign]

    def _deliver_some_twice(self) -> None:
        """Deliver some answers to sessions twice, which no batcher does. Tests the session's own check."""
        runner = self._rig.service._runner
        pools: list[Any] = [runner._targets, *runner._drafts]
        for pool in pools:
            pool._deliver = self._echoing(pool._deliver)

    def _echoing(self, deliver: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def deliver_perhaps_twice(request: Any, answer: Any) -> None:
            deliver(request, answer)
            if self._random.random() < self._script.rates.echo:
                self._events.note("echo", repr(request.stamp))
                self._loop.call_later(self._random.expovariate(5.0), deliver, request, answer)

        return deliver_perhaps_twice

    def _counts(self) -> Counter[str]:
        counts = Counter(self._events.counts)
        for stream in self._streams:
            if stream.last is not None and stream.last.stats is not None:
                counts["finished"] += 1
                counts["finished a resumed one"] += bool(stream.script.request.resume_tokens)
                counts["finished with a slow reader"] += stream.script.pause_s > 0
                verified = [source for source in stream.last.stats.sources if source.num_drafted_tokens]
                counts["three sources in one tree"] += len(verified) >= 3
                for source in stream.last.stats.sources:
                    counts[f"accepted of {source.name}"] += source.num_accepted_tokens
                    counts[f"failures of {source.name}"] += source.num_failures
                figures = asdict(stream.last.stats)
                counts.update({name: value for name, value in figures.items() if isinstance(value, int)})
        return counts


def _index_of(script: Script) -> CorpusIndex:
    """A corpus of the expected outputs, so that retrieval is sometimes right."""
    vocab_size = script.blueprint.text.vocab_size
    documents = [(*stream.request.prompt[-2:], *stream.expected) for stream in script.streams]
    return CorpusIndex(*encode_index(documents, vocab_size=vocab_size, vocabulary="simulated"))
