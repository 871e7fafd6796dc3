"""Many paced streams at once: the service's rate, relative to the rate that the target's passes allow.

The target takes all streams in one pass. The rate falls short of what its passes allow by the time in which it waits
for the orchestrator, partly because all processes share this machine's processors. Knows requests and their runs; must
not know what is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.traffic import AS_SERVED, PLAINLY, Run, request, run
from bench.results import Result, spread
from bench.rounds.ways import PIPELINED, PLAIN, Plan
from core.costs import PassLaw

NUM_STREAMS = 16
NUM_RUNS = 4
"""Number of runs. The first is not counted: the adaptive policy learns from it."""
WAYS = {PLAIN: PLAINLY, PIPELINED: AS_SERVED}


async def together(title: str, stub: Any, plan: Plan, law: PassLaw, temperature: float) -> list[Result]:
    """Tokens per second of all streams together, plain and as served, in turn."""
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(NUM_RUNS):
        for name, way in WAYS.items():
            requests = [
                request(
                    plan.prompts[seed % len(plan.prompts)], plan.max_tokens, temperature=temperature, way=way, seed=seed
                )
                for seed in range(NUM_STREAMS)
            ]
            rates[name].append(rate_of(await asyncio.gather(*(run(stub, each) for each in requests))))
    return _results(title, law, {name: values[1:] for name, values in rates.items()})


def rate_of(runs: Sequence[Run]) -> float:
    """Tokens per second of all streams together, from the first chunk of any to the last.

    The tokens of first chunks do not count, since prefill produces them.
    """
    num_later = sum(len(arrival.token_ids) for each in runs for arrival in each.arrivals[1:])
    began_s = min(each.arrivals[0].at_s for each in runs)
    return num_later / (max(each.arrivals[-1].at_s for each in runs) - began_s)


def _results(title: str, law: PassLaw, rates: Mapping[str, Sequence[float]]) -> list[Result]:
    most = NUM_STREAMS / law(NUM_STREAMS)
    name = f"{title}: {NUM_STREAMS} streams"
    pairs = list(zip(rates[PIPELINED], rates[PLAIN], strict=True))
    return [
        spread(f"{name}, plain", rates[PLAIN], "tokens/s"),
        spread(f"{name}, plain over {NUM_STREAMS}/t_v({NUM_STREAMS})", [rate / most for rate in rates[PLAIN]], "share"),
        spread(f"{name}, as served over plain", [served / plain for served, plain in pairs], "x"),
    ]
