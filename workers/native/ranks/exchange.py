"""Exchanges rows between the ranks of a model, each a process of this machine: sums, and rows side by side.

Every rank adds in the order of ranks, so that all of them get the same bits. Knows numbers; must not know processes.
"""

from __future__ import annotations

from typing import Any, Final

from workers.native.arithmetic import round_all
from workers.native.compiler import compiled
from workers.native.intrinsics import add_atomic, clock_s, load_atomic, yield_processor
from workers.native.ranks.shared import ARRIVED, LIMIT_S, LOST, MEETING, NUM_RANKS, NUM_THREADS, PART, RANK
from workers.native.registers import place

MADE_OF: Final = "d82a3996b0d235aa"
"""Digest of the files that this one compiles in (see `machine`)."""
SPINS: Final = 2000
"""Looks at the barrier before a waiting thread lets others run."""


@compiled("void(int64[::1], int64)")
def _meet(state: Any, rounds: int) -> None:
    """Wait until all threads of all ranks are here for the `rounds`-th time, or the group is lost."""
    arrived, lost, spins, end_s = state[MEETING] + 8 * ARRIVED, state[MEETING] + 8 * LOST, 0, 0
    add_atomic(arrived, 1)
    while load_atomic(arrived) < rounds * state[NUM_THREADS] and not load_atomic(lost):
        spins += 1
        if spins > SPINS:
            yield_processor()
            if end_s == 0:
                end_s = clock_s() + state[LIMIT_S]
            elif clock_s() > end_s:
                add_atomic(lost, 1)


@compiled("int64(int64[::1], float32[::1], int64, int64, int64, int64, float32[::1], int64[::1], int64)")
def exchange(
    code: Any, memory: Any, base: int, count: int, thread: int, num_threads: int, numbers: Any, state: Any, rounds: int
) -> Any:
    """The sum of all ranks' rows, or their rows side by side: this thread's columns. Returns how often ranks have met.

    A part is written again two meetings later, when all have read it.
    """
    gathers, width, num_ranks = code[0] != 0, code[5], state[NUM_RANKS]
    first, end = width * thread // num_threads, width * (thread + 1) // num_threads
    together = PART // width
    for start in range(0, count, together):
        num_rows, parts = min(together, count - start), rounds % 2 * num_ranks * PART
        for row in range(num_rows):
            source, target = place(code, 1, base, count, start + row), parts + state[RANK] * PART + row * width
            for i in range(first, end):
                numbers[target + i] = memory[source + i]
        rounds += 1
        _meet(state, rounds)
        for row in range(num_rows):
            out = place(code, 3, base, count, start + row)
            for rank in range(num_ranks):
                source, target = parts + rank * PART + row * width, out + (rank * width if gathers else 0)
                if gathers or rank == 0:
                    for i in range(first, end):
                        memory[target + i] = numbers[source + i]
                else:
                    for i in range(first, end):
                        memory[target + i] += numbers[source + i]
            if code[6] and not gathers:
                round_all(memory[out + first : out + end])
    return rounds
