"""A tree is what it says: parents before children, a walk finds what was put there, a part of it is a tree again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.trees import (
    NO_Q,
    NO_TOKEN,
    ROOT,
    Growth,
    SparseDistribution,
    TokenTree,
    depths,
    grown,
    subtree,
)

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


@pytest.mark.parametrize(("parents", "ranks"), [((ROOT,), ()), ((ROOT,), (-1,)), ((ROOT, 0, 0), (0, 1, 1))])
def test_what_is_no_growth_is_not_made(parents, ranks):
    with pytest.raises(ValueError, match="growth"):
        Growth(parents, ranks)


def test_a_chain_is_the_tree_of_width_one():
    chain = TokenTree.chain([7, 8, 9])
    assert (chain.parents, chain.depths, chain.is_chain) == ((ROOT, 0, 1), (1, 2, 3), True)
    assert TokenTree().is_chain
    assert not TokenTree((7, 8), (ROOT, ROOT)).is_chain
    assert Growth.chain(3) == Growth((ROOT, 0, 1), (0, 0, 0))


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


@given(trees(has_q=False), st.data())
def test_what_is_grown_is_the_block_and_the_nodes_that_have_a_token(block, data):
    parents, tokens, ranks = [], [], []
    for index in range(data.draw(st.integers(0, 8))):
        parents.append(data.draw(st.integers(ROOT, len(block) + index - 1)))
        above_is_there = parents[-1] < len(block) or tokens[parents[-1] - len(block)] != NO_TOKEN
        tokens.append(100 + index if above_is_there and data.draw(st.booleans()) else NO_TOKEN)
        ranks.append(index)
    q = Q[: len(tokens)] if data.draw(st.booleans()) else []
    tree, kept = grown(block, Growth(tuple(parents), tuple(ranks)), tokens, q)
    assert tree.prefix(len(block)) == TokenTree(block.tokens, block.parents, (NO_Q,) * len(block) if q else ())
    assert [tree.tokens[len(block) + new] for new in range(len(kept))] == [tokens[index] for index in kept]
    assert [index for index, token in enumerate(tokens) if token != NO_TOKEN] == list(kept)
    by_number = {ROOT: [], **{n: path(block, n) for n in range(len(block))}}
    for new, index in enumerate(kept):
        by_number[len(block) + index] = [*by_number[parents[index]], tokens[index]]
        assert path(tree, len(block) + new) == by_number[len(block) + index]
        assert not q or tree.q[len(block) + new] == q[index]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [((NO_TOKEN, 5, 6), "below none"), ((3, 5, 6), "the same node twice")],
    ids=["orphan", "twin"],
)
def test_a_corrupt_answer_is_told(tokens, problem):
    """Below the block's one guess, 3: a child of nothing, and another 3."""
    with pytest.raises(ValueError, match=problem):
        grown(TokenTree.chain([3]), Growth((ROOT, 1, 0), (0, 0, 0)), tokens)


def test_a_verdict_is_a_walk_down_the_table():
    """The block 1-2; for the outcomes 1-9 and 1-2-8 something is prepared, for 1-7 nothing but the token."""
    growth = Growth((0, 1, 0, 2, 3), (0, 0, 1, 0, 0))
    table, _ = grown(TokenTree.chain([1, 2]), growth, [9, 8, 7, 5, 6])
    after_rejection = table.child(0, 9)
    assert subtree(table, after_rejection)[0] == TokenTree.chain([5])
    assert subtree(table, table.child(1, 8))[0] == TokenTree.chain([6])
    assert len(subtree(table, table.child(0, 7))[0]) == 0
    assert table.child(ROOT, 4) is None
