"""The processes that share one model: how they meet, what they do together, and what happens when one is lost.

Knows torch.distributed and no models. Activations go through gloo on a CPU and NCCL on a GPU; rank 0's orders,
which are integers, always go through gloo, so that they wait for no device. One process is in one group at most.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its __init__ re-exports them

from core.errors import ConfigError, StartupError, WorkerLost, first_line
from workers.parallel.heartbeat import Lifeline, Switchboard, connect

logger = logging.getLogger(__name__)

GLANCE_S = 0.25
"""A rank that waits for others looks up this often to see whether they are there."""
UNBOUNDED = timedelta(days=365)
"""An engine that is idle gives no orders; the lifeline tells its followers when it is gone."""
ENVELOPE_INTS = 1024
"""An order that is no longer goes out in one broadcast, others in two."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a group, and where it meets the others."""

    index: int
    """0 is the engine; the others follow it."""
    size: int
    master_address: str
    """Of rank 0's machine, as the others reach it."""
    master_port: int
    """Free on rank 0's machine, which listens on it."""
    timeout_s: float = 60.0
    """For the others to come, and within a step for each of them to do its part."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ConfigError(f"rank {self.index} is none of {self.size}")


class Group:
    """This process among the others of its group. Whoever has lost one of them has lost the group.

    The calls are collective: every rank makes the same ones in the same order. All raise WorkerLost when a rank is
    lost, has given up, or fails to do its part in time; nothing can be done together after that.
    """

    def __init__(self, rank: Rank, device: str, on_loss: Callable[[str], None], *, is_ordered: bool = False) -> None:
        """Meet the others; `is_ordered` sums are made in the order of the ranks. Raises: StartupError."""
        self.rank = rank
        self._is_ordered = is_ordered and rank.size > 2  # two summands have no order
        self._device = torch.device(device)
        self._timeout = timedelta(seconds=rank.timeout_s)
        if dist.is_initialized():
            raise StartupError("this process is in a group already")
        try:
            store = TCPStore(rank.master_address, rank.master_port, rank.size, rank.index == 0, self._timeout)
            self._meet(PrefixStore("ranks", store))
            self._lifeline = Lifeline(_connections(rank, store), on_loss)
        except (RuntimeError, OSError) as error:  # torch's own are RuntimeErrors
            if dist.is_initialized():
                dist.destroy_process_group()
            raise StartupError(
                f"rank {rank.index} of {rank.size} did not meet the others at {rank.master_address}:{rank.master_port} "
                f"within {rank.timeout_s:g} s: {first_line(error)}"
            ) from error

    def _meet(self, store: Store) -> None:
        on_gpu = self._device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=self.rank.index,
            world_size=self.rank.size,
            timeout=self._timeout,
            device_id=torch.device("cuda", self._device.index or 0) if on_gpu else None,
        )
        self._orders = dist.new_group(backend="gloo", timeout=UNBOUNDED)

    @property
    def lost(self) -> str | None:
        """Why this group is no more; None while it lives."""
        return self._lifeline.lost

    def close(self) -> None:
        """Leave: in good order when all do, after the last order, or what is left of a group that is lost."""
        self._lifeline.close(farewell=self.lost is None)
        dist.destroy_process_group()

    def give_up(self) -> None:
        """Let the others know that nothing will follow."""
        self._lifeline.lost = self.lost or f"rank {self.rank.index} has failed"
        self._lifeline.close(farewell=False)

    # For the model (workers.model.sharding.Collectives)

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each of them; `tensor` may be overwritten.

        Collectives cut a tensor into pieces, and where an element lies decides in which order its summands are added:
        with more than two ranks its last bits would depend on the rows beside it, unless the order is kept.
        """
        if self._is_ordered:
            first, *others = self._all(tensor)
            return sum(others, first)
        tensor = tensor.contiguous()
        self._do(lambda: dist.all_reduce(tensor, async_op=True))
        return tensor

    def join(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, one behind the other in the last dimension."""
        return torch.cat(self._all(tensor), dim=-1)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors, in order."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.rank.size)]
        self._do(lambda: dist.all_gather(parts, tensor.contiguous(), async_op=True))
        return parts

    # For rank 0 and its followers

    def agree(self, statement: str, problem: str | None = None) -> None:
        """Go on only if all ranks state the same and none of them has a problem.

        Raises: StartupError with the first problem, or if the statements differ.
        """
        try:
            heard = self._hear_all([statement, problem])
        except WorkerLost as error:
            raise StartupError(f"the ranks of the model did not start together: {error}") from error
        for rank, (_, trouble) in enumerate(heard):
            if trouble is not None:
                raise StartupError(f"rank {rank}: {trouble}")
        for rank, (said, _) in enumerate(heard):
            if said != heard[0][0]:
                raise StartupError(f"rank {rank} has other settings or another checkpoint than rank 0")

    def least(self, number: int) -> int:
        """The least of all ranks' numbers. Raises: WorkerLost."""
        return min(int(said or 0) for said, _ in self._hear_all([str(number), None]))

    def _hear_all(self, mine: list[str | None]) -> list[list[str | None]]:
        """What every rank has to say, in order."""
        said = json.dumps(mine).encode()
        longest = max(int(length) for length in self._tell_all(torch.tensor([len(said)])))
        padded = torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8)
        return [json.loads(bytes(heard.tolist())) for heard in self._tell_all(padded)]

    def _tell_all(self, tensor: Tensor) -> list[Tensor]:
        """As `_all`, without a time limit: a rank may be loading for as long as it takes."""
        parts = [torch.empty_like(tensor) for _ in range(self.rank.size)]
        self._wait(lambda: dist.all_gather(parts, tensor, group=self._orders, async_op=True), UNBOUNDED)
        return parts

    def send(self, order: Sequence[int]) -> None:
        """On rank 0: what all others get as the answer of `receive`."""
        values = [len(order), *order]
        values.extend([0] * (ENVELOPE_INTS - len(values)))
        message = torch.tensor(values, dtype=torch.int32)
        self._broadcast(message[:ENVELOPE_INTS], self._timeout)
        if len(values) > ENVELOPE_INTS:
            self._broadcast(message[ENVELOPE_INTS:], self._timeout)

    def receive(self) -> list[int]:
        """On the others: rank 0's next order, whenever it comes."""
        envelope = torch.empty(ENVELOPE_INTS, dtype=torch.int32)
        self._broadcast(envelope, UNBOUNDED)
        length, *order = envelope.tolist()
        if length > len(order):
            rest = torch.empty(length - len(order), dtype=torch.int32)
            self._broadcast(rest, self._timeout)
            order += rest.tolist()
        return order[:length]

    def _broadcast(self, message: Tensor, limit: timedelta) -> None:
        self._wait(lambda: dist.broadcast(message, src=0, group=self._orders, async_op=True), limit)

    def _do(self, start: Callable[[], Any]) -> None:
        """One collective of a step."""
        if self._device.type != "cuda":
            self._wait(start, self._timeout)
            return
        self._check()
        try:
            start().wait()  # orders the streams; the host goes on
        except RuntimeError as error:
            raise _loss(error) from error

    def _wait(self, start: Callable[[], Any], limit: timedelta) -> None:
        """Until a collective is complete, or there is no point in waiting for it any longer."""
        self._check()
        give_up_s = monotonic() + limit.total_seconds()
        try:
            work = start()
            while not work.is_completed():
                with suppress(RuntimeError):  # to look up; where it is the collective that failed, the last wait tells
                    work.wait(timedelta(seconds=GLANCE_S))
                self._check()
                if monotonic() > give_up_s and not work.is_completed():
                    raise WorkerLost(f"a rank has not done its part within {limit.total_seconds():g} s")
            work.wait()
        except RuntimeError as error:
            raise _loss(error) from error

    def _check(self) -> None:
        if self.lost is not None:
            raise WorkerLost(self.lost)


def _connections(rank: Rank, store: Store) -> dict[socket.socket, str]:
    """This rank's end of the lifeline, arranged through the store."""
    if rank.index == 0:
        switchboard = Switchboard(rank.master_address)
        store.set("lifeline", f"{switchboard.port} {switchboard.token}")
        return switchboard.gather(rank.size, rank.timeout_s)
    port, token = store.get("lifeline").decode().split()
    return connect(rank.master_address, int(port), token, rank.index, rank.timeout_s)


def _loss(error: RuntimeError) -> WorkerLost:
    return WorkerLost(f"the ranks of the model have lost each other: {first_line(error)}")
