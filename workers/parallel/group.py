"""The group of processes that share one model: how they connect, their collectives, and the loss of one of them.

Knows torch.distributed and no models. Activations go through gloo on a CPU and NCCL on a GPU. Rank 0's commands, which
are integers, wait for no device: they go through memory that all ranks share, or through gloo between machines. A
process is in at most one group.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its __init__ re-exports them

from core.config import EngineConfig
from core.errors import StartupError, WorkerLost, first_line
from workers.native.ranks.shared import Exchange
from workers.parallel.heartbeat import Heartbeat, HeartbeatListener, connect
from workers.parallel.pipeline import Pipeline
from workers.parallel.rank import Rank
from workers.parallel.shared_memory import SharedMemory
from workers.runtime import this_machine

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
"""A rank that waits in a collective checks this often whether the others are alive."""
UNBOUNDED = timedelta(days=365)
"""Time limit of a wait for commands: an idle engine sends none, and the heartbeat reports its death."""
FIRST_MESSAGE_INTS = 1024
"""Length of a command's first broadcast, in integers; a longer command takes a second one."""


class RankGroup:
    """This process's membership in its group. When one process is lost, the whole group is.

    Calls are collective: every rank makes the same calls in the same order. They raise WorkerLost when a rank is lost,
    has aborted, or is late; no collective works after that.
    """

    exchange: Exchange | None = None
    """Memory that native code of all ranks shares; None without such memory, with several stages, and on a GPU."""
    num_local: int
    """Number of ranks on this rank's machine."""

    def __init__(self, rank: Rank, config: EngineConfig, on_loss: Callable[[str], None]) -> None:
        """Connect to the other ranks. Raises: StartupError."""
        self.rank = rank
        self._device = torch.device(config.device)
        self._timeout = timedelta(seconds=rank.timeout_s * config.pipeline_parallel)  # stages wait for each other
        if dist.is_initialized():
            raise StartupError("this process is already in a group of ranks; start each rank in a process of its own")
        try:
            store = TCPStore(rank.master_address, rank.master_port, rank.size, rank.index == 0, self._timeout)
            self._connect(PrefixStore("ranks", store))
            self.pipeline = Pipeline(rank.index, config, self._timeout, self._run_collective)
            self._heartbeat = Heartbeat(_connections(rank, store), lambda reason: self._lose(reason, on_loss))
        except (RuntimeError, OSError) as error:  # torch's own are RuntimeErrors
            if dist.is_initialized():
                dist.destroy_process_group()
            raise StartupError(
                f"rank {rank.index} of {rank.size} did not meet the others at {rank.master_address}:{rank.master_port} "
                f"within {self._timeout.total_seconds():g} s: {first_line(error)}"
            ) from error
        self._is_ordered = config.deterministic and config.tensor_parallel > 2  # two summands have one order
        self._memory = self._share_memory(store, config.num_threads)

    def _connect(self, store: Store) -> None:
        on_gpu = self._device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=self.rank.index,
            world_size=self.rank.size,
            timeout=self._timeout,
            device_id=torch.device("cuda", self._device.index or 0) if on_gpu else None,
        )
        self._command_group = dist.new_group(backend="gloo", timeout=UNBOUNDED)

    def _share_memory(self, store: Store, num_threads: int) -> SharedMemory | None:
        """Memory that all ranks have in common; None if they are on several machines, or if there is none."""
        memory, index, size = None, self.rank.index, self.rank.size
        try:
            path = Path(store.get("memory").decode()) if index else Path()
            memory = SharedMemory.open(path, index, size) if index else SharedMemory.create(size)
            memory.announce(num_threads)
        except OSError as error:
            logger.info("rank %d shares no memory with the others: %s", index, error)
        if index == 0:
            store.set("memory", "" if memory is None else str(memory.path))
        own = this_machine()
        try:
            is_shared, machines = zip(*self.gather_json([memory is not None, own]), strict=True)
        except WorkerLost as error:
            self.close()
            raise StartupError(f"the ranks of the model did not start together: {error}") from error
        finally:
            if memory is not None and index == 0:
                memory.path.unlink(missing_ok=True)
        self.num_local = machines.count(own)
        if memory is None or not all(is_shared):
            return None
        if self._device.type == "cpu" and self.pipeline.stage is None:
            self.exchange = memory.exchange(self.rank.timeout_s)
        return memory

    def _lose(self, reason: str, on_loss: Callable[[str], None]) -> None:
        if self.exchange is not None:
            self.exchange.lose()
        on_loss(reason)

    @property
    def lost(self) -> str | None:
        """Why this group has ended; None while it lives."""
        return self._heartbeat.lost

    def close(self) -> None:
        """Leave the group, together with all ranks after the last command, or alone after a loss."""
        self._heartbeat.close(goodbye=self.lost is None)
        dist.destroy_process_group()

    def abort(self) -> None:
        """Tell the others that this rank has failed."""
        self._heartbeat.lost = self.lost or f"rank {self.rank.index} has failed"
        self._heartbeat.close(goodbye=False)

    # For the model: workers.model.shards.sharding.Collectives

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks of the stage, with the same bits on each of them; may overwrite `tensor`.

        Collectives split a tensor into pieces, and an element's index decides the order in which its summands are
        added. With more than two ranks, its last bits would depend on the other rows, unless sums are ordered.
        """
        if self._is_ordered:
            first, *others = self._gather(tensor)
            return sum(others, first)
        tensor = tensor.contiguous()
        self._run_collective(lambda: dist.all_reduce(tensor, group=self.pipeline.stage, async_op=True))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks of the stage, concatenated in the last dimension."""
        return torch.cat(self._gather(tensor), dim=-1)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks of the stage, in their order."""
        num_ranks, stage = self.pipeline.num_ranks, self.pipeline.stage
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(num_ranks)]
        self._run_collective(lambda: dist.all_gather(parts, tensor.contiguous(), group=stage, async_op=True))
        return parts

    # For rank 0 and its followers

    def agree(self, statement: str, of_stage: str, problem: str | None = None) -> None:
        """Check that all ranks make the same statement, those of a stage the same one of it, and none has a problem.

        Raises: StartupError with the first problem, or if the statements differ.
        """
        try:
            received = self.gather_json([statement, of_stage, problem])
        except WorkerLost as error:
            raise StartupError(f"the ranks of the model did not start together: {error}") from error
        for rank, (*_, trouble) in enumerate(received):
            if trouble is not None:
                raise StartupError(f"rank {rank}: {trouble}")
        for rank, (common, own, _) in enumerate(received):
            first = rank - rank % self.pipeline.num_ranks
            if common != received[0][0] or own != received[first][1]:
                other = 0 if common != received[0][0] else first
                raise StartupError(f"rank {rank} has other settings or another checkpoint than rank {other}")

    def all_min(self, number: int) -> int:
        """The smallest of all ranks' numbers. Raises: WorkerLost."""
        smallest: int = min(received for (received,) in self.gather_json([number]))
        return smallest

    def gather_json(self, own: Sequence[Any]) -> list[list[Any]]:
        """All ranks' values, in the order of ranks. Raises: WorkerLost."""
        sent = json.dumps(own).encode()
        longest = max(int(length) for length in self._gather_untimed(torch.tensor([len(sent)])))
        padded = torch.frombuffer(bytearray(sent.ljust(longest)), dtype=torch.uint8)
        return [json.loads(bytes(received.tolist())) for received in self._gather_untimed(padded)]

    def _gather_untimed(self, tensor: Tensor) -> list[Tensor]:
        """`_gather` without a time limit: loading a rank may take any time."""
        parts = [torch.empty_like(tensor) for _ in range(self.rank.size)]
        self._wait(lambda: dist.all_gather(parts, tensor, group=self._command_group, async_op=True), UNBOUNDED)
        return parts

    def send_command(self, command: Sequence[int]) -> None:
        """On rank 0: send a command to all followers."""
        if self._memory is not None:
            self._check()
            self._memory.send(command, lambda waited_s: self._check_wait(waited_s, self._timeout))
            return
        values = [len(command), *command]
        values.extend([0] * (FIRST_MESSAGE_INTS - len(values)))
        message = torch.tensor(values, dtype=torch.int32)
        self._broadcast(message[:FIRST_MESSAGE_INTS], self._timeout)
        if len(values) > FIRST_MESSAGE_INTS:
            self._broadcast(message[FIRST_MESSAGE_INTS:], self._timeout)

    def receive_command(self) -> list[int]:
        """On a follower: wait for rank 0's next command."""
        if self._memory is not None:
            self._check()
            return self._memory.receive(lambda waited_s: self._check_wait(waited_s, UNBOUNDED))
        first = torch.empty(FIRST_MESSAGE_INTS, dtype=torch.int32)
        self._broadcast(first, UNBOUNDED)
        length, *command = first.tolist()
        if length > len(command):
            rest = torch.empty(length - len(command), dtype=torch.int32)
            self._broadcast(rest, self._timeout)
            command += rest.tolist()
        return command[:length]

    def _broadcast(self, message: Tensor, limit: timedelta) -> None:
        self._wait(lambda: dist.broadcast(message, src=0, group=self._command_group, async_op=True), limit)

    def _run_collective(self, start: Callable[[], Any]) -> None:
        """Run one collective of a step; on a GPU the host does not wait for it."""
        if self._device.type != "cuda":
            self._wait(start, self._timeout)
            return
        self._check()
        try:
            start().wait()  # the stream waits, not the host
        except RuntimeError as error:
            raise _loss(error) from error

    def _wait(self, start: Callable[[], Any], limit: timedelta) -> None:
        """Wait until a collective is complete, a rank is lost, or the limit has passed."""
        self._check()
        began_s = monotonic()
        try:
            work = start()
            while not work.is_completed():
                with suppress(RuntimeError):  # a time-out; if the collective has failed, the last wait raises
                    work.wait(timedelta(seconds=POLL_INTERVAL_S))
                if not work.is_completed():
                    self._check_wait(monotonic() - began_s, limit)
            work.wait()
        except RuntimeError as error:
            raise _loss(error) from error

    def check(self) -> None:
        """Call after a step of native code, which ends early if a rank is lost or late. Raises: WorkerLost."""
        self._check()
        if self.exchange is not None and self.exchange.is_lost:
            raise self._late(self._timeout)

    def _check_wait(self, waited_s: float, limit: timedelta) -> None:
        self._check()
        if waited_s > limit.total_seconds():
            raise self._late(limit)

    @staticmethod
    def _late(limit: timedelta) -> WorkerLost:
        return WorkerLost(f"a rank did not complete a step within {limit.total_seconds():g} s")

    def _check(self) -> None:
        if self.lost is not None:
            raise WorkerLost(self.lost)


def _connections(rank: Rank, store: Store) -> dict[socket.socket, str]:
    """This rank's heartbeat connections; the store tells followers the port and the token."""
    if rank.index == 0:
        listener = HeartbeatListener(rank.master_address)
        store.set("heartbeat", f"{listener.port} {listener.token}")
        return listener.accept_followers(rank.size, rank.timeout_s)
    port, token = store.get("heartbeat").decode().split()
    return connect(rank.master_address, int(port), token, rank.index, rank.timeout_s)


def _loss(error: RuntimeError) -> WorkerLost:
    return WorkerLost(f"the ranks of the model have lost each other: {first_line(error)}")
