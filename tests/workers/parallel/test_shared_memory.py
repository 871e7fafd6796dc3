"""Commands through shared memory arrive whole and in order, however long, and a wait can be ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.errors import WorkerLost
from workers.parallel import shared_memory
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


def test_without_room_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.os, "posix_fallocate", lambda *_: _full())
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    with pytest.raises(OSError, match="No space"):
        SharedMemory.create(2)
    assert list(tmp_path.iterdir()) == []


def _full() -> None:
    raise OSError(28, "No space left on device")
