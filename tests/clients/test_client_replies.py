"""Messages become records that do not change with them."""

from __future__ import annotations

import pytest

from outrider_client import Source
from outrider_client._proto import generation_pb2 as pb
from outrider_client._replies import to_chunk, to_model_info


def test_the_statistics_tell_of_each_source():
    sources = [
        pb.SourceStats(name="draft", drafted_tokens=9, accepted_tokens=4),
        pb.SourceStats(name="prompt_lookup", drafted_tokens=2, accepted_tokens=2, failures=1),
    ]
    stats = pb.SpeculationStats(target_passes=3, drafted_tokens=11, accepted_per_position=[2, 1], sources=sources)
    finish = to_chunk(
        pb.GenerateChunk(finish=pb.Finish(reason=pb.FINISH_REASON_STOP, seed=7, speculation=stats))
    ).finish
    assert finish is not None
    assert finish.speculation is not None
    assert finish.speculation.sources == (Source("draft", 9, 4, 0), Source("prompt_lookup", 2, 2, 1))
    assert (finish.speculation.accepted_per_position, finish.speculation.drafted_tokens) == ((2, 1), 11)


NEWER = 99
"""A number that no enum of this client has."""


@pytest.mark.parametrize("number", [0, NEWER])
def test_a_value_that_this_client_does_not_know_is_unknown_and_the_rest_of_the_reply_stands(number):
    receipt = pb.Receipt(lenience=0.5, verification=number)
    finish = pb.Finish(reason=number, seed=7, receipt=receipt)
    chunk = to_chunk(pb.GenerateChunk(text="a", finish=finish, trace=[pb.CallTrace(call=number, used=2)]))
    assert chunk.finish is not None
    assert chunk.finish.receipt is not None
    assert (chunk.text, chunk.finish.reason, chunk.finish.seed) == ("a", "unknown", 7)
    assert (chunk.finish.receipt["verification"], chunk.finish.receipt["lenience"]) == ("unknown", 0.5)
    assert (chunk.trace[0].call, chunk.trace[0].used) == ("unknown", 2)
    info = to_model_info(pb.GetModelInfoResponse(model="demo", verification=number))
    assert (info.model, info.verification) == ("demo", "unknown")
