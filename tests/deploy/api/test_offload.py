from __future__ import annotations

import asyncio
import threading

import pytest

from core.errors import Overloaded
from deploy.api.offload import SHORT_BYTES, Offload

LONG = SHORT_BYTES + 1


def thread_name() -> str:
    return threading.current_thread().name


async def test_short_work_is_done_at_once_and_long_work_in_a_thread():
    offload = Offload()
    assert await offload.run(SHORT_BYTES, thread_name) == thread_name()
    assert (await offload.run(LONG, thread_name)).startswith("offload")


async def test_what_the_work_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        await Offload().run(LONG, lambda: 1 // 0)


class Held:
    """Work that lasts until it is let go."""

    def __init__(self):
        self.may_end = threading.Event()
        self.num_done = 0

    def __call__(self):
        self.may_end.wait(60)
        self.num_done += 1


async def test_more_than_can_wait_is_refused_until_something_is_done():
    offload, held = Offload(max_waiting_bytes=3 * LONG), Held()
    waiting = [asyncio.ensure_future(offload.run(LONG, held)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await offload.run(LONG, held)
    assert caught.value.retry_after_s > 0
    assert await offload.run(1, lambda: "short work goes on") == "short work goes on"
    held.may_end.set()
    await asyncio.gather(*waiting)
    await offload.run(LONG, held)
    assert held.num_done == 4


async def test_work_that_is_larger_than_all_that_may_wait_is_done_when_it_is_alone():
    assert await Offload(max_waiting_bytes=1).run(LONG, lambda: "done") == "done"


async def test_work_that_nobody_waits_for_any_more_is_not_begun():
    offload, held = Offload(max_waiting_bytes=2 * LONG), Held()
    first, second = (asyncio.ensure_future(offload.run(LONG, held)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    assert await asyncio.wait_for(offload.run(1, lambda: True), 30)
    third = asyncio.ensure_future(offload.run(LONG, held))
    held.may_end.set()
    await asyncio.gather(first, third)
    assert held.num_done == 2
