from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack

import pytest

from core.errors import InvalidRequest, Overloaded
from deploy.api.proxy import admission as proxy_admission
from deploy.api.proxy.admission import (
    LOG_PERIOD_S,
    MAX_OTHER_CALLS,
    MAX_TURN_S,
    MAX_WAITING_BYTES,
    REFRESH_S,
    Places,
    ProxyAdmission,
)

MOST = MAX_WAITING_BYTES + 1


class Orchestrators:
    """Say what they take, as often as they are asked; a fake clock beside."""

    def __init__(self, *places: Places | Exception) -> None:
        self.places = list(places)
        self.num_asked = 0
        self.now_s = 100.0
        self.refused: list[str] = []

    async def ask(self):
        self.num_asked += 1
        for each in self.places:
            if isinstance(each, Exception):
                raise each
        return self.places

    async def admission(self) -> ProxyAdmission:
        """One that has been told already."""
        admission = ProxyAdmission(self.ask, self.refused.append, lambda: self.now_s)
        admission.arrived(is_completion=True)
        await settle()
        return admission


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def completions(admission: ProxyAdmission, num: int, stack: ExitStack) -> None:
    for _ in range(num):
        admission.arrived(is_completion=True)
        stack.enter_context(admission.call(is_completion=True))


async def test_completions_up_to_the_places_of_all_orchestrators_are_let_in_and_not_one_more():
    admission = await Orchestrators(Places(2, 1.0, MOST, "pair"), Places(3, 2.5, MOST, "pair")).admission()
    with ExitStack() as stack:
        completions(admission, 5, stack)
        with pytest.raises(
            Overloaded, match=r"all 5 places, those in the queue included, are taken; try again in 2.5 s"
        ) as caught:
            completions(admission, 1, stack)
        assert caught.value.retry_after_s == 2.5
    with ExitStack() as stack:
        completions(admission, 5, stack)


async def test_other_calls_have_a_bound_of_their_own():
    admission = await Orchestrators(Places(0, 1.0, MOST, "pair")).admission()
    with ExitStack() as stack:
        for _ in range(MAX_OTHER_CALLS):
            stack.enter_context(admission.call(is_completion=False))
        with pytest.raises(Overloaded, match="calls are in progress"):
            stack.enter_context(admission.call(is_completion=False))


async def test_before_anything_is_known_or_when_nobody_answers_the_orchestrators_alone_refuse():
    orchestrators = Orchestrators(Places(0, 1.0, MOST, "pair"))
    admission = ProxyAdmission(orchestrators.ask, now=lambda: orchestrators.now_s)
    with ExitStack() as stack:
        completions(admission, 3, stack)
    await settle()
    orchestrators.places = [RuntimeError("no controller")]
    orchestrators.now_s += REFRESH_S
    with pytest.raises(Overloaded):
        admission.arrived(is_completion=True)
    await settle()
    with ExitStack() as stack:
        completions(admission, 3, stack)


async def test_places_are_asked_for_again_when_what_is_known_is_old_and_not_before():
    orchestrators = Orchestrators(Places(1, 1.0, MOST, "pair"))
    admission = await orchestrators.admission()
    orchestrators.places = [Places(2, 1.0, MOST, "pair")]
    with ExitStack() as stack:
        completions(admission, 1, stack)
        await settle()
        assert orchestrators.num_asked == 1
        orchestrators.now_s += REFRESH_S
        with pytest.raises(Overloaded):
            completions(admission, 1, stack)
        await settle()
        assert orchestrators.num_asked == 2
        completions(admission, 1, stack)


async def test_while_no_orchestrator_answers_those_of_before_count():
    orchestrators = Orchestrators(Places(1, 1.0, MOST, "pair"))
    admission = await orchestrators.admission()
    orchestrators.places = []
    orchestrators.now_s += REFRESH_S
    with ExitStack() as stack:
        completions(admission, 1, stack)
        await settle()
        with pytest.raises(Overloaded, match="all 1 places"):
            completions(admission, 1, stack)


async def test_messages_wait_up_to_a_bound_in_bytes_until_their_calls_are_answered():
    admission = await Orchestrators().admission()
    half = MAX_WAITING_BYTES // 2
    with admission.waiting(half), admission.waiting(half) as answered:
        with pytest.raises(Overloaded, match="too many long requests"), admission.waiting(1):
            pass
        answered()
        answered()
        with admission.waiting(half):
            pass
    with admission.waiting(MAX_WAITING_BYTES + 1):
        pass


async def test_a_message_that_is_answered_piece_by_piece_is_taken_off_once():
    admission = ProxyAdmission(nobody)
    most = proxy_admission.MAX_WAITING_BYTES
    with admission.waiting(most) as answered:
        for _ in range(3):
            answered()
        with admission.waiting(most), pytest.raises(Overloaded), admission.waiting(1):
            pass
    assert admission._waiting_bytes == 0


async def nobody():
    return ()


async def test_refusals_are_one_line_in_the_log_for_a_while(caplog):
    caplog.set_level(logging.WARNING)
    orchestrators = Orchestrators(Places(0, 1.0, MOST, "pair"))
    admission = await orchestrators.admission()
    for _ in range(50):
        with pytest.raises(Overloaded):
            admission.arrived(is_completion=True)
    assert len(caplog.records) == 1
    assert orchestrators.refused == ["pair"] * 50
    orchestrators.now_s += LOG_PERIOD_S
    with pytest.raises(Overloaded):
        admission.arrived(is_completion=True)
    assert [record.getMessage() for record in caplog.records][1].startswith("refused 50 calls")


async def test_a_message_that_is_too_long_for_every_orchestrator_is_refused_by_its_length():
    admission = await Orchestrators(Places(1, 1.0, 1000, "pair"), Places(1, 1.0, 2000, "pair")).admission()
    admission.check_length(2000)
    assert admission.max_bytes == 2000
    with pytest.raises(InvalidRequest, match="at most 2000 bytes long, got 2001"):
        admission.check_length(2001)


async def test_a_place_that_is_gone_when_the_message_has_come_is_not_taken_twice():
    admission = await Orchestrators(Places(1, 1.0, MOST, "pair")).admission()
    admission.arrived(is_completion=True)
    admission.arrived(is_completion=True)
    with admission.call(is_completion=True), pytest.raises(Overloaded), admission.call(is_completion=True):
        pass


async def test_a_call_goes_on_when_nobody_arrives_and_when_it_has_waited_long_enough(monkeypatch):
    monkeypatch.setattr(proxy_admission, "QUIET_S", 0.0)
    orchestrators = Orchestrators(Places(100, 1.0, MOST, "pair"))
    admission = await orchestrators.admission()
    turn = asyncio.ensure_future(admission.turn())
    for _ in range(20):
        admission.arrived(is_completion=True)
        await asyncio.sleep(0)
        assert not turn.done()
    await settle()
    assert turn.done()
    turn = asyncio.ensure_future(admission.turn())
    admission.arrived(is_completion=True)
    await asyncio.sleep(0)
    orchestrators.now_s += MAX_TURN_S
    admission.arrived(is_completion=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert turn.done()
