"""Waits that a draft's autoscaling hears of when a report fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from core.errors import Unavailable
from deploy.ingress import _Host
from orchestrator.session.statistics import DraftWait


class FakeLeases:
    """Takes every second report."""

    def __init__(self):
        self.taken = []
        self._num_reports = 0
        self.enough = asyncio.Event()

    async def report_wait(self, wait):
        self._num_reports += 1
        if self._num_reports % 2:
            raise Unavailable("no draft takes a report")
        self.taken.append(wait)
        if len(self.taken) == 2:
            self.enough.set()


async def test_while_nobody_has_a_draft_nothing_is_reported():
    """A call to a draft that has been scaled to zero would start it again."""
    num_pauses = 0

    async def sleep(_):
        nonlocal num_pauses
        num_pauses += 1
        await (asyncio.Event().wait() if num_pauses > 5 else asyncio.sleep(0))

    host = _Host.__new__(_Host)
    host._service = SimpleNamespace(draft_wait=DraftWait(10.0, 20.0), num_drafted=0)
    host.leases, host._clock = FakeLeases(), SimpleNamespace(sleep=sleep)
    reporting = asyncio.ensure_future(host._report_waits())
    for _ in range(20):
        await asyncio.sleep(0)
    reporting.cancel()
    assert num_pauses > 5
    assert host.leases._num_reports == 0


async def test_what_could_not_be_reported_is_part_of_the_next_report():
    service = SimpleNamespace(draft_wait=DraftWait(10.0, 20.0), num_drafted=1)

    async def sleep(_):
        await asyncio.sleep(0)
        service.draft_wait = service.draft_wait + DraftWait(1.0, 2.0)

    host = _Host.__new__(_Host)
    host._service, host.leases, host._clock = service, FakeLeases(), SimpleNamespace(sleep=sleep)
    reporting = asyncio.ensure_future(host._report_waits())
    await host.leases.enough.wait()
    reporting.cancel()
    assert host.leases.taken == [DraftWait(2.0, 4.0), DraftWait(2.0, 4.0)]
