"""Writes the timeline of some streams to a file: Chrome's trace event format, which Perfetto reads, or a picture.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events X, flow events
s and f, metadata events M). Each stream is a process in the file, each of its tracks a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.trace.timeline import Arrow, Party, Slice, SliceKind, Stream, Timeline, Track, timeline

NS_PER_US = 1000
MAX_LANES = 100
"""Largest number of lanes of one party; used only to number threads in the file."""
COLORS = {
    SliceKind.ROUND: "generic_work",
    SliceKind.IDLE: "white",
    SliceKind.CALL: "rail_load",
    SliceKind.WIRE: "grey",
    SliceKind.QUEUE: "yellow",
    SliceKind.COMPUTE: "olive",
    SliceKind.KEPT: "good",
    SliceKind.WASTED: "terrible",
}
"""Names of colours in Chrome's viewer. Perfetto colours by the slice's name instead."""
_PARTIES = list(Party)

Event = Mapping[str, Any]


def write(path: Path, streams: Sequence[Stream]) -> None:
    """Write a picture if the file's name ends with .svg, else a trace. Raises: OSError."""
    shown = timeline(streams)
    if path.suffix == ".svg":
        from deploy.trace import picture  # imports the simulation

        picture.draw(shown, path)
    else:
        path.write_text(json.dumps(chrome_trace(shown), indent=0), encoding="utf-8")


def chrome_trace(shown: Timeline) -> dict[str, Any]:
    """The content of the file. Events are sorted by time; at equal times parents come before their children."""
    slices = sorted(shown.slices, key=lambda piece: (piece.start_ns, piece.track, piece.depth))
    events = [
        *_names(shown),
        *sorted([*map(_complete, slices), *_flows(shown.arrows)], key=lambda event: float(event["ts"])),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"writer": "outrider generate --trace"}}


def _names(shown: Timeline) -> Iterator[Event]:
    for stream, name in enumerate(shown.streams):
        yield _metadata("process_name", stream + 1, 0, {"name": f"stream {stream + 1}: {name}"})
        yield _metadata("process_sort_index", stream + 1, 0, {"sort_index": stream})
    for track in sorted({piece.track for piece in shown.slices}):
        name = track.party.value + (f" ({track.lane + 1})" if track.lane else "")
        yield _metadata("thread_name", *_place(track), {"name": name})
        yield _metadata("thread_sort_index", *_place(track), {"sort_index": _place(track)[1]})


def _metadata(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": name, "args": args}


def _place(track: Track) -> tuple[int, int]:
    """Process id and thread id of a track."""
    return track.stream + 1, 1 + _PARTIES.index(track.party) * MAX_LANES + track.lane


def _complete(piece: Slice) -> Event:
    pid, tid = _place(piece.track)
    return {
        "ph": "X",
        "ts": piece.start_ns / NS_PER_US,
        "dur": (piece.end_ns - piece.start_ns) / NS_PER_US,
        "pid": pid,
        "tid": tid,
        "name": piece.name,
        "cat": piece.kind.value,
        "cname": COLORS[piece.kind],
        "args": dict(piece.facts),
    }


def _flows(arrows: Sequence[Arrow]) -> Iterator[Event]:
    """Two events for each arrow, inside the slices that it joins: an event belongs to the slice around it."""
    for number, arrow in enumerate(arrows, start=1):
        made, used = arrow.made, arrow.used
        yield _flow("s", number, made.track, (made.start_ns + made.end_ns) // 2)
        yield {**_flow("f", number, used.track, used.start_ns), "bp": "e"}


def _flow(phase: str, number: int, track: Track, time_ns: int) -> Event:
    pid, tid = _place(track)
    return {
        "ph": phase,
        "ts": time_ns / NS_PER_US,
        "pid": pid,
        "tid": tid,
        "id": number,
        "name": "block",
        "cat": "flow",
    }
