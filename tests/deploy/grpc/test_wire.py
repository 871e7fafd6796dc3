"""A message that cannot be decoded is refused with the field's name."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from deploy.grpc.servicer import parse
from protos.outrider.v1 import generation_pb2 as pb

LATIN = "caf\xe9".encode("latin-1")


def fault(data: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(pb.GenerateRequest, data)
    return caught.value


def test_a_message_that_can_be_decoded_is():
    message = pb.GenerateRequest(text="café", resume_token_ids=[1, 2], request_id="x")
    assert parse(pb.GenerateRequest, message.SerializeToString()) == message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(text="CAFE"), "text"),
        (pb.GenerateRequest(text="fine", request_id="CAFE"), "request_id"),
        (pb.GenerateRequest(model="CAFE"), "model"),
        (pb.GenerateRequest(stopping=pb.StoppingParams(stop=["fine", "CAFE"])), "stopping.stop"),
        (pb.GenerateRequest(chat={"messages": [{"role": "u"}, {"content": "CAFE"}]}), "chat.messages.content"),
        (pb.GenerateRequest(speculation=pb.SpeculationParams(policy="CAFE")), "speculation.policy"),
    ],
)
def test_text_that_is_not_utf_8_is_named_by_its_field(message, field):
    error = fault(message.SerializeToString().replace(b"CAFE", LATIN))
    assert error.field == field
    assert error.problem == "must be UTF-8; byte 3 is not"


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\xff\xff\xff", "request"),
        (b"\x12\x7fshort", "request"),
        (b"\x22\x02\x0a\x7f", "chat"),
        (b"\x32\x02\x0d\x00", "sampling"),
    ],
)
def test_a_corrupt_encoding_is_named_by_the_message_that_has_it(data, field):
    assert fault(data).field == field


@given(st.binary(max_size=60))
def test_whatever_comes_is_decoded_or_refused_by_name(data):
    try:
        pb.GenerateRequest.FromString(data)
    except DecodeError:
        error = fault(data)
        assert error.field
        assert "Error" not in str(error)
    else:
        parse(pb.GenerateRequest, data)
