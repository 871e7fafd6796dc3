"""Processor time of this process and all its descendants by name, including a cluster that it has started.

Knows Linux processes; must not know their work. The kernel counts in steps of 10 ms, so measure over many rounds.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.results import Result, spread

TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
LEAST_SHOWN_MS = 0.05
PROCESSOR_GOAL_MS = 5.0
"""Goal for everything except the two models, in milliseconds per round."""


def cpu_s() -> dict[str, float]:
    """Processor seconds so far, by name of the process."""
    total: dict[str, float] = defaultdict(float)
    for _, name, seconds in _descendants():
        total[name] += seconds
    return total


def threads_s(name: str) -> dict[int, float]:
    """Processor seconds so far of each thread of the processes with this name. Raises: LookupError if there are
    none."""
    if folders := [PROC / str(pid) / "task" for pid, process, _ in _descendants() if process == name]:
        return {thread: seconds for folder in folders for thread, _, _, seconds in _tasks(folder)}
    raise LookupError(f"no process below this one is called {name!r}; there are: {', '.join(sorted(cpu_s()))}")


def busiest_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Processor seconds of the busiest thread between two results of `threads_s`."""
    return max(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


def _descendants() -> Iterator[tuple[int, str, float]]:
    """Id, name and processor seconds of this process and all its descendants."""
    children: dict[int, list[int]] = {}
    known: dict[int, tuple[str, float]] = {}
    for pid, parent, name, seconds in _tasks(PROC):
        children.setdefault(parent, []).append(pid)
        known[pid] = (name, seconds)
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        yield (pid, *known[pid])
        waiting += children.get(pid, [])


def _tasks(folder: Path) -> Iterator[tuple[int, int, str, float]]:
    """Id, parent, name and processor seconds of each process or thread."""
    for task in folder.glob("[0-9]*"):
        try:
            _, _, fields = (task / "stat").read_text().rpartition(")")
            command = (task / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # the task has ended
            continue
        state = fields.split()
        yield int(task.name), int(state[1]), _kind(command), (int(state[11]) + int(state[12])) / TICKS


def _kind(command: str) -> str:
    """Name of the actor if it is a process of Ray, else of the program."""
    actor = re.match(r"ray::(?:ServeReplica:[^:]*:)?(\w+)", command)
    return actor[1] if actor else Path(command.split(" ")[0] or "kernel").name


def round_ms(before: Mapping[str, float], after: Mapping[str, float], num_rounds: float) -> dict[str, float]:
    """Milliseconds per round, by process, between two results of `cpu_s`."""
    return {process: 1e3 * (seconds - before.get(process, 0.0)) / num_rounds for process, seconds in after.items()}


def processor_time(name: str, samples: Sequence[Mapping[str, float]]) -> Result:
    """Milliseconds per round of all processes together. The settings have the median of each that takes noticeable
    time."""
    processes = sorted({process for sample in samples for process in sample})
    medians = {process: statistics.median(sample.get(process, 0.0) for sample in samples) for process in processes}
    shown = {process: round(median, 2) for process, median in medians.items() if median >= LEAST_SHOWN_MS}
    return spread(name, [sum(sample.values()) for sample in samples], "ms", **shown)
