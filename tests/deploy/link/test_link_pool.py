"""One link to each engine, whoever asks; what cannot be opened is counted, told once, and tried again later."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from core.records import VerifyRequest
from deploy.link import pool
from deploy.link.address import LinkTroubles
from deploy.link.pool import Links
from deploy.link.server import LinkServer
from tests.deploy.fake_engines import FakeTargetEngine
from workers.engine.thread import EngineLoop


@pytest.fixture
async def address():
    engine = EngineLoop(FakeTargetEngine(5))
    engine.start()
    listener = LinkServer(5, (VerifyRequest,), engine.post)
    yield await listener.start("127.0.0.1", (0, 0))
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


async def test_an_engine_without_an_address_has_no_link_and_that_is_no_failure(links):
    assert await links.to("target-5", None) is None
    assert links.troubles == LinkTroubles()


async def test_a_link_that_cannot_be_opened_is_counted_told_once_and_tried_again(links, address, caplog, monkeypatch):
    nowhere = replace(address, port=1)
    assert await links.to("target-5", nowhere) is None
    assert await links.to("target-5", nowhere) is None, "it is not tried again at once"
    assert links.troubles.num_unopened == 1
    monkeypatch.setattr(pool, "RETRY_S", 0.0)
    assert await links.to("target-5", nowhere) is None, "nobody waits for a later attempt"
    await until(lambda: links.troubles.num_unopened == 2)
    assert len(caplog.messages) == 1
    assert "no link to target-5; calls go through Ray instead" in caplog.text
    assert await links.to("target-5", address) is None
    await until(lambda: bool(links._links))
    assert await links.to("target-5", address) is not None


async def test_between_any_two_attempts_is_a_pause(links, address, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now_s))
    nowhere, num_attempts = replace(address, port=1), []
    for later_s in (0.0, 29.0, 2.0, 29.0, 2.0):
        now_s += later_s
        await links.to("target-5", nowhere)
        await asyncio.gather(*links._opening.values())
        num_attempts.append(links.troubles.num_unopened)
    assert num_attempts == [1, 1, 2, 2, 3]


async def until(condition):
    while not condition():  # noqa: ASYNC110  it happens in a task that nobody has
        await asyncio.sleep(0.01)


async def test_a_link_that_has_closed_is_counted_and_another_is_opened(links, address):
    first = await links.to("target-5", address)
    first._transport.abort()
    await until(lambda: first.is_closed)
    second = await links.to("target-5", address)
    assert second is not first
    assert await second.exchange([]) == []
    assert links.troubles == LinkTroubles(0, 1)


async def test_who_is_cancelled_while_a_link_is_opened_leaves_it_to_the_others(links, address):
    gone, waiting = (asyncio.create_task(links.to("target-5", address)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await waiting is not None
