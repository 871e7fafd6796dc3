"""Draws draft trees, one row a round: the block filled, the accepted path thick, what the verdict prunes grey.

Knows recorded rounds and SVG; nothing of how they came to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from bench.rounds.tree_trace import SeenNode, SeenRound

BLOCK, KEPT, PRUNED, PATH, OWN = "#cfe3f5", "#ffffff", "#f4f4f4", "#2e7d4f", "#c2543c"
INK, GREY = "#222", "#a9adb3"
MOST_NODES = 22
"""Of a row; the likeliest, and whatever the verdict met."""
LINE_PX, GAP_PX, MARGIN_PX = 27, 34, 14
TITLE_PX, LEGEND_PX = 22, 34
CHAR_PX, PAD_PX, HEIGHT_PX = 7.3, 16, 20
COLUMN_GAP_PX = 58
MIN_WIDTH_PX = 960
LONG_BLANK = re.compile(" {3,}")
SHOWN = {ord(" "): "\N{OPEN BOX}", ord("\n"): "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"}


def picture(rounds: Sequence[SeenRound]) -> str:
    """The text of the SVG file."""
    rows = [_Row(number, seen) for number, seen in enumerate(rounds, start=1)]
    width = max([MIN_WIDTH_PX, *(row.width for row in rows)]) + 2 * MARGIN_PX
    tops = [LEGEND_PX + sum(row.height + GAP_PX for row in rows[:index]) for index in range(len(rows) + 1)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {tops[-1]:.0f}" width="{width:.0f}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{width:.0f}" height="{tops[-1]:.0f}" fill="#fff"/>',
        *_legend(),
    ]
    for row, top in zip(rows, tops, strict=False):
        parts += [f'<g class="round" transform="translate({MARGIN_PX} {top:.0f})">', *row.parts(), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = float(MARGIN_PX)
    meanings = (
        (BLOCK, INK, "in the block"),
        (BLOCK, PATH, "accepted"),
        (KEPT, OWN, "the target's own token"),
        (KEPT, INK, "below it: kept"),
        (PRUNED, GREY, "pruned"),
    )
    for fill, stroke, meaning in meanings:
        yield _box(x, 8, 16, 14, fill, stroke, 2 if stroke in (PATH, OWN) else 1)
        yield _text(x + 22, 19, meaning)
        x += 40 + len(meaning) * 6.6
    yield _text(x, 19, "dashed: looked up; numbers: path probability in %", fill="#666")


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

    def parts(self) -> Iterator[str]:
        yield _text(0, 12, self._title, more='font-weight="bold"')
        yield f'<g transform="translate(0 {TITLE_PX})">'
        for node in sorted(self._places, key=lambda node: node in self._met):  # the path over the rest
            yield self._edge(node, self._places[node])
        if self._seen.next_node is None:
            yield _edge(self._end, self._own, OWN, 2.5, "own")
        yield from _node(self._root, "#fff7df", INK, 1.2, "root")
        for node, place in self._places.items():
            yield from self._drawn(node, place)
        if self._seen.next_node is None:
            yield from _node(self._own, KEPT, OWN, 2.2, "own")
        yield "</g>"

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

    def _edge(self, node: int, place: _Place) -> str:
        parent = self._seen.nodes[node].parent
        above = self._root if parent < 0 else self._places[parent]
        if node in self._seen.path:
            return _edge(above, place, PATH, 3.5, "path")
        if node == self._seen.next_node:
            return _edge(above, place, OWN, 2.5, "own")
        return _edge(above, place, INK if node in self._kept else GREY, 1.2, "kept" if node in self._kept else "pruned")

    def _drawn(self, node: int, place: _Place) -> Iterator[str]:
        seen: SeenNode = self._seen.nodes[node]
        fill, stroke, width, kind = PRUNED, GREY, 1.0, "pruned"
        if node in self._seen.path:
            fill, stroke, width, kind = BLOCK, PATH, 2.5, "path"
        elif node == self._seen.next_node:
            fill, stroke, width, kind = KEPT, OWN, 2.2, "own"
        elif node in self._kept:
            fill, stroke, kind = KEPT, INK, "kept"
        is_pruned = kind == "pruned"
        yield from _node(
            place,
            BLOCK if seen.is_in_block else fill,
            stroke,
            width,
            f"{kind} block" if seen.is_in_block else kind,
            ink=GREY if is_pruned else INK,
            dashes="" if seen.is_drafted else ' stroke-dasharray="4 2"',
        )
        yield _text(
            place.x + place.width + 3,
            place.y + 7,
            f"{100 * seen.probability:.0f}",
            fill=GREY if is_pruned else "#666",
            more='font-size="9"',
        )


def _edge(above: _Place, below: _Place, color: str, width: float, kind: str) -> str:
    x, y = above.x + above.width, above.y + HEIGHT_PX / 2
    to_x, to_y = below.x, below.y + HEIGHT_PX / 2
    bend = to_x - COLUMN_GAP_PX / 2
    return (
        f'<path class="edge {kind}" d="M{x:.1f} {y:.1f}H{bend - 10:.1f}C{bend + 4:.1f} {y:.1f} {bend - 4:.1f} '
        f'{to_y:.1f} {bend + 10:.1f} {to_y:.1f}H{to_x:.1f}" fill="none" stroke="{color}" stroke-width="{width}"/>'
    )


def _node(
    place: _Place, fill: str, stroke: str, width: float, kind: str, ink: str = INK, dashes: str = ""
) -> Iterator[str]:
    yield _box(place.x, place.y, place.width, HEIGHT_PX, fill, stroke, width, f' class="node {kind}"{dashes}')
    middle = place.x + place.width / 2
    yield _text(middle, place.y + 14, place.label, "middle", ink, 'font-family="monospace" xml:space="preserve"')


def _box(
    x: float, y: float, width: float, height: float, fill: str, stroke: str, stroke_width: float, more: str = ""
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{stroke_width}"{more}/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = INK, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" {more}>{escape(text)}</text>'


def _label(text: str) -> str:
    """Blanks can be seen."""
    shown = LONG_BLANK.sub(lambda found: f" \N{MULTIPLICATION SIGN}{len(found[0])}", text)
    return shown.translate(SHOWN) or "\N{EMPTY SET}"


def _width(label: str) -> float:
    return len(label) * CHAR_PX + PAD_PX
