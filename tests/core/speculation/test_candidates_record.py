"""The record of a draft's candidates holds those of tokens that were fed and are still right."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.candidates import Candidates, HeldTree
from core.speculation.growth import Measure
from core.speculation.token_tree import ROOT, TokenTree, subtree

NUM_RANKS = 6


def says(path):
    """Candidates of a make-believe model after a path: other candidates, another confidence each time."""
    random = Random(repr(tuple(path)))
    return Candidates(tuple(random.sample(range(9), NUM_RANKS)), random.random(), 3 * random.random())


def path(tree, node):
    return [] if node == ROOT else [*path(tree, tree.parents[node]), tree.tokens[node]]


def test_a_lead_is_the_mean_of_the_odds_against_all_and_against_the_second():
    """0.8 against 0.2 and against 0.05: the odds 4 and 16 have the geometric mean 8."""
    assert Candidates((1, 2), 0.8, shares=(0.8, 0.05)).margin == pytest.approx(8 / 9)
    assert Candidates((1, 2), 0.8).margin == 0.8, "where shares are not known, it is the confidence"
    assert 0.0 < Candidates((1, 2), 1.0, shares=(1.0, 0.0)).margin < 1.0


@pytest.mark.parametrize(
    ("measure", "confidence"), [(Measure.MARGIN, 8 / 9), (Measure.CONFIDENCE, 0.8), (Measure.ENTROPY, math.exp(-0.5))]
)
def test_a_draft_is_as_sure_as_the_measure_says(measure, confidence):
    assert Candidates((1, 2), 0.8, 0.5, shares=(0.8, 0.05)).confidence_by(measure) == pytest.approx(confidence)


# What is held


@st.composite
def held_trees(draw, max_size=10):
    tree = HeldTree(says([]))
    for _ in range(draw(st.integers(0, max_size))):
        parent, token = draw(st.integers(ROOT, len(tree) - 1)), draw(st.integers(0, 4))
        if tree.walk([*path(tree, parent), token])[len(path(tree, parent)) :] == []:
            tree.add(parent, token, says([*path(tree, parent), token]))
    return tree


@given(held_trees(), st.lists(st.integers(0, 4), max_size=5))
def test_a_walk_goes_as_far_as_there_are_nodes(tree, tokens):
    nodes = tree.walk(tokens)
    assert [tree.tokens[node] for node in nodes] == tokens[: len(nodes)]
    assert [tree.parents[node] for node in nodes] == [ROOT, *nodes[:-1]][: len(nodes)]
    held = {tuple(path(tree, node)) for node in range(len(tree))}
    assert tuple(tokens[: len(nodes) + 1]) not in held or len(nodes) == len(tokens)


@given(held_trees(), st.booleans(), st.data())
def test_after_a_rebase_rows_nodes_and_candidates_still_belong_together(tree, keeps_below, data):
    """Rows of KV are named by the path of what was fed there; compaction keeps those that `rebase` names."""
    rows = [path(tree, node) for node in range(len(tree))]
    as_tree = TokenTree(tuple(tree.tokens), tuple(tree.parents))
    top = data.draw(st.integers(ROOT, len(tree) - 1))
    down = tree.walk(path(tree, top))
    below = subtree(as_tree, top)[0] if keeps_below else TokenTree()
    kept = tree.rebase(down, keeps_below=keeps_below)
    assert kept == sorted(kept), "compaction moves rows to the front"
    assert kept[: len(down)] == down
    left = [rows[row] for row in kept[len(down) :]]
    above = rows[top] if top != ROOT else []
    assert [above + path(tree, node) for node in range(len(tree))] == left
    assert [path(tree, node) for node in range(len(tree))] == [path(below, node) for node in range(len(below))]
    assert tree.candidates == [says(p) for p in left]
    assert tree.root == says(above)
    assert all(tree.walk(path(tree, node))[-1] == node for node in range(len(tree)))


def test_cleared_is_cleared():
    tree = HeldTree(says([]))
    tree.add(ROOT, 4, says([4]))
    tree.clear()
    assert (len(tree), tree.root, tree.walk([4])) == (0, None, [])
    assert tree.add(ROOT, 5, says([5])) == 0
    assert tree.walk([5]) == [0]
