"""Draws a timeline as a picture for documents: one line a track, time from left to right.

Colours show the use of time, arrows lead from the draft to the verifications that used its blocks. Knows timelines and
canvases; nothing of their origin.
"""

from __future__ import annotations

from core.canvas import GRID_COLOR, Canvas, number
from deploy.trace.timeline import Arrow, Slice, SliceKind, Timeline, Track

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
ROUND_PX = 96
MIN_PX, MAX_PX = 480, 12_000
LEFT_PX, RIGHT_PX = 104, 16
TRACK_PX, GAP_PX, STREAM_PX = 26, 12, 22
LEGEND_PX, AXIS_PX = 30, 28
CHAR_PX = 6.2
TICKS_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
TICK_PX = 70
TIP = (
    '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0 0L6 3L0 6z" fill="#333"/></marker></defs>'
)
"""Of arrows."""


def render(shown: Timeline) -> str:
    """The text of the SVG file. Its width follows its rounds; it scales when it is shown narrower."""
    return _Drawing(shown).draw()


class _Drawing:
    """The layout of the picture."""

    def __init__(self, shown: Timeline) -> None:
        self._shown = shown
        self._end_ns = max((piece.end_ns for piece in shown.slices), default=1)
        num_rounds = sum(piece.kind is SliceKind.ROUND for piece in shown.slices) / max(1, len(shown.streams))
        self._scale = min(max(num_rounds * ROUND_PX, MIN_PX), MAX_PX) / self._end_ns
        self._idle_until_ns = {
            (piece.track, piece.start_ns): piece.end_ns for piece in shown.slices if piece.kind is SliceKind.IDLE
        }
        self._tops: dict[Track, float] = {}
        self._titles: list[float] = []
        self._bottom = self._place_tracks()
        self._canvas = Canvas(LEFT_PX + self._end_ns * self._scale + RIGHT_PX, self._bottom + AXIS_PX)

    def draw(self) -> str:
        """The text of the file."""
        self._canvas.raw(TIP)
        self._legend()
        self._axis()
        self._headings()
        for piece in self._shown.slices:
            self._box(piece)
        for piece in self._shown.slices:
            self._label(piece)
        for arrow in self._shown.arrows:
            self._arrow(arrow)
        return str(self._canvas)

    def _place_tracks(self) -> float:
        """Give each track its line; the first free height below them."""
        top: float = LEGEND_PX
        tracks = sorted({piece.track for piece in self._shown.slices}, key=_order)
        for stream in range(len(self._shown.streams)):
            self._titles.append(top + STREAM_PX - 8)
            top += STREAM_PX
            for track in (track for track in tracks if track.stream == stream):
                self._tops[track] = top
                top += TRACK_PX + GAP_PX
        return top

    def _x(self, time_ns: float) -> float:
        return LEFT_PX + time_ns * self._scale

    def _legend(self) -> None:
        x: float = LEFT_PX
        for kind, meaning in LEGEND.items():
            self._canvas.rect(x, 8, 11, 11, fill=COLORS[kind], stroke="#888")
            self._canvas.text(x + 16, 18, meaning)
            x += 28 + len(meaning) * CHAR_PX

    def _axis(self) -> None:
        step_ms = next((tick for tick in TICKS_MS if tick * 1e6 * self._scale >= TICK_PX), TICKS_MS[-1])
        for tick in range(int(self._end_ns / 1e6 / step_ms) + 1):
            x = self._x(tick * step_ms * 1e6)
            self._canvas.path(f"M{number(x)} {LEGEND_PX}V{number(self._bottom)}", stroke=GRID_COLOR)
            self._canvas.text(x, self._bottom + 16, f"{tick * step_ms:g} ms", "middle")

    def _headings(self) -> None:
        for title, name in zip(self._titles, self._shown.streams, strict=True):
            self._canvas.text(8, title, name)
        for track, top in self._tops.items():
            name = track.side.value + (f" ({track.lane + 1})" if track.lane else "")
            self._canvas.text(LEFT_PX - 8, top + TRACK_PX / 2 + 4, name, "end")

    def _box(self, piece: Slice) -> None:
        """A slice; what lies deeper is drawn later, over it."""
        x, width = self._x(piece.start_ns), (piece.end_ns - piece.start_ns) * self._scale
        style = {"class_": piece.kind.value, "fill": COLORS[piece.kind], "stroke": "#888", "stroke_width": "0.5"}
        self._canvas.rect(x, self._tops[piece.track], width, TRACK_PX, _tooltip(piece), **style)

    def _label(self, piece: Slice) -> None:
        """The label of a slice, if there is room for it."""
        start_ns = self._idle_until_ns.get((piece.track, piece.start_ns), piece.start_ns)
        width, label = (piece.end_ns - start_ns) * self._scale, _label(piece)
        if label and (len(label) + 1) * CHAR_PX <= width:
            y = self._tops[piece.track] + TRACK_PX / 2 + 4
            self._canvas.text(self._x(start_ns) + width / 2, y, label, "middle")

    def _arrow(self, arrow: Arrow) -> None:
        """From the end of the draft's call, up to the begin of the target's."""
        begin = f"M{number(self._x(arrow.made.end_ns))} {number(self._tops[arrow.made.track])}"
        end = f"L{number(self._x(arrow.used.start_ns))} {number(self._tops[arrow.used.track] + TRACK_PX)}"
        self._canvas.path(begin + end, class_="arrow", stroke="#333", marker_end="url(#tip)")


def _order(track: Track) -> tuple[int, int, int]:
    return track.stream, list(type(track.side)).index(track.side), track.lane


def _label(piece: Slice) -> str:
    """Rounds are labelled with their tokens; colours explain the rest."""
    if piece.kind is SliceKind.ROUND:
        return repr(piece.facts["text"])[1:-1] or piece.name
    return piece.name.split()[1] if piece.kind in (SliceKind.KEPT, SliceKind.WASTED) else ""


def _tooltip(piece: Slice) -> str:
    facts = [f"{name} {value!r}" for name, value in piece.facts.items()]
    return "; ".join([f"{piece.name}, {(piece.end_ns - piece.start_ns) / 1e6:.2f} ms", *facts])
