"""Where simulated sessions get their places, and what a replica is through its deaths. A hop and back takes 2 s."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from core.config import Limits
from core.errors import Unavailable, WorkerLost
from core.records import Refused, Sampling, SequenceSpec, Stamp, Verdict, VerifyRequest
from core.text.token_log import TokenLog
from simulation.clock import run
from simulation.cluster import Fleet
from simulation.engines.hardware import EngineLaw, HopLaw, PassLaw
from simulation.engines.target import SimTarget
from simulation.engines.texts import SteadyLaw, Text
from simulation.wire import Wire
from tests.exchange import replies_of

HOP_S = 2.0
PASS_S = 5.0


def run_bounded(main):
    """A caller that waits for ever, asking again and again, is no deadlock: it would never end."""

    async def bounded():
        async with asyncio.timeout(1000.0):
            return await main()

    return run(bounded())


def fleet(num_replicas: int = 3) -> Fleet[SimTarget]:
    text, law = Text(SteadyLaw()), EngineLaw(PassLaw.flat(PASS_S, 10_000))
    limits = Limits(lease_timeout_s=10.0, reply_timeout_s=30.0)
    wire = Wire(HopLaw(HOP_S), Random(0))
    return Fleet("target", num_replicas, lambda name, epoch: SimTarget(name, epoch, text, law), wire, limits)


def ignore(_reply: object) -> None:
    """For replies that do not matter."""


def prefill(lease) -> VerifyRequest:
    return VerifyRequest(Stamp(lease.name, lease.epoch, 1), TokenLog().base(0), (5,), spec=SequenceSpec(1, Sampling()))


def num_leases(fleet) -> list[int]:
    return [replica.num_leases for replica in fleet.replicas]


class FakeDraft:
    """Says at once what it is asked, and then that it has ended; remembers in which order it was asked."""

    def __init__(self):
        self.asked = []

    async def exchange(self, batch, take):
        self.asked += batch
        for request in batch:
            take(request)


def test_nothing_overtakes_what_belongs_to_the_same_session():
    """A link keeps the order however much the time of a hop varies. Growth in another order would be no growth."""

    async def main():
        wire, draft, told, ended = Wire(HopLaw(HOP_S, jitter=2.0), Random(1)), FakeDraft(), [], []
        asked = [
            VerifyRequest(Stamp(name, 1, number), TokenLog().base(0), (5,))
            for number in range(20)
            for name in ("one", "other")
        ]

        async def grow(request):
            await wire.grow(draft, request, told.append)
            ended.append(request)

        await asyncio.gather(*map(grow, asked))
        for name in ("one", "other"):
            in_order = [request for request in asked if request.stamp.lease == name]
            for seen in (draft.asked, told, ended):
                assert [request for request in seen if request.stamp.lease == name] == in_order
        assert draft.asked != asked, "sessions wait for nobody else's messages"

    run_bounded(main)


def test_what_travels_when_growth_is_lost_does_not_arrive_any_more():
    """On a link `exchange` has raised by then, and its caller has answered for all of its requests."""

    class DyingDraft(FakeDraft):
        async def exchange(self, batch, take):
            take(batch[0])
            raise WorkerLost("it died")

    async def main():
        wire, taken = Wire(HopLaw(HOP_S), Random(1)), []
        asked = VerifyRequest(Stamp("s", 1, 1), TokenLog().base(0), (5,))
        with pytest.raises(WorkerLost, match="it died"):
            await wire.grow(DyingDraft(), asked, taken.append)
        await asyncio.sleep(10 * HOP_S)
        assert not taken

    run_bounded(main)


class FakeTarget:
    """Answers all that it is asked at the end of the pass that it was asked in."""

    def __init__(self, engine_id):
        self.engine_id = engine_id

    async def exchange(self, batch, take):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(PASS_S - loop.time() % PASS_S)
        for reply in batch:
            take(reply)


def test_the_replies_of_a_step_arrive_together():
    """Whichever calls they answer: on a link they are one frame. Else the first session would go on without others."""

    async def main():
        wire, loop = Wire(HopLaw(HOP_S, jitter=2.0), Random(1)), asyncio.get_running_loop()
        one, other = FakeTarget("one"), FakeTarget("other")

        async def back_s(target, number):
            await asyncio.sleep(number * 1e-3)
            await wire.call(target, [number], ignore)
            return loop.time()

        of_one = await asyncio.gather(*(back_s(one, number) for number in range(8)))
        of_both = await asyncio.gather(back_s(one, 0), back_s(other, 0))
        return of_one, of_both

    of_one, of_both = run_bounded(main)
    assert len(set(of_one)) == 1
    assert len(set(of_both)) == 2, "engines wait for nobody else's frames"


def test_a_session_goes_where_there_are_fewest():
    async def main():
        targets = fleet()
        leases = [await targets.take(f"s{number}") for number in range(5)]
        assert num_leases(targets) == [2, 2, 1]
        for lease in (leases[0], leases[0], leases[3]):
            lease.release()
        assert num_leases(targets) == [0, 2, 1], "a place that is given back twice is given back once"
        assert len(targets.held) == 3
        await targets.take("s5")
        assert num_leases(targets) == [1, 2, 1]
        return asyncio.get_running_loop().time()

    assert run_bounded(main) == 6 * HOP_S


def test_a_dead_replica_gives_no_place_until_another_incarnation_lives():
    async def main():
        targets = fleet(2)
        before = await targets.take("before")
        for replica in targets.replicas:
            replica.engine.kill()
        asyncio.get_running_loop().call_later(7.0, targets.replicas[0].restart)
        after = await targets.take("after")
        assert 7.0 <= asyncio.get_running_loop().time() - HOP_S <= 7.3
        assert num_leases(targets) == [2, 0]
        assert after.epoch > before.epoch
        with pytest.raises(WorkerLost):
            await replies_of(before.port, [prefill(before)])
        assert len(await replies_of(after.port, [prefill(after)])) == 1

    run_bounded(main)


def test_who_gets_no_place_in_time_is_told_so():
    async def main():
        targets = fleet(1)
        targets.replicas[0].engine.kill()
        with pytest.raises(Unavailable, match="target"):
            await targets.take("s")
        assert not targets.held
        return asyncio.get_running_loop().time()

    assert run_bounded(main) == 10.0


def test_a_replica_has_been_busy_in_all_its_incarnations():
    async def main():
        targets = fleet(2)
        for number in range(3):
            lease = await targets.take(f"s{number}")
            await replies_of(lease.port, [prefill(lease)])
            targets.replicas[number % 2].restart()
        assert [replica.busy_s for replica in targets.replicas] == [2 * PASS_S, PASS_S]
        assert targets.busy_s == 3 * PASS_S

    run_bounded(main)


def test_an_engine_that_stands_still_is_lost_to_who_waits_for_it():
    async def main():
        targets = fleet(1)
        lease = await targets.take("s")
        targets.replicas[0].engine.freeze()
        with pytest.raises(WorkerLost, match="30 s"):
            await replies_of(lease.port, [prefill(lease)])
        assert not lease.port.unanswered
        return asyncio.get_running_loop().time()

    assert run_bounded(main) == HOP_S + 30.0


def test_who_waits_for_many_steps_has_lost_no_engine_unless_that_stops_or_never_had_the_message():
    """Twenty passes of 5 s, where 30 s of silence are a loss."""

    async def main():
        targets = fleet(1)
        targets.replicas[0].engine._law = EngineLaw(PassLaw.flat(PASS_S), max_step_tokens=10)
        lease = await targets.take("s")
        long = replace(prefill(lease), suffix=(5,) * 200)
        assert isinstance((await replies_of(lease.port, [long]))[0], Verdict)
        assert asyncio.get_running_loop().time() > 100.0
        for faults in (targets.replicas[0].engine.freeze, lambda: targets.replicas[0].engine._jobs.clear()):
            other = await targets.take("other")
            asyncio.get_running_loop().call_later(60.0, faults)
            asked_s = asyncio.get_running_loop().time()
            with pytest.raises(WorkerLost, match="30 s"):
                await replies_of(other.port, [replace(long, stamp=Stamp(other.name, other.epoch, 1))])
            assert 90.0 - 2 * PASS_S <= asyncio.get_running_loop().time() - asked_s <= 90.0 + PASS_S
            targets.replicas[0].engine.thaw()

    run_bounded(main)


def test_an_engine_that_stands_still_reads_no_message_until_it_goes_on_or_dies():
    """Requests that it would only refuse are not answered either: nobody reads the answers."""

    async def main():
        targets = fleet(2)
        leases = [await targets.take(name) for name in ("goes on", "dies")]
        for replica in targets.replicas:
            replica.engine.freeze()
        of_another_life = [replace(prefill(lease), stamp=Stamp(lease.name, 99, 1)) for lease in leases]
        asked = [
            asyncio.create_task(replies_of(lease.port, [each]))
            for lease, each in zip(leases, of_another_life, strict=True)
        ]
        await asyncio.sleep(2 * HOP_S)
        assert not any(task.done() for task in asked)
        targets.replicas[0].engine.thaw()
        targets.replicas[1].engine.kill()
        (reply,) = await asked[0]
        assert isinstance(reply, Refused)
        with pytest.raises(WorkerLost, match="gone"):
            await asked[1]

    run_bounded(main)


def test_a_session_that_asks_before_it_was_answered_breaks_the_protocol():
    async def main():
        targets = fleet(1)
        one, other = [await targets.take(name) for name in ("one", "other")]
        await asyncio.gather(*(replies_of(lease.port, [prefill(lease)]) for lease in (one, other)))
        assert not targets.breaches
        await asyncio.gather(one.port.exchange([prefill(one)], ignore), one.port.exchange([prefill(one)], ignore))
        assert len(targets.breaches) == 1
        await one.port.exchange([prefill(one), prefill(one)], ignore)
        assert len(targets.breaches) == 2, "and in one batch"

    run_bounded(main)
