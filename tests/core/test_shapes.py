"""What the best block gains and the best outcome table, against brute force on cases small enough for it."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.estimators import miss_curve
from core.growth import Candidates, Sprout
from core.records import Base, DraftRequest, Stamp
from core.shapes import RankLaw, best_reach
from core.tables import TableBudget, outcomes, prepared
from core.trees import ROOT, TokenTree

NO_BOUND = 1 << 20
LAWS = [
    RankLaw(((0.7, 0.2, 0.05),), bonus=(0.7, 0.2, 0.05)),
    RankLaw(((0.5, 0.3, 0.15), (0.4, 0.35, 0.1), (0.9, 0.05, 0.0)), bonus=(0.4, 0.3, 0.2)),
    RankLaw(((0.95, 0.02, 0.01), (0.3, 0.3, 0.3)), bonus=(0.9, 0.05)),
]


def chances():
    """Ranks, likeliest first, of one depth."""
    parts = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3)
    return parts.map(lambda xs: tuple(sorted((x / (sum(xs) + 0.1) for x in xs), reverse=True)))


def laws():
    return st.builds(RankLaw, st.lists(chances(), min_size=1, max_size=3).map(tuple), chances())


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


# Outcome tables


def table(num_guesses, law, *, is_fed=True, **bounds):
    defaults = {"num_nodes": NO_BOUND, "rows_per_pass": NO_BOUND, "depth": 1, "fanout": 3}
    return prepared(num_guesses, law, TableBudget(**{**defaults, **bounds}), is_fed=is_fed)


def fed_rows(num_guesses, growth, *, is_fed):
    """Rows of each pass of a draft that makes this growth by the real plan."""
    block = TokenTree.chain([10] * num_guesses)
    request = DraftRequest(Stamp("s", 0, 0), Base(0, 0), (1,), growth, block, is_table=True)
    says = Candidates(tuple(range(10, 80)), sampled=9)
    sprout = Sprout(request, samples=True, known=dict.fromkeys(block.parents, says) if is_fed else {})
    rows = []
    while not sprout.is_done:
        frontier = sprout.frontier()
        rows.append(len(frontier))
        sprout.take(dict.fromkeys(frontier, says))
    return tuple(rows)


def table_value(num_guesses, law, growth):
    """Guesses of the next block that are accepted, worked out node by node."""
    at = [1.0, *law.chain(num_guesses)]
    chance, below, total = {}, {}, 0.0
    for node, (parent, rank) in enumerate(zip(growth.parents, growth.ranks, strict=True), start=num_guesses):
        if parent < num_guesses:  # an outcome
            is_last = parent == num_guesses - 1
            chance[node] = at[parent + 1] * (law.bonus[rank] if is_last else law.at(parent + 2)[1 + rank])
            below[node] = 0
        else:
            below[node] = below[parent] + 1
            chance[node] = chance[parent] * law.at(below[node])[0]
            total += chance[node]
    return total


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6])
def test_with_rows_for_few_outcomes_the_likeliest_are_prepared(law, num_rows):
    law = RankLaw(law.chances)  # nothing comes after the whole chain
    likeliest = sorted(outcomes(3, law, fanout=3).chance, reverse=True)[:num_rows]
    found = table(3, law, rows_per_pass=num_rows)
    assert found.hit_rate == pytest.approx(sum(likeliest))
    assert found.accepted == pytest.approx(sum(likeliest) * law.at(1)[0])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("num_nodes", [2, 4, 5, 6, 8])
def test_a_table_with_room_for_few_nodes_is_close_to_the_best_there_is(law, num_nodes):
    """Outcomes gain nothing by themselves, so taking the likeliest node first is not always the very best."""
    found = table(1, law, num_nodes=num_nodes, depth=2)
    first, both = law.at(1)[0], law.chain(2).sum()
    best = max(
        sum(float(chance) * gain for chance, (_, gain) in zip(outcomes(1, law, 3).chance, choice, strict=True))
        for choice in product([(0, 0.0), (2, first), (3, both)], repeat=len(outcomes(1, law, 3)))
        if sum(size for size, _ in choice) <= num_nodes
    )
    assert len(found.growth) <= num_nodes
    assert 0.8 * best <= table_value(1, law, found.growth) <= best + 1e-9


def test_fan_out_goes_where_the_marginal_gain_is_highest():
    """The rule of P(j) (m(F) - m(F + 1)): no outcome that is left out gains more than one that is listed."""
    hits = [miss_curve(rank) - miss_curve(rank + 1) for rank in range(16)]
    law = RankLaw(((0.6, *(0.4 * hit for hit in hits)),), bonus=(0.01,))
    growth = table(3, law, rows_per_pass=12, fanout=16).growth
    fanout = Counter(parent for parent in growth.parents if parent < 2)
    ends_at = {ROOT: 0.4, 0: 0.6 * 0.4, 1: 0.36 * 0.4}
    listed = [ends_at[place] * hits[fanout[place] - 1] for place in fanout]
    left_out = [chance * hits[fanout[place]] for place, chance in ends_at.items()]
    assert sum(fanout.values()) == 12
    assert min(listed) >= max(left_out)
    assert fanout[ROOT] > fanout[1] > 0


def test_an_outcome_without_a_guess_below_it_is_left_out():
    for num_nodes in range(1, 12):
        growth = table(1, LAWS[0], num_nodes=num_nodes, depth=2).growth
        assert {1 + index for index, parent in enumerate(growth.parents) if parent < 1} <= set(growth.parents)


@given(
    laws(),
    st.integers(0, 5),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 60),
    st.booleans(),
)
def test_a_table_costs_what_was_forecast_and_fits_its_budget(law, num_guesses, depth, num_rows, num_nodes, is_fed):
    """The forecast of rows is what the real plan of a draft feeds, pass by pass."""
    found = table(num_guesses, law, num_nodes=num_nodes, rows_per_pass=num_rows, depth=depth, is_fed=is_fed)
    rows = fed_rows(num_guesses, found.growth, is_fed=is_fed)
    assert tuple(filter(None, found.rows)) == tuple(filter(None, rows))
    assert len(rows) <= depth + 1
    assert max(rows, default=0) <= num_rows + num_guesses
    assert len(found.growth) <= num_nodes
    assert found.accepted == pytest.approx(table_value(num_guesses, law, found.growth))


def test_places_that_the_draft_has_not_been_fed_cost_a_pass():
    """That behind the last guess; or all, where somebody else has guessed."""
    assert table(2, LAWS[0], depth=3, fanout=1).rows == (3, 3, 3, 1)
    assert table(2, LAWS[0], depth=3, fanout=1, is_fed=False).rows == (3, 3, 3, 3)


def test_where_the_draft_samples_the_bonus_token_follows_its_own_law():
    law = RankLaw(((0.6, 0.1, 0.1),), bonus=(0.9, 0.05, 0.01))
    ends = outcomes(1, law, fanout=3)
    assert list(ends.chance[ends.place == 0]) == pytest.approx([0.6 * 0.9, 0.6 * 0.05, 0.6 * 0.01])
    assert list(ends.chance[ends.place == ROOT]) == pytest.approx([0.1, 0.1])
    assert list(ends.rank[ends.place == ROOT]) == [0, 1]
