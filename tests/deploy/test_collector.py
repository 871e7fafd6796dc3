"""Python's garbage collector in an orchestrator."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from deploy import ingress


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Frozen objects stay so: `tests/conftest.py` has frozen those that tests import."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_what_is_loaded_is_not_looked_at_again_and_cycles_are_still_freed() -> None:
    loaded = [[] for _ in range(1000)]
    ingress._collect_less_often()
    assert gc.get_freeze_count() > len(loaded)
    assert gc.isenabled()
    assert gc.get_threshold()[0] == ingress.YOUNG_OBJECTS
    loaded_and_frozen = gc.get_freeze_count()
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1
    assert len(loaded) < gc.get_freeze_count() <= loaded_and_frozen  # what is let go of leaves
