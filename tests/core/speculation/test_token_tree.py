"""A tree is what it says: parents before children, a walk finds what was put there, a part of it is a tree again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.growth import NewNodes, TreeSpec
from core.speculation.token_tree import NO_Q, ROOT, SparseDistribution, TokenTree, depths, subtree

Q = [SparseDistribution((n,), (1.0,)) for n in range(20)]


@st.composite
def trees(draw, max_size=10, *, has_q=None):
    """Any tree without twins; few token ids, so that the same one is often in several places."""
    tokens, parents = [], []
    for node in range(draw(st.integers(0, max_size))):
        parent, token = draw(st.integers(ROOT, node - 1)), draw(st.integers(0, 4))
        if (parent, token) in zip(parents, tokens, strict=True):
            token = 5 + node
        tokens.append(token)
        parents.append(parent)
    has_q = draw(st.booleans()) if has_q is None else has_q
    return TokenTree(tuple(tokens), tuple(parents), tuple(Q[node] for node in range(len(tokens))) if has_q else ())


def path(tree, node):
    return [] if node == ROOT else [*path(tree, tree.parents[node]), tree.tokens[node]]


def all_paths(tree):
    return {tuple(path(tree, node)) for node in range(len(tree))}


@pytest.mark.parametrize(
    ("tokens", "parents", "q"),
    [((1,), (), ()), ((1,), (0,), ()), ((1, 2), (1, ROOT), ()), ((1,), (-2,), ()), ((1, 2), (ROOT, 0), (NO_Q,))],
)
def test_what_is_no_tree_is_not_made(tokens, parents, q):
    with pytest.raises(ValueError, match="token tree"):
        TokenTree(tokens, parents, q)


def test_a_chain_is_the_tree_of_width_one():
    chain = TokenTree.chain([7, 8, 9])
    assert (chain.parents, chain.depths, chain.is_chain) == ((ROOT, 0, 1), (1, 2, 3), True)
    assert TokenTree().is_chain
    assert not TokenTree((7, 8), (ROOT, ROOT)).is_chain


@given(trees())
def test_depth_is_the_length_of_the_path(tree):
    assert list(depths(tree.parents)) == [len(path(tree, node)) for node in range(len(tree))]


@given(trees())
def test_every_node_is_found_where_it_hangs_and_nowhere_else(tree):
    for node in range(len(tree)):
        assert tree.child(tree.parents[node], tree.tokens[node]) == node
        assert tree.child(node, 99) is None


@given(trees(), st.integers(0, 10))
def test_a_prefix_is_a_tree_of_the_first_nodes(tree, count):
    prefix = tree.prefix(count)
    assert [path(prefix, node) for node in range(len(prefix))] == [path(tree, n) for n in range(min(count, len(tree)))]
    assert len(prefix.q) == (len(prefix) if tree.q else 0)


@given(trees(), st.data())
def test_a_subtree_is_all_that_hangs_below(tree, data):
    top = data.draw(st.integers(ROOT, len(tree) - 1))
    part, nodes = subtree(tree, top)
    above = path(tree, top)
    assert [above + path(part, new) for new in range(len(part))] == [path(tree, old) for old in nodes]
    longer = {p for p in all_paths(tree) if list(p[: len(above)]) == above and len(p) > len(above)}
    assert {tuple(above) + p for p in all_paths(part)} == longer
    assert part.q == tuple(tree.q[old] for old in nodes if tree.q)
    assert list(nodes) == sorted(nodes), "what is likelier stays in front"


# What a draft is asked for, and what it tells


def test_a_chain_in_turn_ends_at_its_length():
    """One candidate a place, one node a pass, and the root's pass included."""
    chain = TreeSpec.chain(3)
    assert (chain.fanout, chain.rows_per_pass, chain.max_depth, chain.num_passes) == (1, 1, 3, 3)


LAW, OTHER = SparseDistribution((7, 8), (0.75, 0.25)), SparseDistribution((9,), (1.0,))


def drawn(*q):
    return NewNodes(0, (ROOT, 0), (7, 9), (0, 0), (0.75, 1.0), (0.75, 1.0), q=q)


@pytest.mark.parametrize("q", [(), (LAW, OTHER)])
def test_of_each_node_that_is_told_there_is_a_law_or_of_none(q):
    assert drawn(*q).q == q


@pytest.mark.parametrize(
    "q",
    [
        (LAW,),
        (LAW, OTHER, OTHER),
        (LAW, SparseDistribution((9,), (1.0, 0.0))),
        (LAW, SparseDistribution((9, 8), (1.0,))),
        (LAW, SparseDistribution((9,), (1.5,))),
        (LAW, SparseDistribution((9, 8), (1.5, -0.5))),
        (LAW, SparseDistribution((9,), (float("nan"),))),
        (LAW, SparseDistribution((9, 8), (0.5, 0.25))),
        (LAW, NO_Q),
    ],
    ids=["too few", "too many", "more probabilities", "fewer", "above 1", "below 0", "NaN", "a part", "nothing"],
)
def test_what_is_no_law_is_not_told(q):
    with pytest.raises(ValueError, match="the q that it was drawn from"):
        drawn(*q)


def test_what_was_told_differs_where_the_laws_do():
    assert drawn(LAW, OTHER) == drawn(LAW, OTHER)
    assert drawn(LAW, OTHER) != drawn(OTHER, LAW)
    assert drawn(LAW, OTHER) != drawn()


@pytest.mark.parametrize(
    ("column", "kind"), [("tokens", np.float64), ("parents", np.float64), ("chances", np.complex128)]
)
def test_columns_that_came_pickled_are_of_their_kind(column, kind):
    """A token of 2.5 must not pass into a block."""
    told = NewNodes(0, (ROOT, 0), (7, 9), (0, 0), (0.75, 1.0), (0.75, 1.0))
    object.__setattr__(told, column, getattr(told, column).astype(kind))
    with pytest.raises(ValueError, match="all numbers"):
        told.check()
