"""Figures of a head's card, from ranks written by hand and from noise that must give the text."""

from __future__ import annotations

import pytest
import torch

from workers.training.head.acceptance import MAX_RANK, _noise, best_tree, measured
from workers.training.head.teaching import Teacher
from workers.training.packing import PackedTexts

WRONG = MAX_RANK


def packed_of(token_ids, spans, states):
    guessed = torch.zeros(len(token_ids), dtype=torch.bool)
    for first, end in spans:
        guessed[first:end] = True
    size = len(token_ids)
    return PackedTexts(
        states, torch.tensor(token_ids), guessed, torch.zeros(size, dtype=torch.long), torch.arange(size)
    )


def test_figures_by_hand():
    # Tokens 3 to 8 are the answer. A round may start in rows 2 to 6: token 3 is the target's own.
    one = packed_of(list(range(9)), [(3, 9)], torch.zeros(9, 1))
    ranks = torch.full((9, 2), WRONG)
    ranks[2] = torch.tensor([0, 0])  # tokens 4 and 5
    ranks[3] = torch.tensor([0, 1])
    ranks[4] = torch.tensor([WRONG, 0])
    ranks[5] = torch.tensor([1, WRONG])  # token 7
    ranks[6] = torch.tensor([0, WRONG])  # token 8, the last
    found = measured([(one, ranks)], 2)
    assert found.num_tokens == 5
    assert found.by_depth == pytest.approx([3 / 5, 1 / 3])
    # Chains of one: rows 2 (accepts 4, then own 5), 4 (own 6), 5 (own 7), 6 (accepts 8): 5 tokens in 4 rounds.
    # Chains of two: rows 2 (4, 5, own 6), 5 (own 7), 6 (8): 5 tokens in 3 rounds.
    assert found.chains == pytest.approx([5 / 4, 5 / 3])
    # A tree of 16 holds rank 1 as well: rows 2 (4, 5, own 6) and 5 (7, own 8): 5 tokens in 2 rounds.
    assert found.tree == pytest.approx(5 / 2)


def test_a_group_without_answers_has_no_rate():
    one = packed_of([1, 2, 3], [], torch.zeros(3, 1))
    found = measured([(one, torch.full((3, 2), WRONG))], 2)
    assert (found.num_tokens, found.by_depth) == (0, [0.0, 0.0])


def test_the_likeliest_nodes_make_the_tree():
    shares = [[0.6, 0.3], [0.4, 0.1]]  # products: 0.6, 0.3, 0.24, 0.12, ...
    assert best_tree(shares, 3) == {(0,), (1,), (0, 0)}


def test_noise_gives_the_text_when_the_target_draws_with_it():
    generator = torch.Generator().manual_seed(3)
    output, temperature = torch.randn(11, 6, generator=generator), 0.8
    states = torch.randn(40, 6, generator=generator).bfloat16()
    token_ids = torch.randint(0, 11, (40,), generator=generator)
    draft_ids = torch.full((11,), -1)
    chosen = torch.tensor([0, 2, 3, 7, 8, 10])
    draft_ids[chosen] = torch.arange(6)
    teacher = Teacher(torch.zeros(11, 6), output[chosen], draft_ids)
    one = packed_of(token_ids.tolist(), [(0, 40)], states)
    scores = states.float() @ output[chosen].T / temperature
    drawn = (scores[:-1] + _noise(one, teacher, output, temperature, generator)[1:]).argmax(-1)
    own = draft_ids[token_ids[1:]]
    assert bool((own >= 0).any())
    assert drawn[own >= 0].tolist() == own[own >= 0].tolist()
