"""Frames on a stream of bytes: four bytes of length, big endian, then the content.

Knows nothing of the content. A reader takes bytes as they come, in pieces of any size.
"""

from __future__ import annotations

from collections.abc import Iterator

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20
"""Longest frame: a prompt of a million tokens takes 3 MiB, the largest block with q 13 MiB. Longer messages go by actor
calls."""


class LinkError(Exception):
    """The other end sent something wrong; the link is closed, with the reason."""


class FrameTooLong(LinkError):
    """The frame is above the limit."""


def framed(content: bytes, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """`content` as a frame. Raises: FrameTooLong."""
    if len(content) > max_bytes:
        raise FrameTooLong(f"a frame of {len(content)} bytes; at most {max_bytes} are allowed")
    return len(content).to_bytes(HEADER_BYTES, "big") + content


class FrameReader:
    """Finds the frames in what has arrived."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """Longest next frame; less before the handshake has ended."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are complete with `data`, in order. Raises: FrameTooLong, before the frame has arrived."""
        self._rest += data
        while len(self._rest) >= HEADER_BYTES:
            num_bytes = int.from_bytes(self._rest[:HEADER_BYTES], "big")
            if num_bytes > self.max_bytes:
                raise FrameTooLong(f"a frame of {num_bytes} bytes; at most {self.max_bytes} are allowed")
            end = HEADER_BYTES + num_bytes
            if len(self._rest) < end:
                return
            frame = bytes(self._rest[HEADER_BYTES:end])
            del self._rest[:end]
            yield frame

    @property
    def is_between_frames(self) -> bool:
        """Whether a stream may end here: between two frames."""
        return not self._rest
