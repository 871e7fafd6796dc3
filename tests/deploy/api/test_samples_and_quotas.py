"""Several samples of one call, of which places or quota would let through a part: they come in together, or none."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from core.config import Limits
from core.errors import Overloaded
from core.records import GenerationRequest, Sampling
from deploy.api.hosted import Hosted
from deploy.api.samples import completed, samples_of
from deploy.metrics import Meters
from orchestrator.admission import Admission
from tests.deploy.grpc.rpc import Recorded, Script, greeting, served


class StillClock:
    def __init__(self):
        self.now_s = 0.0

    def now(self):
        return self.now_s

    async def sleep(self, duration_s):
        await asyncio.get_running_loop().create_future()


class Admitting(Script):
    """Scripted completions behind the admission of an orchestrator."""

    def __init__(self, **limits):
        super().__init__(*greeting())
        self.clock = StillClock()
        self.admission = Admission(Limits(**limits), self.clock)

    @asynccontextmanager
    async def admit(self, requests):
        async with self.admission.places(requests) as places:
            yield [self._one(*each) for each in zip(requests, places, strict=True)]

    async def _one(self, request, place):
        async for chunk in self.generate(request):
            yield chunk
        place.leave(10)


async def call(script, num_samples):
    request = GenerationRequest("r", (1,), Sampling(), 10)
    hosted = Hosted(script, served(), Meters(Recorded(), script.clock.now))
    with hosted.request() as watch:
        return [piece async for piece in completed(hosted, samples_of(request, num_samples), watch)]


async def test_a_call_that_is_refused_takes_no_quota_and_starts_no_sample():
    script = Admitting(max_requests_per_minute=6)
    await call(script, 3)
    for _ in range(3):  # 3 of 6 are left, and 4 are asked for: after 10 s there are 4
        with pytest.raises(Overloaded, match="6 requests a minute") as caught:
            await call(script, 4)
        assert caught.value.retry_after_s == pytest.approx(10.0)
    assert len(script.requests) == 3
    script.clock.now_s += 10.0
    await call(script, 4)


async def test_a_call_for_which_there_are_too_few_places_starts_no_sample():
    script = Admitting(max_sessions=4, max_queued=2)
    async with script.admission.places(samples_of(GenerationRequest("other", (1,), Sampling(), 10), 2)):
        with pytest.raises(Overloaded, match="2 of 4 places are taken and 0 requests wait"):
            await call(script, 3)
        assert script.requests == []
        assert len(await call(script, 2)) == 4
    assert script.admission.num_admitted == 0
