"""A scenario (hardware, texts, load and settings), and `simulate`, which measures its speed.

Knows how streams arrive and how they are measured (`measure`). The orchestrator is the real one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from core.config import Limits, SpeculationConfig
from core.errors import OutriderError
from core.records import GenerationRequest, Sampling, Verification
from orchestrator.policy import ControlReport
from simulation.clock import VirtualLoop, new_loop
from simulation.engines import PRESETS, Hardware, Law, Text, TraceLaw, mix
from simulation.measure import Report, StreamRecord, sum_up
from simulation.rig import Blueprint, Rig

SEED_STRIDE = 100_003


@dataclass(frozen=True, slots=True)
class Closed:
    """A constant number of streams: when one ends, the next begins."""

    num_at_once: int = 1
    num_streams: int = 10


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Streams that arrive at random (Poisson), at rates that may change over time."""

    phases: tuple[tuple[float, float], ...]
    """(seconds, streams per second) of each phase, in order."""


@dataclass(frozen=True, slots=True)
class Change:
    """From `at_s` on, passes of this kind of engine take `slowness` times their original duration."""

    at_s: float
    kind: str
    slowness: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """The complete input of a simulation."""

    hardware: Hardware = field(default_factory=lambda: PRESETS["70b+1b"])
    temperature: float = 0.0
    verification: Verification = Verification.COUPLED
    law: Law | None = None
    """The law of agreement; None replays the demo pair at this temperature."""
    has_noise: bool = True
    """Whether the draft ranks candidates with the noise that it shares with the target."""
    is_head: bool = False
    """Whether the draft is a head with KV of its own, which reads the target's features."""
    load: Closed | Arrivals = field(default_factory=Closed)
    prompt_tokens: int = 128
    max_tokens: int = 160
    num_targets: int = 1
    num_drafts: int = 1
    num_orchestrators: int = 1
    """Number of orchestrators; streams go to them in turn."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    changes: tuple[Change, ...] = ()
    seed: int = 0

    def blueprint(self) -> Blueprint:
        return Blueprint(
            self.hardware,
            Text(self.law or TraceLaw.load(self.temperature)),
            num_targets=self.num_targets,
            num_drafts=self.num_drafts,
            num_orchestrators=self.num_orchestrators,
            has_noise=self.has_noise,
            heads=frozenset({0}) if self.is_head else frozenset(),
            reads_prefix=self.is_head,
            speculation=replace(self.speculation, verification=self.verification),
            limits=Limits(max_sessions=100_000),
        )


def simulate(scenario: Scenario) -> Report:
    """Run the scenario on a virtual clock."""
    return _Simulation(scenario).run()


class _Simulation:
    """One scenario in progress."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._loop: VirtualLoop = new_loop()
        self._random = Random(scenario.seed)  # noqa: S311  randomness must be reproducible
        self._arrival_random = Random(scenario.seed + 1)  # noqa: S311  arrivals must not depend on the calls between
        self._rig = Rig(scenario.blueprint(), self._loop, self._random)
        self._records: list[StreamRecord] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> Report:
        logger = logging.getLogger("orchestrator")
        level, logger.level = logger.level, logging.ERROR
        try:
            control = self._loop.run_until_complete(self._all())
        finally:
            logger.setLevel(level)
            self._loop.close()
        return sum_up(self._records, self._rig.cluster, control)

    async def _all(self) -> ControlReport:
        changes = [asyncio.create_task(self._change(change)) for change in self._scenario.changes]
        load = self._scenario.load
        if isinstance(load, Closed):
            numbers = iter(range(load.num_streams))
            await asyncio.gather(*(self._run_sequentially(numbers) for _ in range(load.num_at_once)))
        else:
            async for number in self._arrivals(load.phases):
                self._tasks.add(asyncio.create_task(self._stream(number)))
            await asyncio.gather(*self._tasks)
        for change in changes:
            change.cancel()
        control = self._rig.service.report()
        for service in self._rig.services:
            await service.close()
        return control

    async def _run_sequentially(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._stream(number)

    async def _arrivals(self, phases: Sequence[tuple[float, float]]) -> AsyncIterator[int]:
        number, ends_s = 0, 0.0
        for lasts_s, rate in phases:
            ends_s += lasts_s
            while rate > 0:
                pause_s = self._arrival_random.expovariate(rate)
                if self._loop.time() + pause_s > ends_s:
                    break
                await asyncio.sleep(pause_s)
                yield number
                number += 1
            await asyncio.sleep(max(0.0, ends_s - self._loop.time()))

    async def _stream(self, number: int) -> None:
        record = StreamRecord(started_s=self._loop.time())
        self._records.append(record)
        service = self._rig.services[number % len(self._rig.services)]
        try:
            async for chunk in service.generate(self._request(number)):
                record.take(chunk, self._loop.time())
        except OutriderError as error:
            record.error = error

    def _request(self, number: int) -> GenerationRequest:
        """Request `number`. Different seeds of the scenario use different texts."""
        scenario = self._scenario
        number += SEED_STRIDE * scenario.seed
        prompt = tuple(1 + mix(number, index) % 999 for index in range(scenario.prompt_tokens))
        return GenerationRequest(
            f"stream-{number}",
            prompt,
            Sampling(temperature=scenario.temperature, seed=number),
            scenario.max_tokens,
            scenario.verification,
            ignore_eos=True,
            wants_trace=True,
        )

    async def _change(self, change: Change) -> None:
        await asyncio.sleep(change.at_s)
        fleet = self._rig.cluster.targets if change.kind == "target" else self._rig.cluster.drafts
        for replica in fleet.replicas:
            replica.engine.slowness = change.slowness
