"""Messages go out in the right call and in the right order beside all other work of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from core.records import Base, Stamp, Verdict, VerifyRequest
from orchestrator.dispatch.batcher import Batcher


def request(session: str, number: int = 1) -> VerifyRequest:
    return VerifyRequest(Stamp(session, 1, number), Base(9, 0), (1,))


def verdict(asked: VerifyRequest) -> Verdict:
    return Verdict(asked.stamp, (), 2, 1)


def take_all(take: Callable[[Verdict], None], batch: Sequence[VerifyRequest]) -> None:
    for asked in batch:
        take(verdict(asked))


@pytest.mark.parametrize("is_by_callback", [False, True])
async def test_what_verdicts_lead_to_is_sent_in_one_call_before_anybody_else_is_woken(is_by_callback):
    """A client's task, woken by a verdict, takes a millisecond that the target would wait."""
    happened = []

    async def call(batch, take):
        happened.append([asked.stamp.lease for asked in batch])
        if is_by_callback:
            asyncio.get_running_loop().call_soon(take_all, take, batch)
        for _ in range(1 + 2 * is_by_callback):
            await asyncio.sleep(0)
        if not is_by_callback:
            take_all(take, batch)

    def deliver(asked, _reply):
        if asked.stamp.round == 1:
            asyncio.get_running_loop().call_soon(happened.append, "a client is woken")
            batcher.put(request(asked.stamp.lease, 2))

    batcher = Batcher(call, deliver)
    for session in "abc":
        batcher.put(request(session))
    while len(happened) < 5:  # noqa: ASYNC110  a turn of the loop is what is counted
        await asyncio.sleep(0)
    assert happened == [["a", "b", "c"], ["a", "b", "c"], *["a client is woken"] * 3]
