"""The way that docs/architecture.md describes is the way that a request takes: no file more, and none less."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests import checkpoints
from tests.docs.way import ROOT, Way, carries_prompt, carries_verdict, follow_one

pytestmark = pytest.mark.thorough

BESIDE = "beside"
BY_READING = {"core/text/token_log.py", "orchestrator/session/output.py"}
"""On a verdict's way: its last rooms take the tokens alone, which no profiler can tell from others."""


def section(title: str) -> str:
    """From the line that begins with `title` to the next table's end."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return text[text.index(f"**{title}") :].split("\n\n**")[0]


def files(cells: list[str]) -> set[str]:
    """Named in code marks; a bare name belongs to the folder that was named before it."""
    found, folder = set(), ""
    for name in re.findall(r"`([\w/]+\.py)`", " ".join(cells)):
        folder = name.rpartition("/")[0] or folder
        found.add(f"{folder}/{name.rpartition('/')[2]}")
    return found


def described(title: str) -> tuple[int, set[str], set[str]]:
    """How many rooms the document counts, which they are, and which files are handed something beside the way."""
    text = section(title)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    rooms, beside = ([row for row in rows if row[0].startswith(BESIDE) is is_beside] for is_beside in (False, True))
    number = re.search(r": (\d+) rooms", text)
    assert number is not None, f"{title} says how many rooms there are"
    return int(number[1]), files([row[1] for row in rooms]), files([row[1] for row in beside])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checkpoints.write("llama", tmp_path_factory.mktemp("way") / "tiny")


@pytest.mark.parametrize(
    ("title", "carries"),
    [("A prompt's ids", carries_prompt), ("A verdict", carries_verdict)],
    ids=["prompt", "verdict"],
)
async def test_the_way_is_the_one_that_is_described(model: Any, title: str, carries: Callable[[Any], bool]):
    number, rooms, beside = described(title)
    way = Way(carries)
    chunks = await follow_one(model, way)
    assert sum(len(chunk.token_ids) for chunk in chunks) > 1
    assert set(way.handed) - rooms - beside == set(), "files that are handed it, and are not described"
    assert (rooms | beside) - set(way.handed) - BY_READING == set(), "files that are described, and are handed nothing"
    assert (number, len(rooms & beside)) == (len(rooms), 0)
