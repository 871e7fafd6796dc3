"""The virtual loop: no real time passes, the same program gives the same run, and what cannot go on is found."""

from __future__ import annotations

import asyncio
import time

import pytest

from simulation import clock
from simulation.clock import Deadlock, Livelock, UnhandledError, VirtualClock, new_loop, run


def test_a_day_passes_at_once_and_sleepers_wake_in_the_order_of_their_times():
    woken = []

    async def sleep(duration_s):
        await asyncio.sleep(duration_s)
        woken.append((duration_s, asyncio.get_running_loop().time()))

    async def main():
        await asyncio.gather(*map(sleep, (86_400.0, 5.0, 0.25, 5.0)))

    started_s = time.monotonic()
    run(main())
    assert time.monotonic() - started_s < 1.0
    assert woken == [(0.25, 0.25), (5.0, 5.0), (5.0, 5.0), (86_400.0, 86_400.0)]


def test_the_clock_stands_still_while_anything_is_ready():
    async def main():
        loop = asyncio.get_running_loop()
        times = []
        loop.call_later(1.0, times.append, "timer")
        for _ in range(1000):
            await asyncio.sleep(0)
            times.append(loop.time())
        return times

    assert run(main()) == [0.0] * 1000


def test_timeouts_queues_and_events_of_asyncio_work_on_it():
    async def main():
        queue, event = asyncio.Queue(1), asyncio.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await event.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 4.0)
        asyncio.get_running_loop().call_later(1.0, event.set)
        await event.wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 8.0


def test_waiting_for_what_cannot_come_is_a_deadlock_and_names_who_waits():
    async def main():
        asyncio.create_task(asyncio.Event().wait(), name="the one that waits")  # noqa: RUF006
        await asyncio.sleep(7.0)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"at 7\.0.*the one that waits"):
        run(main())


def test_two_that_keep_each_other_awake_are_found(monkeypatch):
    monkeypatch.setattr(clock, "MAX_EVENTS_AT_ONE_TIME", 1000)

    async def main():
        while True:  # noqa: ASYNC110  that is the fault
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        run(main())


def test_an_exception_that_nobody_takes_ends_the_run():
    async def main():
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(10.0)

    with pytest.raises(UnhandledError) as caught:
        run(main())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("wait", ["thread", "socket", "pipe"])
def test_the_real_world_cannot_be_waited_for(wait):
    async def main():
        loop = asyncio.get_running_loop()
        match wait:
            case "thread":
                await asyncio.to_thread(print)
            case "socket":
                await loop.create_connection(asyncio.Protocol, "localhost", 1)
            case "pipe":
                loop.add_reader(0, print)

    with pytest.raises(NotImplementedError):
        run(main())


def test_the_hook_is_called_after_each_event_and_ends_the_run_when_it_raises():
    seen = []

    def after_event():
        seen.append(loop.time())
        assert loop.time() < 3.0, "an invariant"

    loop = new_loop(after_event)

    async def main():
        for _ in range(10):
            await asyncio.sleep(1.0)

    with pytest.raises(AssertionError, match="an invariant"):
        loop.run_until_complete(main())
    assert seen == [0.0, 1.0, 1.0, 2.0, 2.0, 3.0], "a timer's event, then that of the task that waited for it"
    asyncio.all_tasks(loop).pop().get_coro().close()
    loop.close()


def test_timers_are_counted_while_they_are_set():
    loop = new_loop()

    async def main():
        timers = [loop.call_later(delay_s, int) for delay_s in (1.0, 2.0, 3.0, 0.0)]
        assert loop.num_timers == 4
        timers[1].cancel()
        timers[1].cancel()
        timers[3].cancel()
        assert loop.num_timers == 2
        await asyncio.sleep(1.5)
        timers[0].cancel()
        assert loop.num_timers == 1

    loop.run_until_complete(main())
    loop.run_until_complete(asyncio.sleep(1.5))
    assert (loop.num_timers, loop.time()) == (0, 3.0)
    loop.close()


def test_an_asynchronous_generator_that_is_dropped_is_closed():
    closed = []

    async def numbers():
        try:
            yield 1
        finally:
            await asyncio.sleep(1.0)
            closed.append(asyncio.get_running_loop().time())

    async def main():
        generator = numbers()
        await anext(generator)
        del generator
        await asyncio.sleep(2.0)

    run(main())
    assert closed == [1.0]


def test_the_clock_is_the_loops():
    loop = new_loop()
    own = VirtualClock(loop)

    async def main():
        await own.sleep(1.25)
        await own.sleep(-1.0)
        return own.now()

    assert loop.run_until_complete(main()) == loop.time() == 1.25
    loop.close()
