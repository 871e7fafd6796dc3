"""A model shared by several processes: rank 0 has the engine, the others follow it step by step.

The owner of such a group has to do the following (docs/parallel.md has the reasons):

    start   Start `config.num_ranks` processes with the same config. Give each a `Rank`; all ranks have the same
            address and free port of rank 0's machine. In each, set torch's threads as for any engine. Rank 0 calls
            `TargetEngine.load(config, epoch, progress, rank, on_loss)`, the others call
            `run_follower(config, rank, progress)`; they wait for each other. If one rank fails to start, all raise
            StartupError.
    stop    Call `engine.close()` on rank 0 after its last step, on the thread that ran the steps. Each `run_follower`
            then returns.
    death   When one rank is lost, all are: `run_follower` raises WorkerLost within a second, `on_loss` is called on
            rank 0 at once (from a thread of its own, even while the engine is idle), and a step on rank 0 raises
            WorkerLost. Then end all these processes, preferably by `os._exit`: on a GPU, a collective that waits for a
            dead rank keeps its process alive forever. Replace the group as a whole, on another port.

Knows runtimes and the group; must not know sessions, nor how processes are started.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, StartupError
from core.records import Adapter
from workers.model import LoadedModel, LoraWeights, ModelShard, PipelineStage, loader
from workers.parallel.commands import Command, KVEdit, pack_adapter, pack_step, unpack_adapter, unpack_step
from workers.parallel.group import RankGroup
from workers.parallel.rank import Rank
from workers.runtime import ModelRuntime, NoRoomForKV
from workers.runtime.backend import Backend, BackendContext, BackendUnavailable
from workers.runtime.backend_stack import BackendStack
from workers.step import KVCache, LayerShape, Step

__all__ = ["Rank", "load_runtime", "log_rank_lost", "run_follower"]

logger = logging.getLogger(__name__)


def log_rank_lost(reason: str) -> None:
    """Default for `on_loss`: only log the loss. The owner notices it at its next step."""
    logger.error("the ranks of the model have lost each other: %s", reason)


def _nothing(_: LoadedModel) -> Sequence[LayerShape]:
    return ()


def load_runtime(
    config: EngineConfig,
    progress: Callable[[str], None],
    rank: Rank | None = None,
    on_loss: Callable[[str], None] = log_rank_lost,
    load_beside: Callable[[LoadedModel], Sequence[LayerShape]] = _nothing,
) -> ModelRuntime:
    """Load a runtime of the whole model, or of rank 0, which the others follow.

    `load_beside` loads what else the engine keeps in the same memory, before KV takes the rest, and returns the shapes
    of the KV that it needs for each token. Raises: StartupError.
    """
    if rank is None:
        loaded = loader.load(config, progress)
        return ModelRuntime(loaded, config, beside=load_beside(loaded))
    if rank.index != 0:
        raise ConfigError(f"the engine is rank 0; rank {rank.index} follows it")
    group = _connect(config, rank, progress, on_loss)
    loaded = _load(config, group, progress)
    with _abort_on_failure(group):
        leading = partial(LeaderBackends, group)
        beside = load_beside(loaded)
        return ModelRuntime(loaded, config, LeaderCache, None, leading, group.all_min, beside)


def run_follower(config: EngineConfig, rank: Rank, progress: Callable[[str], None]) -> None:
    """Carry out rank 0's commands until it stops. Raises: StartupError; WorkerLost when any rank is lost."""
    group = _connect(config, rank, progress, log_rank_lost)
    loaded = _load(config, group, progress)
    with _abort_on_failure(group):
        runtime = ModelRuntime(loaded, config, all_min=group.all_min)
        runtime.backends.warm_up_base(progress)
        while (command := group.receive_command())[0] != Command.STOP:
            _carry_out(command, runtime, group, progress)
            group.check()
    group.close()


def _carry_out(
    command: Sequence[int], runtime: ModelRuntime, group: RankGroup, progress: Callable[[str], None]
) -> None:
    kind, *values = command
    if kind == Command.STEP:
        _run(*unpack_step(values), runtime)
    elif kind == Command.ADD_ADAPTER:
        _add_adapter(*unpack_adapter(values), runtime)
    elif kind == Command.DROP_ADAPTER:
        runtime.backends.drop_adapter(*values)
    elif kind == Command.CHECK_ADAPTER:
        group.gather_json(runtime.backends.uncalled(*values))
    elif kind == Command.BUILD_BACKEND:
        with suppress(BackendUnavailable):  # rank 0 reports it
            runtime.backends.build(progress)
    elif kind == Command.BUILD_PART:
        runtime.backends.build_part(*values)
    else:
        runtime.backends.drop(runtime.info.name, "rank 0 has removed it")


def _add_adapter(number: int, adapter: Adapter, runtime: ModelRuntime) -> None:
    """Read this rank's part of an adapter, and use it if all ranks have theirs."""
    try:
        weights = runtime.read_adapter(adapter)
    except StartupError as error:
        logger.error("%s", error)  # noqa: TRY400  one line says it all
        runtime.all_min(0)
        return
    if runtime.all_min(1):
        runtime.backends.add_adapter(number, weights)


@torch.inference_mode()
def _run(edits: Sequence[KVEdit], step: Step, runtime: ModelRuntime) -> None:
    for edit in edits:
        edit.apply(runtime.cache)
    runtime.run(step)


class LeaderCache(KVCache):
    """Rank 0's KV. Records the edits that its followers have yet to make."""

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        self.edits: list[KVEdit] = []

    def erase(self, blocks: Sequence[int]) -> None:
        super().erase(blocks)
        self.edits.append(KVEdit((), blocks))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().move(sources, targets)
        self.edits.append(KVEdit(sources, targets))


class LeaderBackends(BackendStack):
    """Rank 0's backends: all ranks repeat each build, drop and step."""

    def __init__(
        self, group: RankGroup, kinds: Sequence[type[Backend]], context: BackendContext, all_min: Callable[[int], int]
    ) -> None:
        super().__init__(kinds, context, all_min)
        assert isinstance(context.cache, LeaderCache), "followers need the edits of the KV"
        self._cache = context.cache
        self._group = group

    def run(self, step: Step) -> torch.Tensor:
        """Run a step on all ranks. Raises: WorkerLost. After any failure the group ends: its ranks are out of step."""
        edits, self._cache.edits = self._cache.edits, []
        with _abort_on_failure(self._group):
            self._group.send_command([Command.STEP, *pack_step(edits, step)])
            logits = super().run(step)
            self._group.check()
            return logits

    def build(self, progress: Callable[[str], None]) -> None:
        self._group.send_command([Command.BUILD_BACKEND])
        super().build(progress)

    def build_part(self, part: int) -> None:
        self._group.send_command([Command.BUILD_PART, part])
        super().build_part(part)

    def drop(self, name: str, reason: str) -> None:
        self._group.send_command([Command.DROP_BACKEND])
        super().drop(name, reason)

    def add_adapter(self, number: int, weights: LoraWeights) -> None:
        self._group.send_command([Command.ADD_ADAPTER, *pack_adapter(number, weights.adapter)])
        if not self._all_min(1):
            raise CheckpointError(f"adapter {weights.adapter.name!r} cannot be read by each rank; the log says why")
        super().add_adapter(number, weights)

    def drop_adapter(self, number: int) -> None:
        self._group.send_command([Command.DROP_ADAPTER, number])
        super().drop_adapter(number)

    def uncalled(self, number: int) -> list[str]:
        """Return the uncalled modules of all ranks, since each rank has those of its own stage."""
        self._group.send_command([Command.CHECK_ADAPTER, number])
        return [name for names in self._group.gather_json(super().uncalled(number)) for name in names]

    def close(self) -> None:
        try:
            if self._group.lost is None:
                self._group.send_command([Command.STOP])
        finally:
            self._group.close()


@contextmanager
def _abort_on_failure(group: RankGroup) -> Iterator[None]:
    """If this rank fails, abort the group: otherwise the others would wait for it forever."""
    try:
        yield
    except NoRoomForKV:  # raised by all ranks
        group.close()
        raise
    except BaseException:
        group.abort()
        raise


def _connect(
    config: EngineConfig, rank: Rank, progress: Callable[[str], None], on_loss: Callable[[str], None]
) -> RankGroup:
    if rank.size != config.num_ranks:
        stages = f" and pipeline_parallel {config.pipeline_parallel}" if config.pipeline_parallel > 1 else ""
        raise ConfigError(f"tensor_parallel is {config.tensor_parallel}{stages}, but there are {rank.size} ranks")
    progress(f"rank {rank.index} of {rank.size} is waiting for the others at {rank.master_address}:{rank.master_port}")
    return RankGroup(rank, config, on_loss)


def _load(config: EngineConfig, group: RankGroup, progress: Callable[[str], None]) -> LoadedModel:
    """Load this rank's shard, and wait until all ranks have theirs of the same model.

    Raises: StartupError on all ranks if one of them fails.
    """
    stage, index = divmod(group.rank.index, config.tensor_parallel)
    part = PipelineStage(stage, config.pipeline_parallel)
    shard = ModelShard(index, config.tensor_parallel, config.expert_parallel, part, group.num_local)
    try:
        loaded = loader.load(config, progress, shard)
        statements = _fingerprints(config, loaded, shard)
    except Exception as error:
        with suppress(StartupError):  # the error is raised here anyway
            group.agree("", "", str(error))
        group.close()
        raise
    try:
        group.agree(*statements)
    except StartupError:
        group.close()
        raise
    shard.connect(group, group.pipeline)
    return loaded


def _fingerprints(config: EngineConfig, loaded: LoadedModel, shard: ModelShard) -> tuple[str, str]:
    """Digests of what all ranks must share, and of what those of a stage must.

    All have the settings that affect a step. Those of a stage have the weights that are not sliced; stages have none in
    common, so that there the checkpoint's digest is compared.
    """
    settings = repr(replace(config, model="-", device="-", num_threads=1))
    weights = loader.digest_of(config) if config.pipeline_parallel > 1 else ""
    common = repr((settings, loaded.info.architecture, loaded.info.num_parameters, weights))
    digest = hashlib.sha256(repr((loaded.layers, shard.num_sums)).encode())
    for tensor in shard.common_tensors(loaded.model):
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashlib.sha256(common.encode()).hexdigest(), digest.hexdigest()
