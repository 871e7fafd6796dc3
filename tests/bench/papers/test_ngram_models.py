"""The n-gram drafters of the papers' tables, by counts on the fingers."""

from __future__ import annotations

import math

import pytest
import torch

from bench.papers.acceptance import UNSEEN, NgramModel

TOKENS = torch.tensor([0, 1, 0, 1, 1, 0])
"""Three zeros and three ones; a one follows each of the two zeros that something follows, and two zeros three ones."""


def probs(order: int, token_ids: list[int]) -> list[list[float]]:
    logits = NgramModel(TOKENS, 3, order)(input_ids=torch.tensor([token_ids]), use_cache=False).logits
    return logits.exp()[0].tolist()


def test_a_unigram_has_shares_of_the_text_whatever_comes_before():
    for row in probs(1, [0, 2]):
        assert row == [0.5, 0.5, pytest.approx(UNSEEN)]


def test_a_bigram_has_shares_of_what_followed_the_last_token():
    after_0, after_1, after_2 = probs(2, [0, 1, 2])
    assert after_0 == [pytest.approx(UNSEEN), 1.0, pytest.approx(UNSEEN)]
    assert math.isclose(after_1[0], 2 / 3)
    assert math.isclose(after_1[1], 1 / 3)
    assert sum(after_2) < 1e-8  # never seen: nothing is guessed
