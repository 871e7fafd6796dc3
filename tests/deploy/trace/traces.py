"""Traced calls with times in milliseconds, and a stream in which everything happens once."""

from __future__ import annotations

from deploy.trace.timeline import Stream
from outrider_client import Call, CallTrace, Chunk, Timing, Usage


def ms(milliseconds: float) -> float:
    return milliseconds / 1e3


def call(
    kind: Call, sent: float, received: float, guesses: int, used: int, waited: float = 0, computed: float | None = None
) -> CallTrace:
    timing = None
    if computed is not None:
        timing = Timing(waited_s=ms(waited), computed_s=ms(computed), passes=1, rows=guesses + 1)
    return CallTrace(call=kind, sent_s=ms(sent), received_s=ms(received), guesses=guesses, used=used, timing=timing)


def prefill(sent: float, received: float, **timing: float) -> CallTrace:
    return call("verify", sent, received, 0, 0, **timing)


def verify(sent: float, received: float, guesses: int, used: int, **timing: float) -> CallTrace:
    return call("verify", sent, received, guesses, used, **timing)


def grew(sent: float, received: float, guesses: int, used: int, **timing: float) -> CallTrace:
    return call("growth", sent, received, guesses, used, **timing)


def block(sent: float, received: float, guesses: int, **timing: float) -> CallTrace:
    return call("block", sent, received, guesses, 0, **timing)


def catch_up(sent: float, received: float, **timing: float) -> CallTrace:
    return call("prefill", sent, received, 0, 0, **timing)


def chunk(text: str, num_tokens: int, *trace: CallTrace) -> Chunk:
    return Chunk(text, (5,) * num_tokens, (True,) * num_tokens, (), Usage(3, num_tokens), None, trace)


STREAM = Stream(
    "def f():",
    1.0,
    [
        chunk("a", 1, catch_up(2, 6, computed=3), prefill(2, 12, waited=1, computed=7)),
        chunk("b c d", 3, block(12, 16, 4, computed=3), verify(16, 26, 4, 2, waited=1, computed=7)),
        chunk("e", 5, grew(16, 24, 30, 4, computed=6), verify(26, 36, 4, 4, waited=0, computed=8)),
        chunk("", 0, grew(26, 34, 30, 0, computed=6)),
        chunk(".", 1, prefill(50, 60, computed=8), block(36, 55, 4, computed=18)),
    ],
)
"""Prefill; a block drafted just in time; growth that hit; some that did not, and a block that came too late."""
