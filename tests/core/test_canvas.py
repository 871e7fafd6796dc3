from __future__ import annotations

from xml.etree import ElementTree

import pytest

from core.canvas import Canvas, number

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("value", "written"), [(2, "2"), (2.5, "2.5"), (1 / 3, "0.33"), (100.0, "100"), (0.004, "0")])
def test_numbers_are_as_short_as_a_hundredth_of_a_pixel_allows(value, written):
    assert number(value) == written


def drawn() -> str:
    canvas = Canvas(200, 100)
    with canvas.moved(10, 20.5):
        canvas.rect(1, 2, 3, 4, 'a "title" & <more>', fill="#fff", class_="box")
        canvas.text(5, 6, "a < b & c", "end", font_weight="bold")
    canvas.path("M0 0L1 1", stroke_width=2)
    canvas.circle(1, 2, 3)
    canvas.grid_line(50, 180, "7")
    return str(canvas)


def test_every_shape_is_where_it_was_drawn_with_its_attributes():
    root = ElementTree.fromstring(drawn())
    assert root.get("viewBox") == "0 0 200 100"
    group = root.find(f"{SVG}g")
    box, text = list(group)
    assert group.get("transform") == "translate(10 20.5)"
    assert (box.get("class"), box.get("x"), box.find(f"{SVG}title").text) == ("box", "1", 'a "title" & <more>')
    assert (text.text, text.get("text-anchor"), text.get("font-weight")) == ("a < b & c", "end", "bold")
    assert [path.get("stroke-width") for path in root.iter(f"{SVG}path")] == ["2", None]
    assert root.findall(f"{SVG}text")[0].text == "7"


def test_the_same_calls_give_the_same_text():
    assert drawn() == drawn()
