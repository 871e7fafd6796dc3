"""An event loop with a virtual clock: callbacks take no time, and waiting jumps to the next timer.

Knows handles and timers; must not know what runs on them. There is one thread and no I/O: the methods for sockets,
processes, signals and threads are missing, so code that waits for the real world fails at once.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from itertools import count
from typing import Any, TypeVar, TypeVarTuple, cast

MAX_EVENTS_AT_ONE_TIME = 20_000
"""More events than this at one time mean a livelock."""

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Deadlock(AssertionError):
    """A future is awaited, but no callback is ready and no timer is set."""


class Livelock(AssertionError):
    """Events keep following each other while no time passes."""


class UnhandledError(AssertionError):
    """A callback or a task raised an exception that nobody handled."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in order, then jumps to the earliest timer. The same program always gives the same run.

    `after_event` is called after each handle; it checks invariants.
    """

    def __init__(self, after_event: Callable[[], None] | None = None) -> None:
        self._after_event = after_event
        self._now_s = 0.0
        self._num_events_now = 0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._set: set[int] = set()
        self._numbers = count()
        self._problems: list[dict[str, Any]] = []
        self._is_running = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<VirtualLoop at {self._now_s:.6f} s, {len(self._ready)} ready, {self.num_timers} timers>"

    @property
    def num_timers(self) -> int:
        """Number of timers that are neither due nor cancelled."""
        return len(self._set)

    # Running

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Raises: Deadlock, Livelock, UnhandledError, and what `future` and `after_event` raise."""
        task = asyncio.ensure_future(cast("Awaitable[T]", future), loop=self)
        with self._current():
            while not task.done():
                self._turn()
        return task.result()

    def abandon(self) -> None:
        """Cancel the tasks of a failed run, and let them finish."""
        self._after_event, self._num_events_now = None, 0
        with self._current():
            for turn in range(MAX_EVENTS_AT_ONE_TIME):
                tasks = asyncio.all_tasks(self)
                if not tasks:
                    break
                if turn == 0 or not self._ready:
                    for task in tasks:
                        task.cancel()
                with suppress(AssertionError):
                    self._turn()

    def _turn(self) -> None:
        """Run one event and the check after it."""
        if not self._ready:
            self._go_to_next_timer()
        self._num_events_now += 1
        if self._num_events_now > MAX_EVENTS_AT_ONE_TIME:
            raise Livelock(f"{self._num_events_now} events at {self._now_s:.6f} s; the next is {self._ready[0]}")
        handle = self._ready.popleft()
        if not handle.cancelled():
            handle._run()
            if self._problems:
                self._raise_problem()
            if self._after_event is not None:
                self._after_event()

    def _go_to_next_timer(self) -> None:
        """Move the clock to the earliest timer, and make every timer ready that is due then."""
        while self._timers and (not self._ready or self._timers[0][0] <= self._now_s):
            due_s, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._set.discard(id(timer))
                self._ready.append(timer)
                if due_s > self._now_s:
                    self._now_s, self._num_events_now = due_s, 0
        if not self._ready:
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self)))
            raise Deadlock(f"at {self._now_s:.6f} s nothing is ready and no timer is set; waiting: {waiting}")

    def _raise_problem(self) -> None:
        problem = self._problems.pop()
        raise UnhandledError(problem["message"]) from problem.get("exception")

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make this the running loop, which also closes asynchronous generators."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.create_task(generator.aclose())

    # The loop's interface for asyncio

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (max(when, self._now_s), next(self._numbers), timer))
        self._set.add(id(timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by `TimerHandle.cancel`. A timer that is ready is no longer in the set."""
        self._set.discard(id(handle))

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **options)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the error. The run raises it after the current event."""
        self._problems.append(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()


class VirtualClock:
    """`core.ports.Clock` on the loop's time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


def new_loop(after_event: Callable[[], None] | None = None) -> VirtualLoop:
    """Return a loop at time 0."""
    return VirtualLoop(after_event)  # type: ignore[abstract]  # the methods for I/O are left out on purpose


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a new loop, and close the loop."""
    loop = new_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
