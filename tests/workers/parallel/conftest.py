"""Fixtures of the tests of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers.parallel.ranks import Followers


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    """One rank beside this process, which no test kills."""
    with Followers(1) as followers:
        yield followers
