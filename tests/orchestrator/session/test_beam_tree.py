"""The block of a beam search: its beams and guesses as branches, whatever they share."""

from __future__ import annotations

import pytest

from core.speculation import ROOT
from orchestrator.session.beams.beam_tree import beam_tree


@pytest.mark.parametrize("shared", [0, 1])
def test_beams_and_guesses_are_branches_that_share_their_beginnings(shared: int) -> None:
    texts = [(1, 2, 3), (1, 2, 4), (1, 5, 3), (1, 2, 3, 6), (1, 2, 3, 6, 7), (1, 5, 3, 6)]
    nodes, tree = beam_tree(texts, shared)
    assert nodes.keys() == {*texts}
    assert len(tree) == 9 - shared
    for text, node in nodes.items():
        assert path_to(tree, node) == list(text[shared:])


def path_to(tree, node):
    path = []
    while node != ROOT:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return path


def test_of_one_beam_the_end_is_the_root() -> None:
    nodes, tree = beam_tree([(1, 2), (1, 2, 3)], 2)
    assert nodes == {(1, 2): ROOT, (1, 2, 3): 0}
    assert tree.tokens == (3,)


def test_only_ends_are_copied() -> None:
    """Copies of each beginning of beams that parted early would be quadratic, on the loop of all streams."""
    texts = [tuple(range(first, first + 2000)) for first in range(4)]
    nodes, tree = beam_tree(texts, 0)
    assert (len(nodes), len(tree)) == (4, 8000)
    assert all(parent < node for node, parent in enumerate(tree.parents))
