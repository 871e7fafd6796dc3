"""A head whose guesses come later than the next verdict: the adaptive policy finds that it does not pay.

Each message has it begin anew, so none of its guesses lies below the text when it arrives, unless the target waits for
it. A target pass takes 20 ms. A pass of the head takes 15 ms, and a hop to it and back 10 ms; or a pass takes 30 ms.
"""

from __future__ import annotations

from random import Random

import pytest

from core.config import SpeculationConfig
from core.costs.pass_law import PassLaw
from core.records import GenerationRequest, Sampling
from simulation.clock import new_loop
from simulation.engines.hardware import EngineLaw, Hardware, HopLaw
from simulation.engines.texts import SteadyLaw, Text
from simulation.rig import Blueprint, Rig

TARGET_S, HOP_S, NUM_TOKENS = 0.020, 0.010, 200


def passes(head_s):
    """The duration of one stream in passes of the target."""
    hardware = Hardware(
        "by hand",
        EngineLaw(PassLaw.flat(TARGET_S, 10_000)),
        EngineLaw(PassLaw.flat(head_s, 10_000)),
        HopLaw(0.001),
        HopLaw(HOP_S),
    )
    speculation = SpeculationConfig(guessers=("draft",))
    text = Text(SteadyLaw((1.0,), (1.0,), alpha=1.0))
    loop = new_loop()
    rig = Rig(
        Blueprint(hardware, text, speculation=speculation, heads=frozenset({0}), reads_prefix=True), loop, Random(0)
    )
    request = GenerationRequest("r", (1, 2, 3), Sampling(seed=1), NUM_TOKENS, ignore_eos=True)

    async def all_of_it():
        assert [chunk async for chunk in rig.service.generate(request)]
        ends_s = loop.time()
        await rig.service.close()
        return ends_s / TARGET_S

    try:
        return loop.run_until_complete(all_of_it())
    finally:
        loop.close()


@pytest.mark.parametrize("head_s", [0.015, 0.030])
def test_a_late_head_costs_next_to_nothing(head_s):
    assert passes(head_s) < 1.03 * NUM_TOKENS
