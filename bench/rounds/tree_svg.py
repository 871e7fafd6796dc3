"""Draws draft trees, one row a round: the block filled, the accepted path thick, what the verdict prunes grey.

Knows recorded rounds and canvases; nothing of how they came to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.rounds.tree_trace import SeenRound
from core.canvas import Canvas, number

BLOCK, KEPT, PRUNED, PATH, OWN = "#cfe3f5", "#ffffff", "#f4f4f4", "#2e7d4f", "#c2543c"
INK, GREY, NOTE = "#222", "#a9adb3", "#666"
MOST_NODES = 22
"""Of a row; the likeliest, and whatever the verdict met."""
LINE_PX, GAP_PX, MARGIN_PX = 27, 34, 14
TITLE_PX, LEGEND_PX = 22, 34
CHAR_PX, PAD_PX, HEIGHT_PX, CORNER_PX = 7.3, 16, 20, 4
COLUMN_GAP_PX = 58
MIN_WIDTH_PX = 960
LONG_BLANK = re.compile(" {3,}")
LABEL = {"font_family": "monospace", "xml:space": "preserve"}
SHOWN = {ord(" "): "\N{OPEN BOX}", ord("\n"): "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"}


def picture(rounds: Sequence[SeenRound]) -> str:
    """The text of the SVG file."""
    rows = [_Row(number, seen) for number, seen in enumerate(rounds, start=1)]
    width = max([MIN_WIDTH_PX, *(row.width for row in rows)]) + 2 * MARGIN_PX
    tops = [LEGEND_PX + sum(row.height + GAP_PX for row in rows[:index]) for index in range(len(rows) + 1)]
    canvas = Canvas(width, tops[-1], font_px=12)
    _draw_legend(canvas)
    for row, top in zip(rows, tops, strict=False):
        with canvas.moved(MARGIN_PX, top, class_="round"):
            row.draw(canvas)
    return str(canvas)


def _draw_legend(canvas: Canvas) -> None:
    x = float(MARGIN_PX)
    meanings = (
        (BLOCK, INK, "in the block"),
        (BLOCK, PATH, "accepted"),
        (KEPT, OWN, "the target's own token"),
        (KEPT, INK, "below it: kept"),
        (PRUNED, GREY, "pruned"),
    )
    for fill, stroke, meaning in meanings:
        stroke_px = 2 if stroke in (PATH, OWN) else 1
        canvas.rect(x, 8, 16, 14, rx=CORNER_PX, fill=fill, stroke=stroke, stroke_width=stroke_px)
        canvas.text(x + 22, 19, meaning)
        x += 40 + len(meaning) * 6.6
    canvas.text(x, 19, "dashed: looked up; numbers: path probability in %", fill=NOTE)


@dataclass(frozen=True, slots=True)
class _Style:
    """What a node or the edge to it looks like; the kind is its class in the SVG."""

    kind: str
    fill: str
    stroke: str
    node_px: float = 1.0
    edge_px: float = 1.2
    ink: str = INK


ROOT_STYLE = _Style("root", "#fff7df", INK, node_px=1.2)
PATH_STYLE = _Style("path", BLOCK, PATH, 2.5, 3.5)
OWN_STYLE = _Style("own", KEPT, OWN, 2.2, 2.5)
KEPT_STYLE = _Style("kept", KEPT, INK)
PRUNED_STYLE = _Style("pruned", PRUNED, GREY, ink=GREY)


@dataclass(frozen=True, slots=True)
class _Place:
    """A node of the picture."""

    label: str
    x: float
    y: float
    width: float


class _Row:
    """One round. Its root is at the left; deeper is further right."""

    def __init__(self, number: int, seen: SeenRound) -> None:
        self._number = number
        self._seen = seen
        self._met = {*seen.path, *([] if seen.next_node is None else [seen.next_node])}
        self._shown = self._choose()
        self._children = {-1: list[int]()} | {node: list[int]() for node in self._shown}
        for node in sorted(self._shown, key=lambda node: -seen.nodes[node].probability):
            self._children[seen.nodes[node].parent].append(node)
        self._kept = self._below(seen.next_node) if seen.next_node is not None else set()
        self._root = _Place(_label(seen.root), 0.0, 0.0, _width(_label(seen.root)))
        self._lines = 0
        self._columns = self._column_ends()
        self._places: dict[int, _Place] = {}
        self._place(-1, 0)
        self._own = self._place_own()

    @property
    def width(self) -> float:
        return max([self._root.width, *(place.x + place.width for place in [*self._places.values(), self._own])])

    @property
    def height(self) -> float:
        return TITLE_PX + max(self._lines, 1) * LINE_PX

    def _choose(self) -> list[int]:
        """What the verdict met and the block, then the likeliest with all that is above them."""
        nodes = self._seen.nodes
        wanted = [index for index, node in enumerate(nodes) if node.is_in_block or index in self._met]
        wanted += sorted(range(len(nodes)), key=lambda index: -nodes[index].probability)
        shown: set[int] = set()
        for index in wanted:
            above = [each for each in self._line(index) if each not in shown]
            if len(shown) + len(above) <= MOST_NODES:
                shown.update(above)
        return sorted(shown)

    def _line(self, index: int) -> Iterator[int]:
        """The node, and those above it."""
        while index >= 0:
            yield index
            index = self._seen.nodes[index].parent

    def _below(self, top: int) -> set[int]:
        return {node for node in self._shown if node != top and top in self._line(node)}

    def _column_ends(self) -> list[float]:
        """Where each depth ends, the root's first."""
        widths = [self._root.width]
        for node in self._shown:
            depth = len(list(self._line(node)))
            widths += [0.0] * (depth + 1 - len(widths))
            widths[depth] = max(widths[depth], _width(_label(self._seen.nodes[node].text)))
        return [sum(widths[: index + 1]) + COLUMN_GAP_PX * index for index in range(len(widths))]

    def _place(self, node: int, depth: int) -> float:
        """Give the node, and all below it, a place; returns its height. The likeliest child goes straight on."""
        heights = [self._place(child, depth + 1) for child in self._children[node]]
        if not heights:
            heights = [float(self._lines * LINE_PX)]
            self._lines += 1
        if node >= 0:
            label = _label(self._seen.nodes[node].text)
            self._places[node] = _Place(label, self._columns[depth - 1] + COLUMN_GAP_PX, heights[0], _width(label))
        return heights[0]

    def _place_own(self) -> _Place:
        """The target's own token: a node, or a place of its own behind the path."""
        if self._seen.next_node is not None:
            return self._places[self._seen.next_node]
        label, end = _label(self._seen.next_text), self._end
        depth = len(self._seen.path)
        is_free = not self._children[self._seen.path[-1] if self._seen.path else -1]
        y = end.y if is_free else self._lines * LINE_PX
        self._lines += not is_free
        return _Place(label, self._columns[depth] + COLUMN_GAP_PX, y, _width(label))

    @property
    def _end(self) -> _Place:
        """Where the accepted path ends."""
        return self._places[self._seen.path[-1]] if self._seen.path else self._root

    def draw(self, canvas: Canvas) -> None:
        """The title, then edges, then nodes over them."""
        has_own_place = self._seen.next_node is None
        canvas.text(0, 12, self._title, font_weight="bold")
        with canvas.moved(0, TITLE_PX):
            for node in sorted(self._places, key=lambda node: node in self._met):  # the path over the rest
                _draw_edge(canvas, self._above(node), self._places[node], self._style(node))
            if has_own_place:
                _draw_edge(canvas, self._end, self._own, OWN_STYLE)
            _draw_node(canvas, self._root, ROOT_STYLE)
            for node in self._places:
                self._draw_node(canvas, node)
            if has_own_place:
                _draw_node(canvas, self._own, OWN_STYLE)

    @property
    def _title(self) -> str:
        seen = self._seen
        accepted = "".join(seen.nodes[node].text for node in seen.path)
        what = f"{len(seen.path)} accepted ({_label(accepted)})" if seen.path else "none accepted"
        found = f"A hit: {seen.num_kept}" if seen.num_kept else "A miss: none"
        num_more = seen.num_nodes - len(self._shown)
        more = f" ({num_more} less likely ones are not drawn)" if num_more > 0 else ""
        then = f"then {_label(seen.next_text)}"
        return f"Round {self._number}: {what}, {then}. {found} of {seen.num_nodes} nodes kept{more}"

    def _above(self, node: int) -> _Place:
        parent = self._seen.nodes[node].parent
        return self._root if parent < 0 else self._places[parent]

    def _style(self, node: int) -> _Style:
        if node in self._seen.path:
            return PATH_STYLE
        if node == self._seen.next_node:
            return OWN_STYLE
        return KEPT_STYLE if node in self._kept else PRUNED_STYLE

    def _draw_node(self, canvas: Canvas, node: int) -> None:
        seen, place, style = self._seen.nodes[node], self._places[node], self._style(node)
        note = GREY if style is PRUNED_STYLE else NOTE
        if seen.is_in_block:
            style = replace(style, kind=f"{style.kind} block", fill=BLOCK)
        _draw_node(canvas, place, style, **({} if seen.is_drafted else {"stroke_dasharray": "4 2"}))
        x, y = place.x + place.width + 3, place.y + 7
        canvas.text(x, y, f"{100 * seen.probability:.0f}", fill=note, font_size=9)


def _draw_edge(canvas: Canvas, above: _Place, below: _Place, style: _Style) -> None:
    x, y = above.x + above.width, number(above.y + HEIGHT_PX / 2)
    to_x, to_y = below.x, number(below.y + HEIGHT_PX / 2)
    bend = to_x - COLUMN_GAP_PX / 2
    curve = f"C{number(bend + 4)} {y} {number(bend - 4)} {to_y} {number(bend + 10)} {to_y}"
    steps = f"M{number(x)} {y}H{number(bend - 10)}{curve}H{number(to_x)}"
    canvas.path(steps, class_=f"edge {style.kind}", fill="none", stroke=style.stroke, stroke_width=style.edge_px)


def _draw_node(canvas: Canvas, place: _Place, style: _Style, **more: str) -> None:
    look = {"fill": style.fill, "stroke": style.stroke, "class_": f"node {style.kind}", **more}
    canvas.rect(place.x, place.y, place.width, HEIGHT_PX, rx=CORNER_PX, stroke_width=style.node_px, **look)
    middle = place.x + place.width / 2
    canvas.text(middle, place.y + 14, place.label, "middle", fill=style.ink, **LABEL)


def _label(text: str) -> str:
    """Blanks can be seen."""
    shown = LONG_BLANK.sub(lambda found: f" \N{MULTIPLICATION SIGN}{len(found[0])}", text)
    return shown.translate(SHOWN) or "\N{EMPTY SET}"


def _width(label: str) -> float:
    return len(label) * CHAR_PX + PAD_PX
