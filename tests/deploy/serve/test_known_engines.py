"""How full the known engines are, without Ray: who asks often, who is slow, and who has died."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from deploy.serve import known_engines
from deploy.serve.known_engines import KnownEngines


class Engine:
    """An actor handle whose `stats` gives what is told, once `may_answer` is set."""

    def __init__(self, said: object) -> None:
        self.said = said
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.stats = SimpleNamespace(remote=self._stats)

    async def _stats(self) -> object:
        self.num_asked += 1
        await self.may_answer.wait()
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


def knowing(**engines: Engine) -> KnownEngines:
    known = KnownEngines()
    for replica_id, engine in engines.items():
        known.add(replica_id, engine)
    return known


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """For answers that are on their way, however busy the machine is."""
    monkeypatch.setattr(known_engines, "WAIT_S", 30.0)


async def test_each_engine_is_asked_once_in_half_a_second_however_many_ask(monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(known_engines, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    engine = Engine("a little")
    known = knowing(a=engine)
    answers = [await known.stats() for _ in range(5)]
    answers += await asyncio.gather(*(known.stats() for _ in range(5)))
    assert answers == [["a little"]] * 10
    assert engine.num_asked == 1
    engine.said = "more"
    clock.now_s += known_engines.PERIOD_S - 0.01
    assert await known.stats() == ["a little"]
    clock.now_s += 0.02
    assert await known.stats() == ["more"]
    assert engine.num_asked == 2


async def test_an_engine_in_a_long_pass_counts_as_it_was_and_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(known_engines, "PERIOD_S", 0.0)
    slow, quick = Engine("slow"), Engine("quick")
    known = knowing(slow=slow, quick=quick)
    assert sorted(await known.stats()) == ["quick", "slow"]
    monkeypatch.setattr(known_engines, "WAIT_S", 0.05)
    slow.may_answer.clear()
    quick.said = "quicker"
    answers = [sorted(await known.stats()) for _ in range(20)]  # on a busy machine not in the first of these times
    assert answers[-1] == ["quicker", "slow"]
    slow.may_answer.set()


async def test_an_engine_that_died_or_is_to_stop_counts_no_more(monkeypatch):
    monkeypatch.setattr(known_engines, "PERIOD_S", 0.0)
    dead, stopping, other = Engine(ActorDiedError()), Engine("stopping"), Engine("other")
    known = knowing(dead=dead, stopping=stopping, other=other)
    assert sorted(await known.stats()) == ["other", "stopping"]
    known.drop({"stopping", "unknown"})
    assert await known.stats() == ["other"]
    assert dead.num_asked == 1
    known.add("dead", Engine("its successor"))
    assert sorted(await known.stats()) == ["its successor", "other"]
