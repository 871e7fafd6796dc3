"""Commands through shared memory arrive whole and in order, however long, and a wait can be ended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import pytest

from core.config import EngineConfig
from core.errors import WorkerLost
from tests.workers.parallel.ranks import TIMEOUT_S, Followers, ranks
from workers.parallel import Rank, shared_memory
from workers.parallel.group import RankGroup
from workers.parallel.shared_memory import MESSAGE_INTS, SharedMemory

COMMANDS = [[1], [2] * 7, list(range(2 * MESSAGE_INTS + 5)), [3], [4] * MESSAGE_INTS, [5]]


def wait(_: float) -> None:
    """Goes on waiting."""


@contextmanager
def views(num_ranks: int) -> Iterator[list[SharedMemory]]:
    first = SharedMemory.create(num_ranks)
    try:
        yield [first, *(SharedMemory.open(first.path, rank, num_ranks) for rank in range(1, num_ranks))]
    finally:
        first.path.unlink()


def test_all_ranks_receive_what_the_first_sends() -> None:
    with views(3) as (first, *others):
        received: list[list[list[int]]] = [[] for _ in others]

        def receive(rank: int) -> None:
            received[rank] += [others[rank].receive(wait) for _ in COMMANDS]

        threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(len(others))]
        for thread in threads:
            thread.start()
        for command in COMMANDS:
            first.send(command, wait)
        for thread in threads:
            thread.join()
    assert received == [COMMANDS] * 2


def test_a_rank_that_has_not_read_a_command_is_waited_for_until_it_is_lost() -> None:
    def lost(waited_s: float) -> None:
        assert waited_s > 0
        raise WorkerLost("rank 1 is gone")

    with views(2) as (first, other):
        first.send([1], wait)
        with pytest.raises(WorkerLost):
            first.send([2], lost)
        assert other.receive(lost) == [1]
        with pytest.raises(WorkerLost):
            other.receive(lost)


def test_what_a_killed_first_rank_left_is_deleted_by_the_next_and_what_a_living_one_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    (tmp_path / "outrider-ranks-left").write_bytes(b"")
    (tmp_path / "notes").write_bytes(b"")
    first, second = SharedMemory.create(2), SharedMemory.create(2)
    assert set(tmp_path.iterdir()) == {first.path, second.path, tmp_path / "notes"}
    first.send([1], wait)
    assert SharedMemory.open(first.path, 1, 2).receive(wait) == [1], "it is locked, though its descriptor is closed"


_kept: list[RankGroup] = []


def _join(folder: Path, is_late: bool, config: EngineConfig, rank: Rank) -> str:
    """Join a group whose memory is in `folder`. With `is_late`, all but rank 0 stop before they open it."""
    shared_memory.FOLDER = folder  # type: ignore[misc]  # this process ends with the test
    if is_late:
        SharedMemory.open = lambda *_: threading.Event().wait()  # type: ignore[assignment]
    _kept.append(RankGroup(rank, config, lambda _: None))
    return "joined"


@pytest.mark.thorough
@pytest.mark.parametrize("is_late", [True, False])
def test_a_killed_first_rank_leaves_a_file_only_until_the_next_group(
    is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the others have not opened it. Afterwards no name of it is left, whoever dies."""
    group = ranks(2)
    with Followers(2) as followers:
        followers.start(EngineConfig("m", tensor_parallel=2), [group[0], *group], partial(_join, tmp_path, is_late))
        if not is_late:
            assert followers.outcomes() == ["joined"] * 2
        until_s = monotonic() + TIMEOUT_S
        while is_late and not any(tmp_path.iterdir()) and monotonic() < until_s:
            sleep(0.01)
        os.kill(followers.pid(0), signal.SIGKILL)
        followers.processes[0].join()
        assert len([*tmp_path.iterdir()]) == is_late
        monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
        own = SharedMemory.create(2)
        assert [*tmp_path.iterdir()] == [own.path]


def test_without_room_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.os, "posix_fallocate", lambda *_: _full())
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    with pytest.raises(OSError, match="No space"):
        SharedMemory.create(2)
    assert list(tmp_path.iterdir()) == []


def _full() -> None:
    raise OSError(28, "No space left on device")
