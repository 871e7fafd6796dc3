"""The whole system but Ray and gRPC, in one process: real engines on their threads, real sessions, leases from here.

It is fast enough to try many combinations; what Ray and gRPC add is tested by test_served*.py.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from core.config import DraftConfig, EngineConfig, Limits, ServiceConfig, SpeculationConfig, TargetConfig
from core.errors import Unavailable
from core.records import Chunk, DraftUpdate, GenerationRequest, Sampling
from deploy.clock import MonotonicClock
from orchestrator.policy.policies import Policies
from orchestrator.service import Service
from orchestrator.text.tokenizer import Tokenizer
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine
from workers.engine.thread import EngineLoop
from workers.grammar import GrammarCompiler, Grammars

DEMO = Path(__file__).parents[2] / "models" / "demo"
MAX_RELEASE_S = 10.0
"""A stream that has ended must have given back everything by then."""


class LocalPort:
    """Both ports of core.ports, straight to an engine's loop."""

    def __init__(self, loop: EngineLoop[Any, Any]) -> None:
        self._loop = loop
        self.num_calls = 0

    async def verify(self, batch: Sequence[Any]) -> Sequence[Any]:
        self.num_calls += 1
        return await self._loop.submit(batch)

    draft = verify

    async def grow(self, request: Any, take: Callable[[DraftUpdate], None]) -> Any:
        self.num_calls += 1
        async for each in self._loop.replies(request):
            if not isinstance(each, DraftUpdate):
                return each
            take(each)
        raise AssertionError("the last reply is no growth")

    async def release(self, sessions: Sequence[str]) -> None:
        await self._loop.release(sessions)


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
    """Grants places on the one target and the one draft; `restart_target` replaces the target as a crash would."""

    def __init__(self, target: TargetEngine, draft: DraftEngine | None, extra: Sequence[DraftEngine] = ()) -> None:
        self.open_leases: set[int] = set()
        self.num_leases = 0
        self.engines = {"target": target, "draft": draft, **{f"draft{n}": each for n, each in enumerate(extra, 1)}}
        self.loops = {name: self._started(engine) for name, engine in self.engines.items() if engine is not None}
        self.ports = {name: LocalPort(loop) for name, loop in self.loops.items()}

    @staticmethod
    def _started(engine: Any) -> EngineLoop[Any, Any]:
        loop = EngineLoop(engine)
        loop.start()
        return loop

    async def take_target(self, session: str, tokens: Sequence[int] = ()) -> LocalLease:
        return self._lease("target")

    async def take_draft(self, session: str, tokens: Sequence[int] = (), draft: int = 0) -> LocalLease:
        name = f"draft{draft or ''}"
        if self.engines[name] is None:
            raise Unavailable("there is no draft")
        return self._lease(name)

    async def kill(self, name: str) -> None:
        """Stop the engine in the middle of its work, for good."""
        self.engines[name] = None
        await self.loops[name].close()

    def _lease(self, name: str) -> LocalLease:
        epoch = self.engines[name].epoch
        self.num_leases += 1
        return LocalLease(f"{self.num_leases}", f"{name}-{epoch}", epoch, self.ports[name], self.open_leases)

    async def replace_engine(self, name: str, engine: Any) -> None:
        """Stop the engine in the middle of its work, and lease out another from now on."""
        old, self.engines[name] = self.loops[name], engine
        self.loops[name] = self._started(engine)
        self.ports[name] = LocalPort(self.loops[name])
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
        """What is not free at the moment."""
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
    gamma: int = 4,
    limits: Limits | None = None,
    deterministic: bool = True,
    speculation: SpeculationConfig | None = None,
    policies: Policies | None = None,
    draft_layers: tuple[int, ...] | None = None,
    extra_drafts: Sequence[Path] = (),
    cascade_tokens: int = 0,
    **engine: Any,
) -> AsyncIterator[System]:
    """A service over the checkpoints; `engine` changes settings of both engines.

    Drafts chains of `gamma` behind verification unless told otherwise: the adaptive policy would rest where a draft is
    slow or wrong, and then nothing would be tested.
    """
    torch.set_num_threads(1)
    target_config = EngineConfig(str(target), deterministic=deterministic, **engine)
    own = {"layers": draft_layers, "cascade_tokens": cascade_tokens}
    draft_config = replace(target_config, model=str(draft), **own) if draft else None
    extra_configs = [replace(target_config, model=str(each), cascade_tokens=cascade_tokens) for each in extra_drafts]
    config = ServiceConfig(
        TargetConfig(target_config),
        DraftConfig(draft_config) if draft_config else None,
        tuple(map(DraftConfig, extra_configs)),
        speculation=speculation or SpeculationConfig(policy="static", max_draft_tokens=gamma, draft_timeout_s=30.0),
        limits=limits or Limits(),
    )
    target_engine = TargetEngine.load(target_config, 1, lambda _: None)
    draft_engine = DraftEngine.load(draft_config, 2, 64, lambda _: None) if draft_config else None
    extra = [DraftEngine.load(each, 2 + number, 64, lambda _: None) for number, each in enumerate(extra_configs, 1)]
    leases = LocalLeases(target_engine, draft_engine, extra)
    tokenizer = _tokenizer(target)
    draft_info = draft_engine.info if draft_engine else None
    info = target_engine.info
    grammars = Grammars(
        lambda: GrammarCompiler.of_model(target, info.vocab_size, info.eos_token_ids), info.vocab_size, 32
    )
    service = Service(config, info, draft_info, tokenizer, leases, MonotonicClock(), policies, grammars)
    for number, each in enumerate(extra, 1):
        service.use_extra_draft(number, each.info)
    try:
        yield System(service, leases, tokenizer)
    finally:
        await leases.close()
        grammars.close()


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
