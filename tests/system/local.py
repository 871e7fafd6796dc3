"""The whole system but Ray and gRPC, in one process: real engines on their threads, real sessions, leases from here.

It is fast enough to try many combinations; what Ray and gRPC add is tested by test_served*.py.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.errors import Unavailable
from core.records import Chunk, GenerationRequest, ModelInfo, Sampling
from deploy.clock import MonotonicClock
from orchestrator.policy.policies import Policies
from orchestrator.service import Service
from orchestrator.text.tokenizer import Tokenizer
from tests.checkpoints import read_once
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.engine.thread import EngineLoop
from workers.grammar import GrammarCompiler, Grammars

DEMO = Path(__file__).parents[2] / "models" / "demo"
NEVER_LEFT = 1000
"""`breaker_rounds` of tests that expect guesses: a busy machine's drafts are late."""
MAX_RELEASE_S = 60.0
"""A stream that has ended must have given back everything by then."""


class LocalPort:
    """`core.ports.EnginePort`, straight to an engine's loop."""

    def __init__(self, loop: EngineLoop[Any, Any], unheard: set[str] | None = None) -> None:
        """`unheard`: filled by a draft's port with the leases whose first message it has not answered."""
        self._loop = loop
        self._unheard, self._known = set[str]() if unheard is None else unheard, set[str]()
        self.num_calls = 0

    async def exchange(self, batch: Sequence[Any], take: Callable[[Any], None]) -> None:
        self.num_calls += 1
        new = {request.stamp.lease for request in batch} - self._known
        self._known |= new
        self._unheard |= new

        def heard(reply: Any) -> None:
            self._unheard.discard(reply.stamp.lease)
            take(reply)

        try:
            await self._loop.exchange(batch, heard)
        finally:
            self._unheard -= new

    async def release(self, sessions: Sequence[str]) -> None:
        self._unheard -= set(sessions)
        await self._loop.release(sessions)


class PatientPort(LocalPort):
    """A target's, which computes nothing while a draft has a first message to answer.

    Nobody waits for a first answer, since it may be that to a long prompt: on a busy machine it may come after the
    output has ended.
    """

    def __init__(self, loop: EngineLoop[Any, Any], unheard: set[str]) -> None:
        super().__init__(loop)
        self._awaited, self._turn = unheard, asyncio.Lock()

    async def exchange(self, batch: Sequence[Any], take: Callable[[Any], None]) -> None:
        async with self._turn:  # in the order of the calls
            while self._awaited:  # noqa: ASYNC110  engines have threads
                await asyncio.sleep(0.001)
        await super().exchange(batch, take)


@dataclass
class LocalLease:
    name: str
    engine_id: str
    epoch: int
    port: LocalPort
    open_leases: set[int]

    def __post_init__(self) -> None:
        self.open_leases.add(id(self))

    def release(self) -> None:
        self.open_leases.discard(id(self))


class LocalLeases:
    """Grants places on the target and on the draft. Engines of a kind take turns; primes tell them apart ("draft'")."""

    def __init__(
        self,
        target: TargetEngine,
        draft: DraftEngine | None,
        extra: Sequence[DraftEngine | None] = (),
        *,
        is_patient: bool = False,
    ) -> None:
        self._is_patient, self._unheard = is_patient, set[str]()
        self.open_leases: set[int] = set()
        self.num_leases = 0
        self.num_granted = Counter[str]()
        """Leases by engine."""
        self.engines = {"target": target, "draft": draft, **{f"draft{n}": each for n, each in enumerate(extra, 1)}}
        self.loops = {name: self._started(engine) for name, engine in self.engines.items() if engine is not None}
        self.ports = {name: self._port(name) for name in self.loops}

    @staticmethod
    def _started(engine: Any) -> EngineLoop[Any, Any]:
        loop = EngineLoop(engine)
        loop.start()
        return loop

    def _port(self, name: str) -> LocalPort:
        if name.startswith("target"):
            return PatientPort(self.loops[name], self._unheard) if self._is_patient else LocalPort(self.loops[name])
        return LocalPort(self.loops[name], self._unheard)

    async def take_target(self, session: str, tokens: Sequence[int] = (), adapter: Any = None) -> LocalLease:
        return self._lease(self._next("target"))

    async def take_draft(self, session: str, tokens: Sequence[int] = (), draft: int = 0) -> LocalLease:
        return self._lease(self._next(f"draft{draft or ''}"))

    def _next(self, kind: str) -> str:
        """Raises: Unavailable."""
        alive = [name for name, engine in self.engines.items() if engine is not None and name.rstrip("'") == kind]
        if not alive:
            raise Unavailable(f"there is no {kind}")
        return min(alive, key=lambda name: self.num_granted[name])

    def add_engine(self, name: str, engine: Any) -> None:
        """Lease out another engine, or one in place of an engine that is gone."""
        self.engines[name] = engine
        self.loops[name] = self._started(engine)
        self.ports[name] = self._port(name)

    async def kill(self, name: str) -> None:
        """Stop the engine in the middle of its work, for good."""
        self.engines[name] = None
        await self.loops.pop(name).close()

    def _lease(self, name: str) -> LocalLease:
        epoch = self.engines[name].epoch
        self.num_leases += 1
        self.num_granted[name] += 1
        return LocalLease(f"{self.num_leases}", f"{name}-{epoch}", epoch, self.ports[name], self.open_leases)

    async def replace_engine(self, name: str, engine: Any) -> None:
        """Stop the engine in the middle of its work, and lease out another from now on."""
        old = self.loops[name]
        self.add_engine(name, engine)
        await old.close()

    async def close(self) -> None:
        for loop in self.loops.values():
            await loop.close()


@dataclass
class System:
    """A running service, and what a test asks of it."""

    service: Service
    leases: LocalLeases
    tokenizer: Tokenizer

    async def complete(self, request: GenerationRequest) -> list[Chunk]:
        return [chunk async for chunk in self.service.generate(request)]

    async def tokens(self, request: GenerationRequest) -> list[int]:
        return [token for chunk in await self.complete(request) for token in chunk.token_ids]

    async def all_tokens(self, requests: Iterable[GenerationRequest]) -> list[list[int]]:
        """The tokens of each, side by side: they share their steps, which cost the same for one."""
        return await asyncio.gather(*map(self.tokens, requests))

    async def check_nothing_is_held(self) -> None:
        """Raises: AssertionError unless every lease, session and KV block is free.

        Looks before the service is closed, which would give back what a stream has forgotten to; and after it.
        """
        deadline_s = time.monotonic() + MAX_RELEASE_S
        while (held := await self._held()) and time.monotonic() < deadline_s:  # noqa: ASYNC110  engines have threads
            await asyncio.sleep(0.01)
        assert not held, f"streams have ended, but not all is free: {held}"
        await self.service.close()
        assert not await self._held()
        for loop in self.leases.loops.values():
            await loop.ask(lambda engine: engine.check_integrity())

    async def _held(self) -> list[str]:
        """Resources that are not free at the moment."""
        held = [f"{self.service.num_sessions} sessions"] if self.service.num_sessions else []
        held += [f"{len(self.leases.open_leases)} leases"] if self.leases.open_leases else []
        for name, loop in self.leases.loops.items():
            stats = await loop.ask(lambda engine: engine.stats())
            is_free = stats.num_free_blocks == stats.num_blocks and not stats.num_sessions and not stats.num_jobs
            held += [] if is_free else [f"{name}: {stats}"]
        return held


_tokenizer = cache(Tokenizer.from_directory)


@asynccontextmanager
async def system(
    target: Path = DEMO / "target",
    draft: Path | None = DEMO / "draft",
    *,
    extra_drafts: Sequence[Path] = (),
    gamma: int = 4,
    speculation: SpeculationConfig | None = None,
    policies: Policies | None = None,
    drafts: Mapping[str, Any] = MappingProxyType({}),
    targets: Mapping[str, Any] = MappingProxyType({}),
    is_patient: bool = False,
    **engine: Any,
) -> AsyncIterator[System]:
    """A service over the checkpoints; `engine` changes settings of all engines, `drafts` and `targets` those of
    one side. `is_patient`: whether the target waits for each draft's first answer, so that its guesses can be counted.

    Drafts chains of `gamma` behind verification unless told otherwise: the adaptive policy would rest where a draft is
    slow or wrong, and then nothing would be tested.
    """
    torch.set_num_threads(1)
    speculation = speculation or SpeculationConfig(
        policy="static", max_draft_tokens=gamma, draft_timeout_s=30.0, breaker_rounds=NEVER_LEFT
    )
    own = EngineConfig(str(target), deterministic=True, **engine)
    first, *others = [
        DraftConfig(replace(own, model=str(each), **drafts)) if each else None for each in (draft, *extra_drafts)
    ]
    config = ServiceConfig(TargetConfig(replace(own, **targets)), first, tuple(others), speculation=speculation)
    leases = _leases_of(config, is_patient=is_patient)
    grammars = _grammars_of(target, leases.engines["target"].info)
    service = _service_of(config, leases, _tokenizer(target), policies, grammars)
    try:
        yield System(service, leases, _tokenizer(target))
    finally:
        await leases.close()
        grammars.close()


def _leases_of(config: ServiceConfig, *, is_patient: bool) -> LocalLeases:
    """Leases on engines with these settings."""
    with read_once():
        target = TargetEngine.load(config.target.engine, 1, lambda _: None)
        configs = enumerate((config.draft, *config.extra_drafts), 2)
        draft, *extra = [
            DraftEngine.load(each.engine, epoch, 64, lambda _: None) if each else None for epoch, each in configs
        ]
    return LocalLeases(target, draft, extra, is_patient=is_patient)


def _grammars_of(target: Path, info: ModelInfo) -> Grammars:
    return Grammars(lambda: GrammarCompiler.of_model(target, info.vocab_size, info.eos_token_ids), info.vocab_size, 32)


def _service_of(
    config: ServiceConfig, leases: LocalLeases, tokenizer: Tokenizer, policies: Policies | None, grammars: Grammars
) -> Service:
    infos = {name: each.info for name, each in leases.engines.items() if each is not None}
    info, draft = infos.pop("target"), infos.pop("draft", None)
    service = Service(config, info, draft, tokenizer, leases, MonotonicClock(), policies, grammars)
    for number, extra in enumerate(infos.values(), 1):
        service.use_draft(extra, number)
    return service


def request(prompt: Sequence[int], max_tokens: int = 32, **changes: Any) -> GenerationRequest:
    fields = {"request_id": "r", "sampling": Sampling(temperature=0.0), "ignore_eos": True, **changes}
    return GenerationRequest(prompt=tuple(prompt), max_tokens=max_tokens, **fields)


def noisy_copy(checkpoint: Path, directory: Path) -> Path:
    """The checkpoint with noise in its weights: a model that says something else here and there."""
    for file in checkpoint.iterdir():
        shutil.copy(file, directory)
    weights, dice = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=dice) * 0.1 * weight.float().std()
        weights[name] = (weight.float() + noise).to(weight.dtype)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory
