"""Many streams at once: tokens a second by the clock of all of them."""

from __future__ import annotations

import pytest

from bench.harness.traffic import Arrival, Run
from bench.rounds.together import NUM_STREAMS, _results, rate_of
from bench.rounds.ways import PIPELINED, PLAIN
from core.costs.pass_law import PassLaw
from protos.outrider.v1 import generation_pb2 as pb


def stream(*times_s):
    return Run(0.0, tuple(Arrival(at_s, (1, 2), 0) for at_s in times_s), (), pb.SpeculationStats())


def test_all_tokens_but_those_of_prefill_count_from_the_first_chunk_of_any_to_the_last():
    assert rate_of([stream(1.0, 2.0, 3.0), stream(1.5, 5.0)]) == pytest.approx((4 + 2) / (5.0 - 1.0))


def test_plain_streams_are_compared_with_the_passes_alone_and_others_with_the_plain_ones_beside_them():
    law = PassLaw(((1, 0.005), (NUM_STREAMS, 0.008)))  # 2,000 tokens/s at most
    rates = {PLAIN: [1000.0, 1500.0, 1200.0], PIPELINED: [1100.0, 1500.0, 2400.0]}
    plain, share, over = _results("t", law, rates)
    assert plain.value == 1200.0
    assert share.value == pytest.approx(0.6)
    assert over.value == pytest.approx(1.1)
