"""One link to each engine, whoever asks; what cannot be opened is counted, told once, and tried again later."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.records import VerifyRequest
from deploy.link.address import LinkTroubles
from deploy.link.pool import Links
from deploy.link.stream import LinkError
from tests.deploy.fake_engines import FakeTargetEngine
from tests.deploy.link.listening import listen
from tests.exchange import replies_of
from workers.engine.thread import EngineLoop


@pytest.fixture
async def address():
    engine = EngineLoop(FakeTargetEngine(5))
    engine.start()
    listener, address = listen(engine.post, VerifyRequest, 5)
    yield address
    listener.close()
    await asyncio.sleep(0.02)
    await engine.close()


@pytest.fixture
async def links():
    links = Links()
    yield links
    for link in links._links.values():
        link.close("the test is over")
    await asyncio.sleep(0.02)


async def test_all_who_ask_share_one_link(links, address):
    found = await asyncio.gather(*(links.to("target-5", address) for _ in range(5)))
    assert len({id(link) for link in found}) == 1
    assert await links.to("target-5", address) is found[0]
    assert links.troubles == LinkTroubles()


async def test_a_link_that_cannot_be_opened_is_counted_and_logged_once(links, address, caplog):
    nowhere = replace(address, port=1)
    for num_attempts in (1, 2):
        with pytest.raises(LinkError, match=r"refused|Connect"):
            await links.to("target-5", nowhere)
        assert links.troubles.num_unopened == num_attempts
    assert len(caplog.messages) == 1
    assert "no link to target-5: " in caplog.text
    assert not (await links.to("target-5", address)).is_closed


async def test_all_who_wait_for_an_attempt_that_fails_are_told_why(links, address):
    nowhere = replace(address, port=1)
    problems = await asyncio.gather(*(links.to("target-5", nowhere) for _ in range(3)), return_exceptions=True)
    assert [type(problem) for problem in problems] == [LinkError] * 3
    assert links.troubles.num_unopened == 1


async def until(condition):
    while not condition():  # noqa: ASYNC110  it happens in a task that nobody has
        await asyncio.sleep(0.01)


async def test_a_link_that_has_closed_is_counted_and_another_is_opened(links, address):
    first = await links.to("target-5", address)
    first._transport.abort()
    await until(lambda: first.is_closed)
    second = await links.to("target-5", address)
    assert second is not first
    assert await replies_of(second, []) == []
    assert links.troubles == LinkTroubles(0, 1)


async def test_who_is_cancelled_while_a_link_is_opened_leaves_it_to_the_others(links, address):
    gone, waiting = (asyncio.create_task(links.to("target-5", address)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await waiting is not None
