"""Threads of several ranks exchange rows: the sums and the order are right, in parts too, and nobody waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import numpy as np
import pytest
from numpy.typing import NDArray

from workers.native.ranks.exchange import exchange
from workers.native.ranks.shared import LOST, PART

NUM_RANKS, NUM_THREADS = 3, 2


def state_of(rank: int, meeting: NDArray[np.int64], num_threads: int, limit_s: int = 60) -> NDArray[np.int64]:
    return np.array([rank, NUM_RANKS, num_threads, meeting.ctypes.data, 0, limit_s], np.int64)


def code_of(width: int, *, gathers: bool, rounds: bool = False) -> NDArray[np.int64]:
    """Source and result follow each other in a row's registers."""
    times = NUM_RANKS if gathers else 1
    return np.array([gathers, 0, width, width, times * width, width, rounds, 0], np.int64)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(("width", "count"), [(7, 1), (33, 5), (PART // 2 - 3, 5)])
def test_rows_of_all_ranks_are_added_up_or_put_side_by_side(gathers: bool, width: int, count: int) -> None:
    """The last case takes three parts, so that the first is written again."""
    rng, times = np.random.default_rng(1), NUM_RANKS if gathers else 1
    own = rng.standard_normal((NUM_RANKS, count, width), np.float32)
    numbers, meeting = np.zeros(2 * NUM_RANKS * PART, np.float32), np.zeros(8, np.int64)
    memories = [np.concatenate([rows.ravel(), np.zeros(count * times * width, np.float32)]) for rows in own]
    code = code_of(width, gathers=gathers)

    def run(rank: int, thread: int) -> int:
        state = state_of(rank, meeting, NUM_RANKS * NUM_THREADS)
        rounds = exchange(code, memories[rank], 0, count, thread, NUM_THREADS, numbers, state, 0)
        return int(exchange(code, memories[rank], 0, count, thread, NUM_THREADS, numbers, state, rounds))

    pairs = [(rank, thread) for rank in range(NUM_RANKS) for thread in range(NUM_THREADS)]
    with ThreadPoolExecutor(len(pairs)) as pool:
        rounds = set(pool.map(run, *zip(*pairs, strict=True)))
    assert rounds == {2 * -(-count // (PART // width))}
    want = np.concatenate(own, axis=1) if gathers else own[0] + own[1] + own[2]
    for memory in memories:
        assert np.array_equal(memory[count * width :].reshape(count, -1), want)


def test_sums_in_bfloat16_are_rounded_once() -> None:
    numbers, meeting = np.zeros(2 * NUM_RANKS * PART, np.float32), np.zeros(8, np.int64)
    memories = [np.array([1.0 + 2.0**-8 * rank, 0.0], np.float32) for rank in range(NUM_RANKS)]
    code = code_of(1, gathers=False, rounds=True)

    def run(rank: int) -> None:
        exchange(code, memories[rank], 0, 1, 0, 1, numbers, state_of(rank, meeting, NUM_RANKS), 0)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        list(pool.map(run, range(NUM_RANKS)))
    assert [memory[1] for memory in memories] == [3.015625] * NUM_RANKS


@pytest.mark.parametrize("limit_s", [0, 60])
def test_nobody_waits_for_a_rank_that_does_not_come(limit_s: int) -> None:
    """It is late, or reported lost."""
    numbers, meeting = np.zeros(2 * NUM_RANKS * PART, np.float32), np.zeros(8, np.int64)
    state, code = state_of(0, meeting, NUM_RANKS, limit_s), code_of(1, gathers=False)
    if limit_s:
        threading.Timer(0.1, meeting.__setitem__, [LOST, 1]).start()
    began_s = monotonic()
    exchange(code, np.zeros(2, np.float32), 0, 1, 0, 1, numbers, state, 0)
    assert monotonic() - began_s < 30
    assert meeting[LOST] == 1, "so that a rank that comes late knows"


def test_a_rank_that_comes_late_waits_for_nobody_and_knows_that_the_group_is_lost() -> None:
    """The rank that gave up may have overwritten what the late one reads."""
    numbers, meeting = np.zeros(2 * NUM_RANKS * PART, np.float32), np.zeros(8, np.int64)
    code = code_of(1, gathers=False)
    exchange(code, np.zeros(2, np.float32), 0, 1, 0, 1, numbers, state_of(0, meeting, NUM_RANKS, 0), 0)
    began_s = monotonic()
    exchange(code, np.zeros(2, np.float32), 0, 1, 0, 1, numbers, state_of(1, meeting, NUM_RANKS), 0)
    assert monotonic() - began_s < 30
    assert meeting[LOST] == 1
