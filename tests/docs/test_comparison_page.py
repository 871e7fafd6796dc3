"""Each row of the comparison names what shows it, or says why not; its figures are those of their own pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|", (DOCS / "comparison.md").read_text(), re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
PATH = re.compile(r"\b(?:tests|workers|protos)/[\w/.]*\w")
MIN_FEATURES = 45


def test_no_number_is_left_out():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) >= MIN_FEATURES


@pytest.mark.parametrize(("feature", "here"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_row_names_what_is_there_or_says_why_not(feature, here):
    named = [DOCS / link for link in LINK.findall(here)] + [DOCS.parent / path for path in PATH.findall(here)]
    assert [str(path) for path in named if not path.exists()] == []
    assert named or here.startswith(("not yet", "refused: ")) or "same page" in here


def test_the_number_of_architectures_is_the_same_on_every_page():
    counts = re.findall(r"^## (Served|Refused|Not tried): (\d+)", (DOCS / "families.md").read_text(), re.MULTILINE)
    served, refused, untried = (number for _, number in counts)
    comparison, readme = (DOCS / "comparison.md").read_text(), (DOCS.parent / "README.md").read_text()
    assert f"{served} served exactly, {refused} refused with the reason, {untried} not tried" in comparison
    assert f"[{served} architectures](docs/families.md) are served exactly, {refused} are refused" in readme
