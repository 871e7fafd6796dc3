"""The pace of a stream while its draft is stopped for half a minute, and how soon the draft is used again.

Prompts are completed one after the other without a pause, and each token's arrival is recorded. The pace of plain
decoding is measured in the same way just before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from bench.harness.traffic import AS_SERVED, PLAINLY, Arrival, Way, request, run
from bench.harness.victims import engine_pid, stopped
from bench.results import Result, at_least, at_most

MAX_TOKENS = 512
PLAIN_S = 10.0
LEAD_S = 5.0
WINDOW_S = 1.0
"""Length of the windows in which the pace is counted, in seconds."""
SAME_PACE = 0.9
"""Share of the plain pace that counts as equal: windows of one second vary by this much."""
SETTLE_GOAL_S = 0.5
RETURN_GOAL_S = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Arrivals of consecutive streams, joined to one."""

    arrivals: Sequence[Arrival]

    def rate(self, start_s: float, end_s: float) -> float:
        """Tokens per second between the two times."""
        num_tokens = sum(len(each.token_ids) for each in self.arrivals if start_s < each.at_s <= end_s)
        return num_tokens / (end_s - start_s)

    def settled_s(self, start_s: float, end_s: float, rate: float) -> float:
        """Seconds from `start_s` until a window with at least `rate` begins; `end_s - start_s` if none does."""
        begins = [start_s, *(each.at_s for each in self.arrivals if start_s < each.at_s <= end_s - WINDOW_S)]
        return next((at_s - start_s for at_s in begins if self.rate(at_s, at_s + WINDOW_S) >= rate), end_s - start_s)

    def drafted_s(self, start_s: float) -> float | None:
        """Seconds from `start_s` until a chunk with accepted guesses arrives, or None."""
        return next((each.at_s - start_s for each in self.arrivals if each.at_s > start_s and each.num_guessed), None)


async def measure_freeze(stub: Any, prompts: Sequence[str], stop_s: float) -> list[Result]:
    """Stop the draft's process for `stop_s` seconds while streams run."""
    plain_arrivals: list[Arrival] = []
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        load = group.create_task(_stream_on(stub, prompts, PLAINLY, plain_arrivals))
        await asyncio.sleep(PLAIN_S)
        load.cancel()
    plain = Pace(plain_arrivals).rate(began_s + WINDOW_S, began_s + PLAIN_S)

    arrivals: list[Arrival] = []
    pid = await engine_pid("draft")
    async with asyncio.TaskGroup() as group:
        load = group.create_task(_stream_on(stub, prompts, AS_SERVED, arrivals))
        await asyncio.sleep(LEAD_S)
        with stopped(pid):
            stopped_s = time.monotonic()
            await asyncio.sleep(stop_s)
        continued_s = time.monotonic()
        await asyncio.sleep(2 * RETURN_GOAL_S)
        load.cancel()
    return _results(Pace(arrivals), plain, stopped_s, continued_s)


async def _stream_on(stub: Any, prompts: Sequence[str], way: Way, arrivals: list[Arrival]) -> None:
    """Complete prompts one after the other until cancelled. A failed stream ends the benchmark."""
    for seed, prompt in enumerate(cycle(prompts)):
        message = request(prompt, MAX_TOKENS, temperature=0.8, way=way, seed=seed)
        await run(stub, message, show=arrivals.append)


def _results(pace: Pace, plain: float, stopped_s: float, continued_s: float) -> list[Result]:
    title = f"draft stopped for {continued_s - stopped_s:.0f} s"
    settings = {"plain_tokens_per_s": round(plain, 1)}
    settled_s = pace.settled_s(stopped_s, continued_s, SAME_PACE * plain)
    share = pace.rate(stopped_s + SETTLE_GOAL_S, continued_s) / plain
    drafted_s = pace.drafted_s(continued_s)
    return [
        at_most(
            SETTLE_GOAL_S, Result(f"{title}: plain pace reached after", round(settled_s, 3), "s", settings=settings)
        ),
        at_least(SAME_PACE, Result(f"{title}: pace from then on, over plain", round(share, 3), "x")),
        Result(
            f"{title}: pace before, over plain", round(pace.rate(stopped_s - LEAD_S + 1, stopped_s) / plain, 3), "x"
        ),
        at_most(
            RETURN_GOAL_S,
            Result(f"{title}: drafting again after", float("inf") if drafted_s is None else round(drafted_s, 3), "s"),
        ),
    ]
