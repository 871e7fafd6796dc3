"""An SVG picture, shape after shape: what every picture of this project is drawn on.

Knows SVG alone. The same calls give the same text, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape

GRID_COLOR = "#e4e4e4"
Value = str | float


class Canvas:
    """A white sheet, measured in pixels. Later shapes lie over earlier ones; `str` of it is the text of the file.

    Further attributes of a shape are keyword arguments, with `_` for SVG's `-` (`stroke_width=2`, `class_="arrow"`).
    """

    def __init__(self, width: float, height: float, font_px: float = 11) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'font-family="sans-serif" font-size="{number(font_px)}" fill="#222">'
        ]
        self.rect(0, 0, width, height, fill="#fff")

    def __str__(self) -> str:
        return "\n".join([*self._lines, "</svg>"]) + "\n"

    def raw(self, line: str) -> None:
        """One line of SVG, unchanged."""
        self._lines.append(line)

    def rect(self, x: float, y: float, width: float, height: float, title: str = "", **attributes: Value) -> None:
        """`title` is shown where the pointer rests on the shape."""
        self._add("rect", _title(title), x=x, y=y, width=width, height=height, **attributes)

    def circle(self, x: float, y: float, radius: float, title: str = "", **attributes: Value) -> None:
        self._add("circle", _title(title), cx=x, cy=y, r=radius, **attributes)

    def path(self, steps: str, **attributes: Value) -> None:
        """`steps` are those of SVG's `d`, such as `line` gives."""
        self._add("path", "", d=steps, **attributes)

    def text(self, x: float, y: float, text: str, anchor: str = "start", **attributes: Value) -> None:
        """`anchor`: what of the text is at x: its start, middle or end."""
        self._add("text", escape(text), x=x, y=y, text_anchor=anchor, **attributes)

    def grid_line(self, y: float, width: float, label: str) -> None:
        """A horizontal line of a plot whose axis is at x = 0, labelled to the left of it."""
        self.path(f"M0 {number(y)}H{number(width)}", stroke=GRID_COLOR)
        self.text(-6, y + 4, label, "end")

    @contextmanager
    def moved(self, x: float, y: float, **attributes: Value) -> Iterator[None]:
        """Shapes drawn inside the context have their origin at (x, y)."""
        self.raw(f'<g transform="translate({number(x)} {number(y)})"{_written(attributes)}>')
        yield
        self.raw("</g>")

    def _add(self, tag: str, content: str, **attributes: Value) -> None:
        written = _written(attributes)
        self.raw(f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>")


def number(value: float) -> str:
    """As text, to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _written(attributes: Mapping[str, Value]) -> str:
    return "".join(f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"' for name, value in attributes.items())


def _value(value: Value) -> str:
    return escape(value) if isinstance(value, str) else number(value)


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
