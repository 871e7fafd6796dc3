"""A replica's engine loads adapters for leases, and drops them when they are listed no more. Runs without Ray."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.experimental import internal_kv

from core.errors import CheckpointError, WorkerLost
from core.records import Adapter
from deploy.serve.adapters import AdapterList, LoadedAdapters

A, B = Adapter("a", "/a", "sha256:a"), Adapter("b", "/b", "sha256:b")
OF_SETTINGS = Adapter("s", "/s", "sha256:s")


class FakeList:
    def __init__(self, *adapters):
        self.adapters = {each.name: each for each in adapters}

    async def read(self):
        return dict(self.adapters)


class FakeEngine:
    """An engine actor. `failure` is raised by the next load; `busy` adapters cannot be dropped."""

    def __init__(self):
        self.loaded, self.dropped, self.busy, self.failure = [], [], set(), None
        self.load_adapter = SimpleNamespace(remote=self._load)
        self.drop_adapter = SimpleNamespace(remote=self._drop)

    async def _load(self, adapter):
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.loaded.append(adapter.name)
        return Adapter(adapter.name, adapter.path, f"sha256:{adapter.name}")

    async def _drop(self, digest):
        if digest in self.busy:
            return False
        self.dropped.append(digest)
        return True


def incarnation(engine_id="engine 1"):
    return SimpleNamespace(engine_id=engine_id, engine=FakeEngine())


@pytest.fixture
def listed():
    return FakeList(A, B)


@pytest.fixture
def adapters(listed):
    return LoadedAdapters(listed, [OF_SETTINGS.digest])


async def test_the_first_lease_loads_an_adapter_and_others_find_it(adapters):
    current = incarnation()
    async with AsyncExitStack() as leases:
        together = [leases.enter_async_context(adapters.leased(current, each)) for each in (A, A, None, B, OF_SETTINGS)]
        await asyncio.gather(*together)
        await leases.enter_async_context(adapters.leased(current, A))
    assert sorted(current.engine.loaded) == ["a", "b"]


async def test_another_engine_has_to_load_it_again(adapters):
    first, second = incarnation(), incarnation("engine 2")
    for current in (first, first, second):
        async with adapters.leased(current, A):
            pass
    assert (first.engine.loaded, second.engine.loaded) == (["a"], ["a"])


async def test_what_is_unloaded_is_dropped_after_its_last_lease(adapters, listed):
    current = incarnation()
    await adapters.drop_unlisted(current)
    async with adapters.leased(current, A), adapters.leased(current, OF_SETTINGS):
        await adapters.drop_unlisted(current)
        del listed.adapters["a"]
        await adapters.drop_unlisted(current)
        assert current.engine.dropped == []
    await adapters.drop_unlisted(current)
    await adapters.drop_unlisted(current)
    assert current.engine.dropped == [A.digest]
    async with adapters.leased(current, A):
        assert current.engine.loaded == ["a", "a"], "a stream that moves here brings it along"


async def test_what_the_engine_still_uses_is_dropped_later(adapters, listed):
    current = incarnation()
    async with adapters.leased(current, A):
        pass
    listed.adapters.clear()
    current.engine.busy.add(A.digest)
    await adapters.drop_unlisted(current)
    current.engine.busy.clear()
    await adapters.drop_unlisted(current)
    assert current.engine.dropped == [A.digest]


async def test_other_weights_under_the_same_name_replace_the_old_ones(adapters, listed):
    current = incarnation()
    async with adapters.leased(current, A):
        pass
    listed.adapters["a"] = Adapter("a", "/other", "sha256:other")
    await adapters.drop_unlisted(current)
    assert current.engine.dropped == [A.digest]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (RayTaskError("load_adapter", "trace", CheckpointError("adapter 'a' in /a: bad")), CheckpointError),
        (RayTaskError("load_adapter", "trace", RuntimeError("out of memory")), WorkerLost),
        (ActorDiedError(), WorkerLost),
    ],
)
async def test_a_load_that_fails_is_told_and_leaves_nothing(adapters, failure, error):
    current = incarnation()
    current.engine.failure = failure
    with pytest.raises(error):
        async with adapters.leased(current, A):
            pytest.fail("there is nothing to lease")
    current.engine.failure = None
    async with adapters.leased(current, A):
        assert current.engine.loaded == ["a"]


async def test_a_new_adapter_takes_the_place_of_one_that_was_unloaded(adapters, listed):
    current = incarnation()
    async with adapters.leased(current, A):
        pass
    del listed.adapters["a"]
    await adapters.load(current, B)
    assert (current.engine.dropped, current.engine.loaded) == ([A.digest], ["a", "b"])


async def test_a_target_of_other_weights_begins_without_adapters(monkeypatch):
    """In a list that Ray keeps while deployments are replaced."""
    kept = {}
    monkeypatch.setattr(internal_kv, "_internal_kv_put", lambda key, value, **_: kept.update({key: value}))
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, **_: kept[key])
    monkeypatch.setattr(
        internal_kv, "_internal_kv_list", lambda start, **_: [key for key in kept if key.startswith(start)]
    )
    await AdapterList("app", "target", "sha256:one").add(A)
    assert await AdapterList("app", "target", "sha256:one").read() == {"a": A}
    assert await AdapterList("app", "target", "sha256:other").read() == {}


async def test_a_lease_of_a_loaded_adapter_does_not_wait_while_another_is_loaded(adapters):
    current = incarnation()
    await adapters.load(current, A)
    gate = asyncio.Event()
    current.engine.load_adapter.remote = lambda _: gate.wait()
    loading = asyncio.create_task(adapters.load(current, B))
    await asyncio.sleep(0)
    async with asyncio.timeout(5), adapters.leased(current, A), adapters.leased(current, OF_SETTINGS):
        assert not loading.done()
    loading.cancel()


async def test_a_lease_that_comes_while_its_adapter_is_dropped_loads_it_again(adapters, listed):
    current = incarnation()
    await adapters.load(current, A)
    del listed.adapters["a"]
    begun, gate = asyncio.Event(), asyncio.Event()

    async def drop(_digest):
        begun.set()
        await gate.wait()
        return True

    current.engine.drop_adapter.remote = drop
    dropping = asyncio.create_task(adapters.drop_unlisted(current))
    await begun.wait()
    leasing = asyncio.create_task(adapters.load(current, A))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(dropping, leasing)
    assert current.engine.loaded == ["a", "a"]
