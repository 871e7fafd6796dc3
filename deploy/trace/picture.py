"""Draws a timeline for documents, by matplotlib: one line a track, time from left to right.

Colours show the use of time, arrows lead from the draft to the verifications that used its blocks.
"""

from __future__ import annotations

from pathlib import Path

from deploy.trace.timeline import Slice, SliceKind, Timeline, Track
from simulation.report import Axes, drawing

COLORS = {
    SliceKind.ROUND: "#dbe4f0",
    SliceKind.IDLE: "#ffffff",
    SliceKind.CALL: "#eef0f2",
    SliceKind.WIRE: "#c3c8ce",
    SliceKind.QUEUE: "#f2cf63",
    SliceKind.COMPUTE: "#6aa5d8",
    SliceKind.KEPT: "#4c9f70",
    SliceKind.WASTED: "#dd8a78",
}
LEGEND = {
    SliceKind.KEPT: "kept",
    SliceKind.WASTED: "wasted",
    SliceKind.COMPUTE: "catching up",
    SliceKind.QUEUE: "queue",
    SliceKind.WIRE: "wire",
    SliceKind.IDLE: "target idle",
}
EDGE = {"edgecolor": "#888", "linewidth": 0.5}
ROUND_INCHES, MIN_INCHES, MAX_INCHES = 1.0, 6.0, 120.0
TRACK_INCHES, CHAR_INCHES = 0.45, 0.07
NS_PER_MS = 1e6


def draw(shown: Timeline, file: Path) -> None:
    """Draw a picture whose width is in proportion to its number of rounds."""
    tracks = sorted({piece.track for piece in shown.slices}, key=_order)
    num_rounds = sum(piece.kind is SliceKind.ROUND for piece in shown.slices) / max(1, len(shown.streams))
    width = min(max(ROUND_INCHES * num_rounds, MIN_INCHES), MAX_INCHES)
    end_ms = max((piece.end_ns for piece in shown.slices), default=1) / NS_PER_MS
    with drawing(file, 1, 1, (width + 1.5, TRACK_INCHES * len(tracks) + 1.0)) as ((axes,),):
        axes.grid(visible=True, axis="x")
        axes.set(xlim=(0, end_ms), ylim=(max(len(tracks), 1) - 0.5, -0.5), xlabel="ms")
        axes.set_yticks(range(len(tracks)), [_name(shown, track) for track in tracks])
        rows = {track: row for row, track in enumerate(tracks)}
        for piece in shown.slices:  # deeper slices come later, so they are drawn over their parents
            axes.barh(rows[piece.track], _ms(piece), 0.7, piece.start_ns / NS_PER_MS, color=COLORS[piece.kind], **EDGE)
        _write_labels(axes, shown, rows, width / end_ms)
        for made, used in ((arrow.made, arrow.used) for arrow in shown.arrows):
            begin = made.end_ns / NS_PER_MS, rows[made.track] - 0.35
            end = used.start_ns / NS_PER_MS, rows[used.track] + 0.35
            axes.annotate("", end, begin, arrowprops={"arrowstyle": "->", "linewidth": 0.8})
        for kind, meaning in LEGEND.items():
            axes.bar(0, 0, color=COLORS[kind], label=meaning, **EDGE)
        axes.figure.legend(loc="outside upper left", ncols=len(LEGEND), frameon=False)


def _write_labels(axes: Axes, shown: Timeline, rows: dict[Track, int], inches_per_ms: float) -> None:
    """Label the slices that have room for their labels."""
    idle_until_ns = {(each.track, each.start_ns): each.end_ns for each in shown.slices if each.kind is SliceKind.IDLE}
    for piece in shown.slices:
        start_ns = idle_until_ns.get((piece.track, piece.start_ns), piece.start_ns)
        label = _label(piece)
        if label and (len(label) + 1) * CHAR_INCHES <= (piece.end_ns - start_ns) / NS_PER_MS * inches_per_ms:
            middle_ms = (start_ns + piece.end_ns) / 2 / NS_PER_MS
            axes.text(middle_ms, rows[piece.track], label, ha="center", va="center")


def _ms(piece: Slice) -> float:
    return (piece.end_ns - piece.start_ns) / NS_PER_MS


def _order(track: Track) -> tuple[int, int, int]:
    return track.stream, list(type(track.party)).index(track.party), track.lane


def _name(shown: Timeline, track: Track) -> str:
    """The party; above the first track of a stream also the stream's name."""
    party = track.party.value + (f" ({track.lane + 1})" if track.lane else "")
    is_first = _order(track)[1:] == (0, 0)
    return f"{shown.streams[track.stream]}\n{party}" if is_first and len(shown.streams) > 1 else party


def _label(piece: Slice) -> str:
    """Rounds are labelled with their tokens; colours explain the rest."""
    if piece.kind is SliceKind.ROUND:
        return repr(piece.facts["text"])[1:-1] or piece.name
    return piece.name.split()[1] if piece.kind in (SliceKind.KEPT, SliceKind.WASTED) else ""
