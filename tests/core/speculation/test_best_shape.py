"""What the best block gains, against brute force on cases small enough for it."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.best_shape import best_reach

LAWS = [((0.7, 0.7, 0.7), (0.6, 0.2)), ((0.5, 0.4, 0.9), (0.6, 0.3)), ((0.95, 0.3, 0.3), (0.4, 0.4))]
"""Chances of first candidates by depth, and of others if they are not the first."""


def chance(heads, tail, depth, rank):
    head = heads[depth - 1]
    return head if rank == 0 else min(head, (1.0 - head) * tail[rank - 1])


def reach(heads, tail, path):
    """Chance that all of a path of ranks is accepted."""
    return math.prod(chance(heads, tail, depth, rank) for depth, rank in enumerate(path, start=1))


def best_by_force(heads, tail, num_nodes):
    """The most tokens that any tree of so many nodes gains."""
    paths = [path for depth in range(1, len(heads) + 1) for path in product(range(3), repeat=depth)]
    is_tree = lambda chosen: all(path[:-1] in chosen or len(path) == 1 for path in chosen)  # noqa: E731
    return max(
        sum(reach(heads, tail, path) for path in chosen)
        for chosen in map(set, combinations(paths, num_nodes))
        if is_tree(chosen)
    )


@pytest.mark.parametrize(("heads", "tail"), LAWS)
@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (3, 3)])
def test_the_best_block_gains_what_no_tree_of_its_size_exceeds(heads, tail, num_nodes, max_depth):
    found = best_reach(heads[:max_depth], tail, num_nodes)
    assert len(found) == num_nodes
    assert sum(found) == pytest.approx(best_by_force(heads[:max_depth], tail, num_nodes))


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6), st.integers(1, 40))
def test_a_part_of_the_best_block_is_the_best_block_of_its_size(heads, num_nodes):
    whole, part = (best_reach(heads, (0.5, 0.3, 0.1), num) for num in (num_nodes, num_nodes // 2))
    assert whole[: len(part)] == part
    assert whole == sorted(whole, reverse=True)


def test_without_others_a_chain_is_reached_by_first_candidates():
    assert best_reach((0.5, 0.4, 0.9), (), 9) == pytest.approx([0.5, 0.2, 0.18])
