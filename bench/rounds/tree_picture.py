"""Draws draft trees, one per round: blocks are filled, accepted paths are thick, pruned nodes are grey.

Knows recorded rounds; must not know how they were recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rounds.tree_trace import SeenRound
from simulation.report import Axes, drawing

MOST_NODES = 22
"""Largest number of nodes drawn per round: the verdict's path, the block, and the likeliest others."""
ROOT = -1
GAP_CHARS, MIN_CHARS, LEGEND_LINES = 8.0, 110.0, 3
CHAR_INCHES, LINE_INCHES = 0.072, 0.26
BLOCK = "#cfe3f5"
LONG_BLANK = re.compile(" {3,}")
SHOWN = {ord(" "): "\N{OPEN BOX}", ord("\n"): "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"}


@dataclass(frozen=True, slots=True)
class _Style:
    """How a node and the edge to it are drawn."""

    color: str
    width: float
    meaning: str


STYLES = {
    "path": _Style("#2e7d4f", 2.0, "accepted"),
    "own": _Style("#c2543c", 1.8, "the target's own token"),
    "kept": _Style("#222222", 0.9, "below it: kept"),
    "pruned": _Style("#a9adb3", 0.9, "pruned"),
}
LEGEND = "blue: in the block; dashed: looked up; numbers: path probability in %"


def draw(rounds: Sequence[SeenRound], file: Path) -> None:
    """Draw all rounds, one below the other."""
    rows = [DrawnRound(number, seen) for number, seen in enumerate(rounds, start=1)]
    width = max([MIN_CHARS, *(row.width for row in rows)])
    heights = [row.num_lines + 2 for row in rows]
    inches = (CHAR_INCHES * width, LINE_INCHES * (sum(heights) + LEGEND_LINES))
    with drawing(file, len(rows), 1, inches, height_ratios=heights) as lines:
        for row, (axes,) in zip(rows, lines, strict=True):
            axes.set(xlim=(0, width), ylim=(row.num_lines - 0.5, -0.5))
            axes.set_axis_off()
            row.draw(axes)
        for style in STYLES.values():
            lines[0][0].plot([], [], color=style.color, linewidth=style.width, label=style.meaning)
        lines[0][0].figure.legend(loc="outside lower left", ncols=len(STYLES), frameon=False, title=LEGEND)


class DrawnRound:
    """One round. The root is at the left, deeper nodes are further right; positions are in characters and lines."""

    def __init__(self, number: int, seen: SeenRound) -> None:
        self._number = number
        self._seen = seen
        self.shown = self._choose()
        self._below: dict[int, list[int]] = {node: [] for node in (ROOT, *self.shown)}
        for node in sorted(self.shown, key=lambda node: -seen.nodes[node].probability):
            self._below[seen.nodes[node].parent].append(node)
        self.num_lines = 0
        self._columns = self._starts()
        self.places: dict[int, tuple[float, float]] = {}
        self._place(ROOT, 0)
        self.own_place = self._place_own() if seen.next_node is None else None

    @property
    def width(self) -> float:
        """Width in characters, with room for a next token that is not in the tree."""
        return self._columns[-1] + 2 * GAP_CHARS

    @property
    def title(self) -> str:
        seen = self._seen
        accepted = "".join(seen.nodes[node].text for node in seen.path)
        what = f"{len(seen.path)} accepted ({_label(accepted)})" if seen.path else "none accepted"
        found = f"A hit: {seen.num_kept}" if seen.num_kept else "A miss: none"
        num_more = seen.num_nodes - len(self.shown)
        more = f" ({num_more} less likely ones are not drawn)" if num_more > 0 else ""
        then = f"then {_label(seen.next_text)}"
        return f"Round {self._number}: {what}, {then}. {found} of {seen.num_nodes} nodes kept{more}"

    def style_of(self, node: int) -> str:
        """Name of the node's style in STYLES."""
        if node in self._seen.path:
            return "path"
        if node == self._seen.next_node:
            return "own"
        return "kept" if self._seen.next_node in [*self._line(node)] else "pruned"

    def _choose(self) -> list[int]:
        """Choose the verdict's path and the block, then the likeliest nodes with their ancestors."""
        nodes, met = self._seen.nodes, {*self._seen.path, self._seen.next_node}
        wanted = [index for index, node in enumerate(nodes) if node.is_in_block or index in met]
        wanted += sorted(range(len(nodes)), key=lambda index: -nodes[index].probability)
        shown: set[int] = set()
        for index in wanted:
            line = {*self._line(index)}
            if len(shown | line) <= MOST_NODES:
                shown |= line
        return sorted(shown)

    def _line(self, index: int) -> Iterator[int]:
        """The node and its ancestors."""
        while index > ROOT:
            yield index
            index = self._seen.nodes[index].parent

    def _starts(self) -> list[float]:
        """Columns at which the labels of each depth begin, and one more after the last depth."""
        widths = [len(_label(self._seen.root))]
        for node in self.shown:
            depth = len([*self._line(node)])
            widths += [0] * (depth + 1 - len(widths))
            widths[depth] = max(widths[depth], len(_label(self._seen.nodes[node].text)))
        return [sum(widths[:depth]) + GAP_CHARS * depth + 1 for depth in range(len(widths) + 1)]

    def _place(self, node: int, depth: int) -> float:
        """Place the node and all nodes below it. Return its line, which is that of its likeliest child."""
        lines = [self._place(child, depth + 1) for child in self._below[node]]
        if not lines:
            lines = [float(self.num_lines)]
            self.num_lines += 1
        self.places[node] = self._columns[depth], lines[0]
        return lines[0]

    def _place_own(self) -> tuple[float, float]:
        """Position of a next token that is not in the tree: after the path, on a new line unless the path ends its
        line."""
        line = self.places[self._end][1]
        if self._below[self._end]:
            line, self.num_lines = float(self.num_lines), self.num_lines + 1
        return self._columns[len(self._seen.path) + 1], line

    @property
    def _end(self) -> int:
        """Last node of the accepted path, or the root."""
        return self._seen.path[-1] if self._seen.path else ROOT

    def draw(self, axes: Axes) -> None:
        """Draw edges and nodes, the path last."""
        seen = self._seen
        axes.set_title(self.title, loc="left", fontweight="bold", fontsize=8)
        _draw_node(axes, self.places[ROOT], seen.root, "kept")
        for node in sorted(self.shown, key=lambda node: node in seen.path):
            at, kind = seen.nodes[node], self.style_of(node)
            self._draw_edge(axes, at.parent, self.places[node], kind)
            _draw_node(
                axes, self.places[node], at.text, kind, is_in_block=at.is_in_block, is_drafted=at.is_drafted,
                note=f"{100 * at.probability:.0f}",
            )  # fmt: skip
        if self.own_place is not None:
            self._draw_edge(axes, self._end, self.own_place, "own")
            _draw_node(axes, self.own_place, seen.next_text, "own")

    def _draw_edge(self, axes: Axes, above: int, place: tuple[float, float], kind: str) -> None:
        x, y = self.places[above]
        label = _label(self._seen.root if above == ROOT else self._seen.nodes[above].text)
        begin, bend = x + len(label) + 1, place[0] - GAP_CHARS / 2
        style = STYLES[kind]
        axes.plot([begin, bend, place[0] - 1], [y, place[1], place[1]], color=style.color, linewidth=style.width)


def _draw_node(
    axes: Axes, place: tuple[float, float], text: str, kind: str, *, is_in_block: bool = False, is_drafted: bool = True,
    note: str = "",
) -> None:  # fmt: skip
    style, label = STYLES[kind], _label(text)
    look = {"edgecolor": style.color, "linewidth": style.width, "facecolor": BLOCK if is_in_block else "white"}
    box = {"boxstyle": "round,pad=0.25", "linestyle": "-" if is_drafted else "--", **look}
    ink = style.color if kind == "pruned" else "#222222"
    axes.text(*place, label, family="monospace", va="center", color=ink, bbox=box)
    axes.text(place[0] + len(label) + 1, place[1] + 0.1, note, fontsize=6, va="top", color=ink)


def _label(text: str) -> str:
    """Make blanks visible."""
    shown = LONG_BLANK.sub(lambda found: f" \N{MULTIPLICATION SIGN}{len(found[0])}", text)
    return shown.translate(SHOWN) or "\N{EMPTY SET}"
