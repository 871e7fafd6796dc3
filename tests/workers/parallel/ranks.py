"""Processes that follow this one as ranks of a model: `with Followers(1) as followers: ...`."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, Self

import torch

from core.config import EngineConfig
from core.errors import OutriderError
from workers.engine.target import TargetEngine
from workers.parallel import Rank
from workers.parallel.leader import load_runtime, run_follower
from workers.runtime.runtime import ModelRuntime

ADDRESS = "127.0.0.1"
TIMEOUT_S = 60.0
OUR_PORTS = (21_000, 32_000)
"""Above those of Ray's workers, below those that Linux gives away."""


def free_port() -> int:
    """One that nobody is given meanwhile, as those are that the system chooses: Ray may run beside these tests."""
    while True:
        port = Random().randrange(*OUR_PORTS)
        with suppress(OSError), socket.create_server((ADDRESS, port)):
            return port


def ranks(size: int, timeout_s: float = TIMEOUT_S) -> list[Rank]:
    """Ranks of a new group."""
    port = free_port()
    return [Rank(index, size, ADDRESS, port, timeout_s) for index in range(size)]


def config_of(path: Path, size: int = 1, **settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(path), "kv_cache_tokens": 4096, "tensor_parallel": size} | settings)


def _serve(calls: Any) -> None:
    """A process that follows one group after the other, and reports how each ended."""
    torch.set_num_threads(1)
    calls.send("ready")
    while (call := calls.recv()) is not None:
        role, *arguments = call
        calls.send(role(*arguments))


def _led(config: EngineConfig, rank: Rank) -> str:
    """Leads a group until this process ends."""
    _kept.append(load_runtime(config, lambda _: None, rank))
    return "leading"


_kept: list[ModelRuntime] = []


def followed(config: EngineConfig, rank: Rank) -> str:
    try:
        run_follower(config, rank, lambda _: None)
    except OutriderError as error:
        return f"{type(error).__name__}: {error}"
    return "stopped"


class Followers:
    """Some processes, each of which can be a rank of one group at a time."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["workers.parallel.leader"])  # torch is imported once for all of them
        self._calls, theirs = zip(*(context.Pipe() for _ in range(count)), strict=True)
        self.processes = [context.Process(target=_serve, args=(end,), daemon=True) for end in theirs]
        for process in self.processes:
            process.start()
        for end in theirs:
            end.close()

    def __enter__(self) -> Self:
        assert [call.recv() for call in self._calls] == ["ready"] * len(self.processes)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def start(
        self, config: EngineConfig, group: list[Rank], role: Callable[[EngineConfig, Rank], str] | None = None
    ) -> None:
        """Let them follow, as ranks 1 and up, or do what `role` does in such a process."""
        assert self.outcomes(0) == ["still following"] * len(self.processes), "of an earlier group"
        for call, rank in zip(self._calls, group[1:], strict=False):
            call.send((role or followed, config, rank))

    def lead(self, config: EngineConfig, rank: Rank) -> None:
        """Let the first of them be rank 0, here and not in this process."""
        self._calls[0].send((_led, config, rank))

    def leave(self) -> None:
        """Let them end, as a process does that has nothing left to do."""
        for call in self._calls:
            call.send(None)

    def outcomes(self, timeout_s: float = TIMEOUT_S) -> list[str]:
        """How each of them has ended that does so in time; "dead" for a process that is no more."""
        return [self._outcome(call, timeout_s) for call in self._calls]

    @staticmethod
    def _outcome(call: Any, timeout_s: float) -> str:
        if not call.poll(timeout_s):
            return "still following"
        try:
            return str(call.recv())
        except (EOFError, ConnectionError):
            return "dead"

    def pid(self, index: int) -> int:
        pid = self.processes[index].pid
        assert pid is not None
        return pid

    @contextmanager
    def runtime(
        self, path: Path, role: Callable[[EngineConfig, Rank], str] | None = None, **settings: Any
    ) -> Iterator[ModelRuntime]:
        """The checkpoint on all ranks, this process being the first."""
        config = config_of(path, 1 + len(self.processes), **settings)
        group = ranks(config.num_ranks)
        self.start(config, group, role)
        runtime = load_runtime(config, lambda _: None, group[0])
        try:
            yield runtime
        finally:
            runtime.close()
        assert self.outcomes() == ["stopped"] * len(self.processes)

    @contextmanager
    def engine(self, path: Path, epoch: int, **settings: Any) -> Iterator[TargetEngine]:
        config = config_of(path, 1 + len(self.processes), **settings)
        group = ranks(config.num_ranks)
        self.start(config, group)
        engine = TargetEngine.load(config, epoch, lambda _: None, group[0])
        try:
            yield engine
        finally:
            engine.close()
        assert self.outcomes() == ["stopped"] * len(self.processes)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
