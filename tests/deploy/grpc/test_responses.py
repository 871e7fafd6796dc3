"""What of an output's end reaches its caller."""

from __future__ import annotations

import pytest

from core.records import Chunk, FinishReason, GenerationRequest, Sampling, Usage
from deploy.grpc.responses import to_chunk

REQUEST = GenerationRequest("r", (1,), Sampling(), 8)


@pytest.mark.parametrize("matched", [0, 7, "", "end", None])
def test_what_ended_an_output_is_told_as_what_it_is(matched):
    """Token 0 is a token as any other, and ends outputs of many models."""
    finish = to_chunk(Chunk("", (), (), Usage(1, 1), (), FinishReason.STOP, matched), REQUEST, 0, Usage(1, 1)).finish
    assert finish.HasField("stop_token_id") == isinstance(matched, int)
    assert finish.HasField("stop") == isinstance(matched, str)
    assert matched in (None, finish.stop_token_id if isinstance(matched, int) else finish.stop)
