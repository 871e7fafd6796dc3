"""Messages become records that do not change with them."""

from __future__ import annotations

from outrider_client import Source
from outrider_client._proto import generation_pb2 as pb
from outrider_client._replies import to_chunk


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
