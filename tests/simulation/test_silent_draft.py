"""A draft engine that stands still: sessions go on at the pace of plain decoding, and draft again once it answers.

A target pass takes 20 ms, a draft pass 5 ms, a hop there and back 1 ms. Plain decoding makes a token a pass: the target
goes on by itself, so no message lies between two of them.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random
from statistics import median

import pytest

from core.config import SpeculationConfig
from core.costs.pass_law import PassLaw
from core.records import GenerationRequest, Sampling
from simulation.clock import new_loop
from simulation.engines.hardware import EngineLaw, Hardware, HopLaw
from simulation.engines.texts import SteadyLaw, Text
from simulation.rig import Blueprint, Rig

TARGET_S, DRAFT_S, HOP_S = 0.020, 0.005, 0.001
HARDWARE = Hardware(
    "by hand",
    EngineLaw(PassLaw.flat(TARGET_S, 10_000)),
    EngineLaw(PassLaw.flat(DRAFT_S, 10_000)),
    HopLaw(HOP_S),
    HopLaw(HOP_S),
)
TIMEOUT_S = 0.25
STOPPED_S, GOES_ON_S, ENDS_S = 0.4, 2.4, 2.8
LATE_STREAM_S = 1.2
NUM_STREAMS = 2
TEXT = Text(SteadyLaw((1.0,), (1.0,), alpha=1.0))
"""Texts on which a draft is always right."""
SETTLED_S = 0.5
"""Goal for the time until the pace is that of plain decoding."""


class Stop:
    """Streams while the only draft engine stands still, one of which begins meanwhile."""

    def __init__(self, *, num_prompt_tokens=8, other_drafts=(), **speculation):
        self._loop = new_loop()
        self._num_prompt_tokens = num_prompt_tokens
        usual = {"guessers": ("draft",), "max_draft_tokens": 2, "max_block_tokens": 2}
        blueprint = Blueprint(
            HARDWARE,
            TEXT,
            other_drafts=other_drafts,
            speculation=SpeculationConfig(**usual | speculation),
        )
        self._rig = Rig(blueprint, self._loop, Random(0))
        self.chunks = [[] for _ in range(NUM_STREAMS + 1)]
        """By stream, the last of which begins late: when each came, and its number of tokens."""
        try:
            self._loop.run_until_complete(self._all())
        finally:
            self._loop.close()

    async def _all(self):
        begin_s = [0.0] * NUM_STREAMS + [LATE_STREAM_S]
        streams = [asyncio.create_task(self._stream(number, at_s)) for number, at_s in enumerate(begin_s)]
        engine = self._rig.cluster.drafts.replicas[0].engine
        await asyncio.sleep(STOPPED_S)
        engine.freeze()
        await asyncio.sleep(GOES_ON_S - STOPPED_S)
        engine.thaw()
        await asyncio.sleep(ENDS_S - GOES_ON_S)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await self._rig.service.close()

    async def _stream(self, number, begins_s):
        await asyncio.sleep(begins_s)
        prompt = tuple(range(1, 1 + self._num_prompt_tokens))
        request = GenerationRequest(f"stream {number}", prompt, Sampling(seed=number), 5_000, ignore_eos=True)
        async for chunk in self._rig.service.generate(request):
            self.chunks[number].append((self._loop.time(), len(chunk.token_ids)))

    def pace(self, number, since_s, until_s):
        """Tokens in the time of one pass of the target."""
        num_tokens = sum(num for at_s, num in self.chunks[number] if since_s < at_s <= until_s)
        return num_tokens * TARGET_S / (until_s - since_s)

    def gaps_s(self, number, since_s, until_s):
        """Between two chunks each, the later of which came in this time."""
        times = [at_s for at_s, _ in self.chunks[number]]
        return [later - earlier for earlier, later in pairwise(times) if since_s < later <= until_s]


WAYS = {
    "static": {"policy": "static"},
    "adaptive": {},
    "adaptive, with guessers that find nothing": {"guessers": ("draft", "prompt_lookup", "grammar")},
    "in turn": {"policy": "static", "pipelining": False},
}


@pytest.mark.parametrize("num_prompt_tokens", [8, 200])
@pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))
def test_while_a_draft_stands_still_sessions_decode_plainly_and_wait_once(way, num_prompt_tokens):
    stop = Stop(num_prompt_tokens=num_prompt_tokens, **way)
    for number in range(NUM_STREAMS):
        assert stop.pace(number, 0.1, STOPPED_S) > 1.5, "it has drafted"
        assert max(stop.gaps_s(number, STOPPED_S, GOES_ON_S)) < TIMEOUT_S + 2 * TARGET_S
        settled_s = stop.gaps_s(number, STOPPED_S + SETTLED_S, GOES_ON_S)
        assert max(settled_s) < TIMEOUT_S / 2, "it waits once"
        assert median(settled_s) == pytest.approx(TARGET_S), "no message lies between two steps"
        assert stop.pace(number, ENDS_S - 0.2, ENDS_S) > 1.5, "it drafts again"


@pytest.mark.parametrize("num_prompt_tokens", [8, 200])
@pytest.mark.parametrize("way", [{"policy": "static"}, {"policy": "static", "pipelining": False}], ids=str)
def test_a_session_that_begins_meanwhile_waits_for_nothing(way, num_prompt_tokens):
    """Nobody tells it of what the others have found: it has not heard of this draft yet."""
    late_s = Stop(num_prompt_tokens=num_prompt_tokens, **way).gaps_s(NUM_STREAMS, LATE_STREAM_S, GOES_ON_S)
    assert max(late_s) < TIMEOUT_S / 2
    assert median(late_s) == pytest.approx(TARGET_S)


def test_another_draft_goes_on_guessing():
    stop = Stop(other_drafts=(TEXT,))
    for number in range(NUM_STREAMS):
        assert stop.pace(number, STOPPED_S + SETTLED_S, GOES_ON_S) > 1.5
