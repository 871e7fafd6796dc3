"""Whoever chooses a rule of verification finds it where they look."""

from __future__ import annotations

import pytest

from core.rules import Verification
from tests.docs.pages import DOCS

PLACES = {"exactness.md": "`{}`", "http.md": "`{}`", "../core/config/speculation.py": '"{}"'}


@pytest.mark.parametrize(("page", "mark"), PLACES.items())
def test_every_rule_is_named(page, mark):
    text = (DOCS / page).read_text()
    assert not [each for each in Verification if mark.format(each) not in text]
