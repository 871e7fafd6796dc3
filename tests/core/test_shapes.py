"""The best block and the best outcome table, against brute force on cases small enough for it."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.estimators import miss_curve
from core.growth import Candidates, Sprout
from core.records import Base, DraftRequest, Stamp
from core.shapes import RankLaw, best_block, best_tree
from core.tables import TableBudget, best_table, outcomes, prepared
from core.trees import ROOT, Growth, TokenTree, depths

NO_BOUND = 1 << 20
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
    return st.lists(chances(), min_size=1, max_size=3).map(lambda rows: RankLaw(tuple(rows)))


def chance_of(law, depth, rank):
    return law.at(depth)[rank] if rank < len(law.at(depth)) else 0.0


def reach(law, path):
    """Chance that all of a path of ranks is accepted."""
    total = 1.0
    for depth, rank in enumerate(path, start=1):
        total *= law.at(depth)[rank]
    return total


def rank_paths(growth, num_block=0):
    """Each node as the ranks from the root down to it."""
    found = []
    for parent, rank in zip(growth.parents, growth.ranks, strict=True):
        above = () if parent == ROOT else found[parent - num_block]
        found.append((*above, rank))
    return found


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
    growth = best_block(law, num_nodes, max_depth)
    assert len(growth) == num_nodes
    assert max(depths(growth.parents)) <= max_depth
    assert sum(reach(law, path) for path in rank_paths(growth)) == pytest.approx(
        best_by_force(law, num_nodes, max_depth)
    )


@given(laws(), st.integers(1, 40), st.integers(1, 6))
def test_a_prefix_of_the_best_block_is_the_best_block_of_its_size(law, num_nodes, max_depth):
    whole, part = best_tree(law, num_nodes, max_depth), best_tree(law, num_nodes // 2, max_depth)
    assert whole.growth.parents[: len(part)] == part.growth.parents
    assert whole.growth.ranks[: len(part)] == part.growth.ranks
    assert part.tokens == pytest.approx(float(whole.reach[: len(part)].sum()))
    assert list(whole.reach) == sorted(whole.reach, reverse=True)


@given(laws(), st.integers(1, 40), st.integers(1, 6))
def test_a_block_costs_the_rows_that_the_draft_will_feed(law, num_nodes, max_depth):
    tree = best_tree(law, num_nodes, max_depth)
    assert tree.rows == fed_rows(TokenTree(), tree.growth, is_table=False, is_fed=False)


def test_where_the_draft_samples_blocks_are_chains():
    law = RankLaw(((0.5, 0.4, 0.05),), bonus=(0.7, 0.2))
    assert best_block(law, 4, 8) == Growth.chain(4)
    assert best_block(RankLaw(law.chances), 3, 8, is_chain=True) == Growth.chain(3)
    assert best_block(RankLaw(law.chances), 3, 8) != Growth.chain(3)


# Outcome tables


def block_of(parents, ranks):
    """A block with the token 10 + rank at each node."""
    return TokenTree(tuple(10 + rank for rank in ranks), parents)


def fed_rows(block, growth, *, is_table, is_fed):
    """Rows of each pass of a draft that makes this growth by the real plan."""
    suffix = (1,)
    request = DraftRequest(Stamp("s", 0, 0), Base(0, 0), suffix, growth, block, is_table=is_table)
    says = Candidates(tuple(range(10, 80)))
    known = dict.fromkeys(block.parents, says) if is_fed else {}
    sprout = Sprout(request, samples=False, known=known)
    rows = []
    while not sprout.is_done:
        frontier = sprout.frontier()
        rows.append(len(frontier))
        sprout.take(dict.fromkeys(frontier, says))
    return tuple(rows)


def table_value(law, parents, ranks, growth):
    """Guesses of the next block that are accepted, worked out node by node."""
    chance = {}
    num_block = len(parents)
    taken = Counter()
    for node, (parent, rank) in enumerate(zip(parents, ranks, strict=True)):
        depth = depths(parents)[node]
        chance[node] = (1.0 if parent == ROOT else chance[parent]) * chance_of(law, depth, rank)
        taken[parent, rank] += 1
    chance[ROOT] = 1.0
    total, below = 0.0, {}
    for node, (parent, rank) in enumerate(zip(growth.parents, growth.ranks, strict=True), start=num_block):
        if parent < num_block:  # an outcome
            depth = 1 if parent == ROOT else depths(parents)[parent] + 1
            free = [r for r in range(len(law.at(depth))) if not taken[parent, r]]
            chance[node], below[node] = chance[parent] * law.at(depth)[free[rank]], 0
        else:
            below[node] = below[parent] + 1
            chance[node] = chance[parent] * chance_of(law, below[node], rank)
            total += chance[node]
    return total


def budget(**changes):
    defaults = {
        "num_nodes": NO_BOUND,
        "num_passes": 8,
        "rows_per_pass": NO_BOUND,
        "max_depth": 1,
        "block_nodes": 1,
        "fanout": 3,
    }
    return TableBudget(**{**defaults, **changes})


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6])
def test_with_rows_for_few_outcomes_the_likeliest_are_prepared(law, num_rows):
    parents, ranks = (ROOT, 0), (0, 0)
    ends = outcomes(parents, ranks, law, fanout=3)
    growth = best_table(parents, ranks, law, budget(rows_per_pass=num_rows, num_passes=1))
    fed = [float(c) for c, is_fed in zip(ends.chance, ends.is_fed, strict=True) if is_fed]
    by_force = max(
        sum(c * law.at(1)[0] for c in chosen)
        for size in range(min(num_rows, len(fed)) + 1)
        for chosen in combinations(fed, size)
    )
    assert table_value(law, parents, ranks, growth) == pytest.approx(by_force)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("num_nodes", [2, 4, 5, 6, 8])
def test_a_table_with_room_for_few_nodes_is_close_to_the_best_there_is(law, num_nodes):
    """Outcomes gain nothing by themselves, so taking the likeliest node first is not always the very best."""
    parents, ranks = (ROOT,), (0,)
    growth = best_table(parents, ranks, law, budget(num_nodes=num_nodes, max_depth=2, block_nodes=2))
    ends = outcomes(parents, ranks, law, fanout=3)
    depth_one, depth_two = law.at(1)[0], law.at(1)[0] * law.at(2)[0]
    options = [(0, 0.0), (2, depth_one), (3, depth_one + depth_two)]
    tree = best_tree(law, 2, 2)
    if tree.growth.parents == (ROOT, ROOT):
        options[2] = (3, depth_one + law.at(1)[1])
    best = max(
        sum(float(c) * gain for c, (_, gain) in zip(ends.chance, choice, strict=True))
        for choice in product(options, repeat=len(ends))
        if sum(size for size, _ in choice) <= num_nodes
    )
    assert len(growth) <= num_nodes
    assert 0.85 * best <= table_value(law, parents, ranks, growth) <= best + 1e-9


def test_fan_out_goes_where_the_marginal_gain_is_highest():
    """The rule of P(j) (m(F) - m(F + 1)): no outcome that is left out gains more than one that is listed."""
    hits = [miss_curve(rank) - miss_curve(rank + 1) for rank in range(16)]
    law = RankLaw(((0.6, *(0.4 * hit for hit in hits)),))
    parents, ranks = (ROOT, 0, 1), (0, 0, 0)
    growth = best_table(parents, ranks, law, budget(rows_per_pass=12, num_passes=2, fanout=16))
    fanout = Counter(parent for parent in growth.parents if parent < 3)
    ends_at = {ROOT: 0.4, 0: 0.6 * 0.4, 1: 0.36 * 0.4}
    listed = [ends_at[place] * hits[f - 1] for place, f in fanout.items() if place in ends_at]
    left_out = [p * hits[fanout[place]] for place, p in ends_at.items()]
    assert sum(fanout[place] for place in ends_at) == 11, "the twelfth row feeds the leaf"
    assert min(listed) >= max(left_out)
    assert fanout[ROOT] > fanout[1] > 0


def test_an_outcome_without_a_guess_below_it_is_left_out():
    for num_nodes in range(1, 12):
        growth = best_table((ROOT,), (0,), LAWS[0], budget(num_nodes=num_nodes, max_depth=2, block_nodes=3))
        answered = set(growth.parents)
        outcomes_listed = [1 + i for i, parent in enumerate(growth.parents) if parent < 1]
        assert set(outcomes_listed) <= answered


@given(
    laws(),
    st.lists(st.integers(-1, 3), max_size=5),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 60),
    st.booleans(),
)
def test_a_table_costs_what_was_forecast_and_fits_its_budget(
    law, wishes, num_passes, num_rows, max_depth, num_nodes, is_fed
):
    """The forecast of rows is what the real plan of a draft feeds, pass by pass."""
    parents = tuple(min(wish, node - 1) for node, wish in enumerate(wishes))
    seen = Counter()
    ranks = tuple((seen.update([parent]) or seen[parent] - 1) for parent in parents)
    bounds = budget(
        num_nodes=num_nodes,
        num_passes=num_passes,
        rows_per_pass=num_rows,
        max_depth=max_depth,
        block_nodes=2 * max_depth,
    )
    table = prepared(parents, ranks, law, bounds, is_fed=is_fed)
    rows = fed_rows(block_of(parents, ranks), table.growth, is_table=True, is_fed=is_fed)
    assert tuple(filter(None, table.rows)) == tuple(filter(None, rows))
    assert len(rows) <= num_passes
    assert max(rows, default=0) <= num_rows + len(parents)
    assert len(table.growth) <= num_nodes
    if is_fed:
        assert table.accepted == pytest.approx(table_value(law, parents, ranks, table.growth))


def test_places_that_the_draft_has_not_been_fed_cost_a_pass():
    """Below the block's leaf blocks are one shallower than elsewhere."""
    law = RankLaw(((0.6, 0.3),))
    growth = best_table((ROOT,), (0,), law, budget(num_passes=3, max_depth=8, block_nodes=8, fanout=2, is_chain=True))
    below = {}
    for node, parent in enumerate(growth.parents, start=1):
        place, depth = below[parent] if parent >= 1 else (parent, -1)
        below[node] = place, depth + 1
    deepest = {place: max(depth for at, depth in below.values() if at == place) for place in (ROOT, 0)}
    assert deepest == {ROOT: 3, 0: 2}


def test_where_the_draft_samples_the_bonus_token_follows_its_own_law():
    law = RankLaw(((0.6, 0.1, 0.1),), bonus=(0.9, 0.05, 0.01))
    ends = outcomes((ROOT,), (0,), law, fanout=3)
    at_leaf = [float(c) for c, place in zip(ends.chance, ends.place, strict=True) if place == 0]
    assert at_leaf == pytest.approx([0.6 * 0.9, 0.6 * 0.05, 0.6 * 0.01])
