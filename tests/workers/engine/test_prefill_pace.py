"""A long prompt takes what the others can spare, on each kind of device."""

from __future__ import annotations

import pytest

from core.config import MIN_CHUNK_TOKENS
from workers.engine.scheduler import PrefillPace


def seen(law, stretch=2.0, max_rows=256):
    """A pace that has seen passes of many widths, as a warm-up shows them."""
    pace = PrefillPace(stretch, max_rows)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        for _ in range(3):
            pace.observe(rows, law(rows))
    return pace


@pytest.mark.parametrize(
    ("law", "num_decoding", "expected"),
    [
        (lambda rows: 0.02 + 0.00001 * rows, 1, 256),  # a GPU
        (lambda rows: 0.02 + 0.001 * rows, 4, 16),
        (lambda rows: 0.02 + 0.001 * rows, 64, 64),
        (lambda rows: 0.01 * rows, 1, MIN_CHUNK_TOKENS),  # nothing can be spared
        (lambda rows: 0.1 * -(-rows // 8), 8, 8),  # tiles of eight rows
    ],
)
def test_a_step_takes_at_most_so_many_times_as_long(law, num_decoding, expected):
    assert seen(law).chunk_rows(num_decoding) == expected


def test_more_stretch_makes_larger_chunks():
    law = lambda rows: 0.02 + 0.001 * rows  # noqa: E731
    assert [seen(law, stretch).chunk_rows(4) for stretch in (1.1, 2.0, 4.0, 100.0)] == [8, 16, 64, 256]


@pytest.mark.parametrize("max_rows", [1, 5, 8, 9, 100])
def test_a_bound_is_kept_and_something_is_always_done(max_rows):
    assert 1 <= seen(lambda rows: 0.01 * rows, max_rows=max_rows).chunk_rows(1) <= max_rows
    assert PrefillPace(2.0, max_rows).chunk_rows(1) == max_rows, "hopeful before anything was seen"
