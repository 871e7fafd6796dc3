"""Open and closed loops: sends requests, reads their streams, and cancels some of them.

In an open loop each request is sent at its scheduled time, whether or not earlier ones have ended; these times are
decided before the run, so that no response can delay a later request. In a closed loop each caller sends its next
request when its last one has ended. Knows callers and a clock; must not know protocols.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from core.ports import Clock
from deploy.cli.load.callers import CallFailed, LoadCaller
from deploy.cli.load.records import LoadRequest, RequestOutcome, RequestRecord

Arrivals = Literal["poisson", "constant"]


def arrivals_s(num: int, rate_per_s: float, kind: Arrivals, ramp_s: float, seed: int) -> NDArray[np.float64]:
    """The times of `num` requests; the rate rises from 0 to `rate_per_s` within `ramp_s`, and stays there.

    Maps a Poisson process of unit rate, or whole numbers, through the inverse of the expected number of arrivals.
    """
    if kind == "poisson":
        work: NDArray[np.float64] = np.random.default_rng(seed).exponential(size=num).cumsum()
    else:
        work = np.arange(num, dtype=np.float64)
    in_ramp = rate_per_s * ramp_s / 2
    ramped = np.sqrt(2 * work * ramp_s / rate_per_s)
    times: NDArray[np.float64] = np.asarray(
        np.where(work < in_ramp, ramped, ramp_s / 2 + work / rate_per_s), dtype=np.float64
    )
    return times


def starts_s(concurrency: int, ramp_s: float) -> NDArray[np.float64]:
    """The time of the first request of each caller of a closed loop."""
    return np.linspace(0.0, ramp_s, concurrency, endpoint=False, dtype=np.float64)


class Driver:
    """One run. `records` has all requests sent so far, even after an interrupt."""

    def __init__(
        self,
        caller: LoadCaller,
        clock: Clock,
        observer: Callable[[RequestRecord], None],
        *,
        duration_s: float,
        timeout_s: float,
    ) -> None:
        """No request is sent after `duration_s`, or lasts longer than `timeout_s`.

        `observer` is called with a request when it is sent, when a piece arrives, and when it has ended.
        """
        self.records: list[RequestRecord] = []
        self._caller = caller
        self._clock = clock
        self._duration_s = duration_s
        self._timeout_s = timeout_s
        self._notify = observer
        self._began_s = clock.now()

    async def open_loop(self, requests: Iterator[LoadRequest], at_s: Sequence[float]) -> None:
        """Send each request at its time, and wait for the last to end."""
        self._began_s = self._clock.now()
        async with asyncio.TaskGroup() as group:
            for request, intended_s in zip(requests, at_s, strict=True):
                if intended_s > self._duration_s:
                    break
                await self._until(intended_s)
                group.create_task(self._send(request, intended_s))

    async def closed_loop(self, requests: Iterator[LoadRequest], starts_s: Sequence[float]) -> None:
        """Run one caller for each start time, until requests or time run out."""
        self._began_s = self._clock.now()
        async with asyncio.TaskGroup() as group:
            for start_s in starts_s:
                group.create_task(self._one_after_another(requests, start_s))

    async def _one_after_another(self, requests: Iterator[LoadRequest], start_s: float) -> None:
        await self._until(start_s)
        while (now_s := self._now_s()) <= self._duration_s and (request := next(requests, None)) is not None:
            await self._send(request, now_s)

    async def _send(self, request: LoadRequest, intended_s: float) -> None:
        record = RequestRecord(len(self.records), intended_s, self._now_s())
        self.records.append(record)
        self._notify(record)
        try:
            async with asyncio.timeout(self._timeout_s):
                record.outcome = await self._listen(request, record)
        except TimeoutError:
            record.error = "TIMEOUT"
        except CallFailed as failure:
            record.outcome = RequestOutcome.REFUSED if failure.is_refusal else RequestOutcome.FAILED
            record.error = failure.reason
        record.ended_s = self._now_s()
        self._notify(record)

    async def _listen(self, request: LoadRequest, record: RequestRecord) -> RequestOutcome:
        most = request.cancel_after_tokens
        async with aclosing(self._caller.stream(request)) as pieces:
            async for piece in pieces:
                record.observe(self._now_s(), piece)
                self._notify(record)
                is_enough = most is not None and record.output_tokens >= most
                if is_enough and piece.counts is None:
                    return RequestOutcome.CANCELLED
        return RequestOutcome.COMPLETED

    def _now_s(self) -> float:
        return self._clock.now() - self._began_s

    async def _until(self, at_s: float) -> None:
        await self._clock.sleep(max(0.0, at_s - self._now_s()))
