"""Frames survive whatever pieces the network makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.link.stream import FrameReader, FrameTooLong, framed


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 17))
def test_frames_come_out_whole_however_they_are_cut(contents, piece):
    stream = b"".join(map(framed, contents))
    reader = FrameReader(40)
    pieces = [stream[start : start + piece] for start in range(0, len(stream), piece)]
    assert [frame for each in pieces for frame in reader.feed(each)] == contents
    assert reader.is_between_frames


def test_a_frame_that_has_not_all_come_is_not_given_out():
    reader = FrameReader(40)
    assert list(reader.feed(framed(b"abc")[:-1])) == []
    assert not reader.is_between_frames
    assert list(reader.feed(b"c")) == [b"abc"]


def test_a_long_frame_is_refused_by_its_header_alone():
    reader = FrameReader(3)
    assert list(reader.feed(framed(b"abc"))) == [b"abc"]
    with pytest.raises(FrameTooLong, match="4 bytes; at most 3"):
        list(reader.feed((4).to_bytes(4, "big")))


def test_a_long_frame_is_not_made():
    assert framed(b"abc", 3) == b"\0\0\0\3abc"
    with pytest.raises(FrameTooLong):
        framed(b"abcd", 3)
