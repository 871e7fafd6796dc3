"""Texts are packed so that none sees another, and no token of a prompt counts as guessed."""

from __future__ import annotations

import random

import pytest
import torch

from workers.training.packing import packed, sequences
from workers.training.texts import TrainingText, choose_vocabulary, held_out, trained

LENGTH = 12


class Numbered:
    """States of a row: number of its text, and its position."""

    def __init__(self, texts):
        self._texts = texts

    def of(self, index):
        size = len(self._texts[index].token_ids)
        return torch.stack([torch.full((size,), index), torch.arange(size)], -1).bfloat16()


def text_of(size, first=0):
    return TrainingText([100 * size + each for each in range(size)], [(first, size)])


@pytest.fixture
def texts():
    return [text_of(size, first=2) for size in (5, 7, 3, 9, 12, 4, 20)]


def test_each_text_stands_once_and_whole_beside_its_states(texts):
    found = []
    for one in packed(texts, Numbered(texts), LENGTH, random.Random(1)):
        assert len(one.token_ids) == len(one.states) == len(one.texts) == LENGTH
        for number in range(int(one.texts.max()) + 1):
            rows = (one.texts == number).nonzero().flatten()
            index = int(one.states[rows[0], 0])
            found.append(index)
            assert one.token_ids[rows].tolist() == texts[index].token_ids[:LENGTH]
            assert one.positions[rows].tolist() == one.states[rows, 1].tolist() == list(range(len(rows)))
            assert one.guessed[rows].tolist() == texts[index].guessed()[:LENGTH].tolist()
    assert sorted(found) == list(range(len(texts)))


def test_no_row_sees_another_text_or_a_later_row(texts):
    for one in packed(texts, Numbered(texts), LENGTH):
        seen = one.mask() == 0
        for row in range(LENGTH):
            expected = [other for other in range(row + 1) if one.texts[other] == one.texts[row]]
            assert seen[row].nonzero().flatten().tolist() == expected


def test_no_row_is_taught_a_token_of_another_text_or_padding(texts):
    for one in packed(texts, Numbered(texts), LENGTH):
        for by in (2, 3):
            taught, ahead = one.taught(by), one.ahead(by)
            for row in range(LENGTH):
                later = row + by
                is_same = later < LENGTH and one.texts[row] >= 0 and bool(one.texts[later] == one.texts[row])
                assert bool(taught[row]) == is_same
                assert bool(ahead[row]) == (is_same and bool(one.guessed[later]))


def test_a_sequence_is_filled_with_the_longest_text_that_fits():
    texts = [text_of(size) for size in (6, 3, 4, 5)]
    sizes = [(one.texts >= 0).sum().item() for one in packed(texts, Numbered(texts), LENGTH)]
    assert sizes == [6 + 5, 3 + 4]


def test_sequences_are_what_is_packed_in_the_same_order():
    texts = [text_of(size) for size in (6, 3, 4, 5, 8)]
    chosen = list(sequences(texts, LENGTH, random.Random(3)))
    found = list(packed(texts, None, LENGTH, random.Random(3)))
    assert [sum(len(texts[index].token_ids) for index in each) for each in chosen] == [
        int((one.texts >= 0).sum()) for one in found
    ]
    assert all(one.states.shape == (LENGTH, 0) for one in found)


def test_a_vocabulary_has_the_tokens_that_are_guessed_most():
    texts = [TrainingText([9, 9, 9, 7, 5, 7], [(3, 6)]), TrainingText([7, 5, 3], [(0, 2)])]
    assert choose_vocabulary(texts, 2) == [5, 7]
    assert choose_vocabulary(texts, 4) == [0, 1, 5, 7], "the lowest others fill up"


def test_each_twentieth_text_is_held_out():
    texts = [text_of(3) for _ in range(41)]
    assert [texts.index(each) for each in held_out(texts)] == [0, 0, 0]
    assert len(held_out(texts)) == 3
    assert len(trained(texts)) == 38
