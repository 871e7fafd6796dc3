"""Features of tokens: which part of a text they are of, and whether they are numbers."""

from __future__ import annotations

import numpy as np
import pytest

from core.records import Features

FEATURES = Features(3, 2, bytes(12))
"""Features of the tokens 3, 4 and 5."""


def test_features_that_end_where_they_should():
    assert (FEATURES.num_tokens, FEATURES.end) == (3, 6)
    assert FEATURES.problem(2, 6) is None
    assert FEATURES.since(4) == Features(4, 2, bytes(8))


@pytest.mark.parametrize(
    ("features", "says"),
    [
        (Features(3, 1, bytes(6)), "1 numbers of features a token, not 2"),
        (Features(3, 0, b""), "0 numbers of features a token, not 2"),
        (Features(6, 2, b""), "0 bytes of features are no rows of 2 numbers"),
        (Features(3, 2, bytes(13)), "13 bytes of features are no rows of 2 numbers"),
        (Features(4, 2, bytes(12)), "its features are of the tokens 4 to 7, and should end before 6"),
        (Features(-1, 2, bytes(28)), "its features are of the tokens -1 to 6, and should end before 6"),
    ],
)
def test_what_is_wrong_with_others(features, says):
    assert features.problem(2, 6) == says


@pytest.mark.parametrize(
    ("number", "is_finite"), [(0.0, True), (-3.4e38, True), (1e-40, True), (float("inf"), False), (float("nan"), False)]
)
def test_one_number_that_is_not_finite_is_found(number, is_finite):
    rows = np.zeros(6, np.float32)
    for place in range(len(rows)):
        numbers = rows.copy()
        numbers[place] = number
        as_bfloat16 = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        assert Features(0, 2, as_bfloat16.tobytes()).is_finite == is_finite
