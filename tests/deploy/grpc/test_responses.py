"""Fields of an output's end that reach its caller."""

from __future__ import annotations

import pytest

from core.records import Chunk, FinishReason, GenerationRequest, Sampling, Usage
from deploy.api import SamplesUsage
from deploy.grpc.responses import to_chunk
from protos.outrider.v1 import generation_pb2 as pb

REQUEST = GenerationRequest("r", (1,), Sampling(), 8)


@pytest.mark.parametrize("matched", [0, 7, "", "end", None])
def test_what_ended_an_output_is_told_as_what_it_is(matched):
    """Token 0 is a token as any other, and ends outputs of many models."""
    finish = to_chunk(Chunk("", (), (), Usage(1, 1), (), FinishReason.STOP, matched), REQUEST, 0, Usage(1, 1)).finish
    assert finish.HasField("stop_token_id") == isinstance(matched, int)
    assert finish.HasField("stop") == isinstance(matched, str)
    assert matched in (None, finish.stop_token_id if isinstance(matched, int) else finish.stop)


def test_what_of_the_prompt_was_cached_is_the_least_of_all_samples():
    """The second finds what the first has computed."""
    usage = SamplesUsage([REQUEST, REQUEST])
    assert usage.observe(1, Chunk("", (), (), Usage(40, 1, 32))).cached_tokens == 32
    total = usage.observe(0, Chunk("", (), (), Usage(40, 1, 16)))
    assert to_chunk(Chunk("", (), (), Usage(40, 1, 16)), REQUEST, 0, total).usage == pb.Usage(
        prompt_tokens=40, completion_tokens=2, cached_tokens=16
    )
