"""Threads that run a program together.

The calling thread is one of them; the others wait in Python between two runs. Knows threads; must not know programs.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import numpy as np

Work = Callable[[int], object]
"""Called by each thread with its number."""


class Team:
    """`num_threads` threads. Threads are started at the first run, so that a process may fork before."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.counter = np.zeros(8, np.int64)  # a cache line
        self._queues: list[SimpleQueue[Work | None]] = []
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, work: Work) -> None:
        """Run `work` on all threads, and wait for all of them."""
        if not self._queues and self.num_threads > 1:
            self._start()
        self.counter[0] = 0
        for queue in self._queues:
            queue.put(work)
        try:
            work(0)
        finally:
            errors = [self._done.get() for _ in self._queues]
        for error in filter(None, errors):
            raise error

    def close(self) -> None:
        """End the threads."""
        for queue in self._queues:
            queue.put(None)
        self._queues.clear()

    def _start(self) -> None:
        for number in range(1, self.num_threads):
            queue: SimpleQueue[Work | None] = SimpleQueue()
            Thread(target=self._serve, args=(number, queue), daemon=True, name=f"rows-{number}").start()
            self._queues.append(queue)

    def _serve(self, number: int, queue: SimpleQueue[Work | None]) -> None:
        while (work := queue.get()) is not None:
            try:
                work(number)
                self._done.put(None)
            except BaseException as error:  # noqa: BLE001  it is raised by the caller
                self._done.put(error)
