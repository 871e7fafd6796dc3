"""What the best block gains, against brute force on cases small enough for it."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.shapes import RankLaw, best_reach

LAWS = [
    RankLaw(((0.7, 0.2, 0.05),)),
    RankLaw(((0.5, 0.3, 0.15), (0.4, 0.35, 0.1), (0.9, 0.05, 0.0))),
    RankLaw(((0.95, 0.02, 0.01), (0.3, 0.3, 0.3))),
]


def chances():
    """Ranks, likeliest first, of one depth."""
    parts = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3)
    return parts.map(lambda xs: tuple(sorted((x / (sum(xs) + 0.1) for x in xs), reverse=True)))


def laws():
    return st.builds(RankLaw, st.lists(chances(), min_size=1, max_size=3).map(tuple))


def reach(law, path):
    """Chance that all of a path of ranks is accepted."""
    total = 1.0
    for depth, rank in enumerate(path, start=1):
        total *= law.at(depth)[rank]
    return total


def best_by_force(law, num_nodes, max_depth):
    """The most tokens that any tree of so many nodes gains."""
    paths = [path for depth in range(1, max_depth + 1) for path in product(range(3), repeat=depth)]
    is_tree = lambda chosen: all(path[:-1] in chosen or len(path) == 1 for path in chosen)  # noqa: E731
    return max(
        sum(reach(law, path) for path in chosen)
        for chosen in map(set, combinations(paths, num_nodes))
        if is_tree(chosen)
    )


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (3, 3)])
def test_the_best_block_gains_what_no_tree_of_its_size_exceeds(law, num_nodes, max_depth):
    found = best_reach(law, num_nodes, max_depth)
    assert len(found) == num_nodes
    assert found.sum() == pytest.approx(best_by_force(law, num_nodes, max_depth))


@given(laws(), st.integers(1, 40), st.integers(1, 6))
def test_a_part_of_the_best_block_is_the_best_block_of_its_size(law, num_nodes, max_depth):
    whole, part = best_reach(law, num_nodes, max_depth), best_reach(law, num_nodes // 2, max_depth)
    assert list(whole[: len(part)]) == list(part)
    assert list(whole) == sorted(whole, reverse=True)


@pytest.mark.parametrize("law", LAWS)
def test_a_chain_is_reached_by_first_candidates(law):
    assert list(law.chain(4)) == pytest.approx([reach(law, (0,) * depth) for depth in range(1, 5)])
    assert len(law.chain(0)) == 0
