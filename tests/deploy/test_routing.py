from __future__ import annotations

import pytest

from deploy.routing import tiers


@pytest.mark.parametrize(
    ("kv_use", "expected"),
    [
        ({}, []),
        ({"a": 0.0}, [["a"]]),
        ({"a": 0.72, "b": 0.11, "c": 0.19}, [["b", "c"], ["a"]]),
        ({"a": 1.0, "b": 0.95, "c": 0.0}, [["c"], ["b"], ["a"]]),
    ],
)
def test_the_emptiest_come_first_and_small_differences_do_not_count(kv_use, expected):
    assert tiers(kv_use) == expected
