"""Engines without a model, for tests of the plane around them: the target counts upwards, the draft guesses it does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from core.config import EngineConfig, Limits
from core.errors import CheckpointError
from core.records import Base, DraftUpdate, Findings, ModelInfo, Sampling, SequenceSpec, Stamp, Verdict, VerifyRequest
from core.records.statistics import EngineStats
from core.speculation.growth import NewNodes
from core.speculation.token_tree import ROOT
from deploy.engines.actors import CONTROL, DraftActor, TargetActor
from deploy.serve.leases import ServeLeases
from tests.exchange import replies_of

INFO = ModelInfo("counter", "Counter", "float32", "cpu", 0, 100, 1000, 16_000, (0,))
FAIL = 99
"""A suffix that ends in this token makes the engine fail."""
SLOW = 98
"""A suffix that ends in this token takes a second and a half."""
STUCK = 97
"""A suffix that ends in this token is never answered."""
SLOW_LOAD_S = 4.0
"""How long a target with the model "slow" takes to load; one whose model is a file dies while it loads."""


class FakeEngine:
    """Answers each request in the next step; a session is held from its first request to its release."""

    info = INFO

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._held: set[str] = set()
        self._waiting: list[Any] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Any, _arrived_s: float | None = None) -> None:
        if request.suffix[-1] == FAIL:
            raise RuntimeError("told to fail")
        self._held.add(request.stamp.lease)
        self._waiting.append(request)

    def step(self) -> list[Any]:
        if any(request.suffix[-1] == SLOW for request in self._waiting):
            time.sleep(1.5)
        if any(request.suffix[-1] == STUCK for request in self._waiting):
            threading.Event().wait()
        replies = [self._reply(request) for request in self._waiting]
        self._waiting.clear()
        return replies

    def build_more(self, *, is_idle: bool) -> bool:
        return False

    def release(self, sessions: Sequence[str]) -> None:
        self._held.difference_update(sessions)

    def expire(self) -> list[str]:
        return []

    def warm_up(self, progress: Any, machine: str = "", known: Findings | None = None) -> Findings:
        progress("nothing to warm")
        return known or Findings(machine, is_compiled=False, tile_rows=None, step_times_s=())

    def stats(self) -> EngineStats:
        nothing = dict.fromkeys((field.name for field in fields(EngineStats)), 0)
        return EngineStats(**{**nothing, "num_sessions": len(self._held)})

    def check_integrity(self) -> None:
        assert not self._waiting

    def _reply(self, request: Any) -> Any:
        raise NotImplementedError


class FakeTargetEngine(FakeEngine):
    def _reply(self, request: Any) -> Verdict:
        accepted, last = [], request.suffix[-1]
        while (node := request.block.child(accepted[-1] if accepted else -1, last + 1)) is not None:
            accepted.append(node)
            last += 1
        return Verdict(request.stamp, tuple(accepted), last + 1, request.num_committed + len(accepted))


class FakeDraftEngine(FakeEngine):
    def _reply(self, request: Any) -> DraftUpdate:
        last, num_guesses = request.suffix[-1], request.growth.num_passes
        chances = (0.5,) * num_guesses
        guesses = range(last + 1, last + 1 + num_guesses)
        new_nodes = NewNodes(0, range(ROOT, num_guesses - 1), guesses, (0,) * num_guesses, chances, chances)
        return DraftUpdate(request.stamp, new_nodes, request.num_committed, is_over=True)


class FakeTargetActor(TargetActor):
    def __init__(self, config: EngineConfig, epoch: int) -> None:
        super().__init__(config, epoch)
        self._door = threading.Event()

    def _load_engine(self, rank: Any) -> Any:
        if self._config.model == "broken":
            raise CheckpointError("broken has no config.json")
        if self._config.model == "slow":
            time.sleep(SLOW_LOAD_S)
        if Path(self._config.model).is_file():
            os._exit(1)
        return FakeTargetEngine(self._epoch)

    async def block_data_calls(self) -> None:
        """Hold the event loop of the data calls, as nothing should."""
        self._door.wait()

    @ray.method(concurrency_group=CONTROL)
    async def unblock(self) -> None:
        self._door.set()

    @ray.method(concurrency_group=CONTROL)
    async def num_threads(self) -> tuple[int, str]:
        """Torch's threads, and what the libraries below it were told."""
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    @ray.method(concurrency_group=CONTROL)
    async def niceness(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, os.getpid())


class FakeDraftActor(DraftActor):
    def _load_engine(self, rank: Any) -> Any:
        if Path(self._config.model).name == "broken":
            raise CheckpointError("broken has no config.json")
        return FakeDraftEngine(self._epoch)

    @ray.method(concurrency_group=CONTROL)
    async def model(self) -> str:
        return self._config.model


class Front:
    """Stands where the orchestrator would, for what must be tried inside a replica."""

    def __init__(self, target: DeploymentHandle, draft: DeploymentHandle) -> None:
        self._leases = ServeLeases(target, [(draft, None)], Limits())
        self._call: asyncio.Task[Any] | None = None

    async def send_slow_batch(self) -> None:
        """Begin a call that serves others, too, and stay in this request until it is cancelled."""
        lease = await self._leases.take_target("front")
        request = VerifyRequest(
            Stamp(lease.name, lease.epoch, 1), Base(0, 0), (SLOW,), spec=SequenceSpec(1, Sampling(temperature=0))
        )
        self._call = asyncio.create_task(replies_of(lease.port, [request]))
        await asyncio.Event().wait()

    async def has_sent(self) -> bool:
        return self._call is not None

    async def outcome(self) -> str:
        """The kind of the reply, or of the error."""
        assert self._call is not None
        (outcome,) = await asyncio.gather(self._call, return_exceptions=True)
        return type(outcome[0] if isinstance(outcome, list) else outcome).__name__
