"""Each source of guesses is told when to use it."""

from __future__ import annotations

import re

from orchestrator.guessers import SOURCES
from tests.docs.pages import DOCS


def test_the_first_table_has_every_source():
    _, _, table = (DOCS / "guessers.md").read_text().partition("| name | what it guesses | when to use it |\n")
    cells = [line.split("|")[1] for line in table.partition("\n\n")[0].splitlines()]
    assert sorted(re.findall(r"`(\w+)`", "".join(cells))) == sorted(SOURCES)
