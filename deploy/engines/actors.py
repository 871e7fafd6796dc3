"""Engine actors: one process for each model. Orchestrators send their requests over its link (`deploy.link`).

If several processes share a model, rank 0 runs the engine and each other rank a follower. Ranks communicate by
collectives and end together: a rank that loses another ends its process, and the replica restarts them all.

Knows Ray actors and the engines of `workers`; must not know Serve or leases. Torch is imported only in the actor's
process, after the environment has limited its threads, so that replicas and the command line stay small.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, cast

import ray

from core.config import EngineConfig
from core.errors import WorkerLost
from core.records import (
    Adapter,
    Continuation,
    DraftReply,
    DraftRequest,
    Findings,
    ModelInfo,
    VerifyReply,
    VerifyRequest,
)
from deploy.engines import fork_server
from deploy.link.address import LinkAddress
from deploy.link.server import LinkServer
from deploy.link.tls import Certificates
from deploy.logs import log_to_stderr

if TYPE_CHECKING:
    from core.records import EngineStats
    from workers.engine import Engine, EngineLoop
    from workers.parallel import Rank

logger = logging.getLogger(__name__)

EXIT_LOST = 1

MAX_CONTROL_CALLS = 64
CONTROL = "control"
KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""Number of primitives that oneDNN, and torch on its behalf, cache on a CPU: one for each number of rows and shape of
weights. Each takes one to two megabytes; with the default of 1,024 an engine's memory keeps growing. Decoding needs
about a hundred."""
IMPORTS = (
    "llguidance", "ray", "safetensors.torch", "tokenizers", "torch", "torch.distributed", "torch.export",
    "transformers.conversion_mapping", "transformers.modeling_utils", "transformers.models.auto.modeling_auto",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "numba.core.registry:cpu_target.typing_context.refresh", "numba.core.registry:cpu_target.target_context.refresh",
)  # fmt: skip
"""Modules that the fork server imports in advance, because importing them takes most of an engine's start; and the
registries that numba otherwise loads at its first use."""

Request = TypeVar("Request", bound=VerifyRequest | DraftRequest)
Reply = TypeVar("Reply", bound=VerifyReply | DraftReply)
Method = TypeVar("Method", bound=Callable[..., Any])


def _control(method: Method) -> Method:
    """Run the method in the control group: its own event loop and thread, so that it never waits for links."""
    return cast(Method, ray.method(concurrency_group=CONTROL)(method))


Meeting = tuple[str, int]
"""Meeting point of a model's ranks: an address of rank 0's machine, and a free port there."""


class EngineActor(ABC, Generic[Request, Reply]):
    """One incarnation of an engine. It is never restarted in place."""

    def __init__(self, config: EngineConfig, epoch: int) -> None:
        log_to_stderr()
        self._config = config
        self._epoch = epoch
        self._loop: EngineLoop[Request, Reply] | None = None

    requests: ClassVar[tuple[type, ...]]
    """Types of requests that this engine accepts."""

    @abstractmethod
    def _load_engine(self, rank: Rank | None) -> Engine[Request, Reply]: ...

    def _bind_links(self) -> None:
        """Take a port for links: a lack of one is reported before minutes of loading. Raises: StartupError."""
        self._links = LinkServer(self._epoch, self.requests, Certificates.of(self._config.link_tls))
        self._links.bind(ray.util.get_node_ip_address(), self._config.link_ports)

    async def open_links(self) -> LinkAddress:
        """Accept links from now on. Returns their address."""
        return self._links.start(self._running.post)

    async def meeting(self) -> Meeting:
        """The address at which the other ranks find this one."""
        address = ray.util.get_node_ip_address()
        return address, _free_port(address)

    async def load(self, meeting: Meeting | None = None, known: Findings | None = None) -> tuple[ModelInfo, Findings]:
        """Load and warm up. Returns the model's description, and findings for the next engine.

        Call it once, before anything else. `known` are the findings of an earlier engine on the same resources.
        `meeting` is set on rank 0 of several ranks; the followers load at the same time. Raises: StartupError.
        """
        self._bind_links()
        engine, findings = await asyncio.to_thread(self._load_warm, meeting, known)
        from workers.engine import EngineLoop

        self._loop = EngineLoop(engine)
        self._loop.start()
        return engine.info, findings

    def _load_warm(self, meeting: Meeting | None, known: Findings | None) -> tuple[Engine[Request, Reply], Findings]:
        _use_threads(self._config.num_threads)
        from workers.runtime import this_machine

        engine = self._load_engine(_rank(0, self._config, meeting) if meeting is not None else None)
        return engine, engine.warm_up(self._report, this_machine(), known)

    @_control
    async def release(self, sessions: Sequence[str]) -> None:
        """Free the state of these sessions. Unknown ones are recorded as ended."""
        await self._running.release(sessions)

    @_control
    async def ready(self) -> None:
        """Return when the engine's thread is between two steps. Raises: WorkerLost if it has failed."""
        await self._running.ask(lambda _: None)

    @_control
    async def describe(self) -> ModelInfo:
        return await self._running.ask(lambda engine: engine.info)

    @_control
    async def stats(self) -> EngineStats:
        return await self._running.ask(lambda engine: engine.stats())

    @_control
    async def check_integrity(self) -> None:
        """Raises: AssertionError if tokens and KV do not match."""
        await self._running.ask(lambda engine: engine.check_integrity())

    @_control
    async def until_death(self) -> NoReturn:
        """Never returns. The call fails when the engine fails or this process ends, which notifies the owner at once.

        A device that has failed fails in each later call, and other ranks wait for this one. Raises: WorkerLost.
        """
        await self._running.until_end()

    @property
    def _running(self) -> EngineLoop[Request, Reply]:
        assert self._loop is not None, "an engine is called only after it has been loaded"
        return self._loop

    def _report(self, message: str) -> None:
        logger.info("engine %016x: %s", self._epoch, message)


class TargetActor(EngineActor[VerifyRequest, VerifyReply]):
    requests = (VerifyRequest, Continuation)

    def _load_engine(self, rank: Rank | None) -> Engine[VerifyRequest, VerifyReply]:
        from workers.engine import TargetEngine

        return TargetEngine.load(self._config, self._epoch, self._report, rank, _end_process)

    @_control
    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Serve an adapter from now on. Returns it, with its digest. Raises: StartupError."""
        return await self._running.load_adapter(adapter)

    @_control
    async def drop_adapter(self, digest: str) -> bool:
        """Free an adapter, unless sessions use it. Returns whether it is gone."""
        return await self._running.drop_adapter(digest)


class DraftActor(EngineActor[DraftRequest, DraftReply]):
    requests = (DraftRequest,)

    def __init__(self, config: EngineConfig, epoch: int, q_top_tokens: int) -> None:
        super().__init__(config, epoch)
        self._q_top_tokens = q_top_tokens

    def _load_engine(self, rank: Rank | None) -> Engine[DraftRequest, DraftReply]:
        from workers.engine import DraftEngine

        return DraftEngine.load(self._config, self._epoch, self._q_top_tokens, self._report, rank, _end_process)


class FollowerActor:
    """A rank of a model other than 0, in a process of its own."""

    def __init__(self, config: EngineConfig, index: int) -> None:
        log_to_stderr()
        self._config = config
        self._index = index

    async def follow(self, meeting: Meeting) -> None:
        """Run rank 0's steps with it. Returns when rank 0 stops in good order. Raises: StartupError."""
        await asyncio.to_thread(self._follow, meeting)

    def _follow(self, meeting: Meeting) -> None:
        _use_threads(self._config.num_threads)
        from workers.parallel import run_follower

        try:
            run_follower(self._config, _rank(self._index, self._config, meeting), logger.info)
        except WorkerLost as error:
            _end_process(str(error))


def _rank(index: int, config: EngineConfig, meeting: Meeting) -> Rank:
    from workers.parallel import Rank

    return Rank(index, config.num_ranks, *meeting)


def _end_process(reason: str) -> None:
    """End the process at once: a collective that waits for a dead rank would block an orderly exit."""
    logger.error("this process ends: %s", reason)
    logging.shutdown()
    os._exit(EXIT_LOST)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _use_threads(num_threads: int) -> None:
    """Limit torch's own thread pool. OMP_NUM_THREADS, set from outside, has limited the libraries below it."""
    import torch

    torch.set_num_threads(num_threads)


AnyActor = type[EngineActor[Any, Any]] | type[FollowerActor]


def start(actor: AnyActor, config: EngineConfig, *arguments: Any, **options: Any) -> Any:
    """Start an actor; the caller then calls its `load` or `follow`. `options` are Ray's, for placement."""
    threads = str(config.num_threads)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **KERNEL_CACHES}
    environment: dict[str, Any] = {"env_vars": variables}
    if config.device == "cpu":  # forking is not tested with a GPU
        environment["py_executable"] = fork_server.command(IMPORTS)
    remote = ray.remote(
        max_restarts=0,
        concurrency_groups={CONTROL: MAX_CONTROL_CALLS},
        enable_task_events=False,  # else Ray reports each call of each round to the head node
        runtime_env=environment,
    )(actor)
    return remote.options(**options).remote(config, *arguments)
