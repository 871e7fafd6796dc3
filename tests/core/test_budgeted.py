"""A tree that grows by the draft's own judgement: well-formed, within its budget, and the likeliest there is."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.budgeted import MIN_CHANCE, BudgetSprout, sprout_of
from core.growth import Candidates, Sprout
from core.records import Base, DraftRequest, Stamp
from core.trees import EMPTY_BLOCK, NO_GROWTH, ROOT, Budget, Growth, TokenTree, grown

TAIL = (0.5, 0.2, 0.1)


def says(path):
    """What a make-believe model says after a path: other candidates, another sureness each time, often with shares."""
    random = Random(repr(tuple(path)))
    ranked, confidence, entropy = tuple(random.sample(range(12), 6)), random.random(), 3 * random.random()
    others = sorted((confidence * random.random() for _ in range(5)), reverse=True)
    return Candidates(ranked, confidence, entropy, shares=(confidence, *others) if random.random() < 0.5 else ())


def request_of(budget, block=EMPTY_BLOCK, *, is_table=True):
    return DraftRequest(Stamp("s", 0, 1), Base(0, 0), (3,), budget, block, is_table)


@st.composite
def requests(draw):
    """Any budget, and for a table any block, some of whose guesses are candidates and some are not."""
    tokens, parents = [], []
    is_table = draw(st.booleans())
    for node in range(draw(st.integers(0, 5)) if is_table else 0):
        parents.append(draw(st.integers(ROOT, node - 1)))
        tokens.append(draw(st.integers(0, 11)))
        if (parents[-1], tokens[-1]) in zip(parents[:-1], tokens[:-1], strict=True):
            tokens[-1] = 20 + node
    budget = Budget(
        num_nodes=draw(st.integers(1, 40)),
        num_passes=draw(st.integers(1, 5)),
        rows_per_pass=draw(st.integers(1, 8)),
        max_depth=draw(st.integers(1, 4)),
        fanout=draw(st.integers(1, 4)),
        sureness=(draw(st.floats(-2, 2)), draw(st.floats(0, 2))),
        tail=TAIL,
        min_reach=0.0 if is_table else draw(st.sampled_from([0.0, 0.2, 0.8, 3.0])),
    )
    return request_of(budget, TokenTree(tuple(tokens), tuple(parents)), is_table=is_table)


def path_in(block, node):
    return [] if node == ROOT else [*path_in(block, block.parents[node]), block.tokens[node]]


def grow(request, known=(), part=None):
    """Feed until it is done; the sprout, and the nodes of each pass."""
    sprout = BudgetSprout(request, request.growth, {node: says(path_in(request.block, node)) for node in known})
    passes = []
    while not sprout.is_done:
        nodes = sprout.frontier()[:part]
        passes.append(nodes)
        sprout.take({node: says(sprout.path(node)) for node in nodes})
    return sprout, passes


@given(requests(), st.integers(1, 8) | st.none())
def test_nothing_is_fed_twice_or_before_its_parent_or_beyond_the_budget(request, part):
    budget = request.growth
    sprout, passes = grow(request, part=part)
    fed = [node for nodes in passes for node in nodes]
    assert len(fed) == len(set(fed))
    assert len(passes) <= budget.num_passes
    assert all(len(nodes) <= budget.rows_per_pass for nodes in passes)
    for place, node in enumerate(fed):
        assert node == ROOT or sprout.parent(node) in fed[:place]


@given(requests())
def test_what_comes_back_is_a_tree_of_the_models_candidates_within_the_budget(request):
    budget, block = request.growth, request.block
    sprout, _ = grow(request)
    answer = sprout.grown()
    growth, num_block = answer.growth, len(block)
    assert len(growth) == len(answer.tokens) == len(answer.confidence) == len(answer.entropy) <= budget.num_nodes
    tree, kept = grown(block, growth, answer.tokens)
    assert len(kept) == len(growth), "every node has a token, a parent, and no twin"
    for index, (parent, rank) in enumerate(zip(growth.parents, growth.ranks, strict=True)):
        said = says(path_in(tree, parent))
        taken = [token for token, above in zip(block.tokens, block.parents, strict=True) if above == parent]
        assert answer.tokens[index] == [token for token in said.ranked if token not in taken][rank]
        assert (answer.confidence[index], answer.entropy[index]) == (said.lead, said.entropy)
        assert rank < budget.fanout
    levels = dict.fromkeys(range(num_block), -1) | {ROOT: -1 if request.is_table else 0}
    for node, parent in enumerate(growth.parents, start=num_block):
        levels[node] = levels[parent] + 1
        assert levels[node] <= budget.max_depth
        assert levels[node] > 0 or node in growth.parents, "an outcome without a block answers nothing"


def chance(candidates, position, budget):
    """That the target's token is the candidate at `position`."""
    intercept, slope = budget.sureness
    lead = min(max(candidates.lead, 0.005), 0.995)
    x = math.log(lead / (1 - lead))
    head = min(1 / (1 + math.exp(-(intercept + slope * x))), 0.99)
    usual = list(budget.tail)
    if candidates.shares:
        usual = [math.sqrt(x) * candidates.shares[1 + place] for place, x in enumerate(budget.tail)]
    tail = [x / sum(usual) * sum(budget.tail) for x in usual]
    return head if position == 0 else min((1 - head) * tail[position - 1], head)


@pytest.mark.parametrize("num_nodes", [1, 5, 12, 30])
def test_with_time_enough_a_block_is_the_likeliest_of_its_size(num_nodes):
    budget = Budget(num_nodes, 4, 1000, 4, 4, (0.3, 0.8), TAIL)
    request = request_of(budget, is_table=False)
    every = {}

    def visit(path, reach):
        if len(path) < budget.max_depth:
            said = says(path)
            for position, token in enumerate(said.ranked[:4]):
                every[*path, token] = reach * chance(said, position, budget)
                visit((*path, token), every[*path, token])

    visit((), 1.0)
    best = sorted(every.items(), key=lambda each: -each[1])[:num_nodes]
    sprout, _ = grow(request)
    answer = sprout.grown()
    tree, _ = grown(request.block, answer.growth, answer.tokens)
    found = [tuple(path_in(tree, node)) for node in range(len(tree))]
    assert found == [path for path, reach in best if reach >= MIN_CHANCE]


def test_doubt_is_where_the_rows_go():
    """After a sure place no alternatives are grown; after an unsure one several."""
    sayings = {
        (): Candidates((1, 2, 3, 4), confidence=0.99),
        (1,): Candidates((5, 6, 7, 8), confidence=0.3),
    }
    block = TokenTree.chain([1, 5])
    budget = Budget(num_nodes=16, num_passes=2, rows_per_pass=3, max_depth=2, fanout=4, tail=TAIL)
    sprout = BudgetSprout(request_of(budget, block), budget, {ROOT: sayings[()], 0: sayings[1,], 1: says([1, 5])})
    sprout.take({node: says(sprout.path(node)) for node in sprout.frontier()})
    outcomes = [sprout.path(node) for node in range(2, 5)]
    assert [1, 6] in outcomes
    assert not any(path[0] == 2 for path in outcomes)


def test_whether_one_other_guess_is_likely_or_many_are_is_seen_at_the_place():
    """Two doubtful guesses with one rival each, and with many: the rival has what the many share."""
    budget = Budget(num_nodes=2, num_passes=1, rows_per_pass=8, max_depth=1, fanout=4, tail=(0.4, 0.3, 0.2))
    request = request_of(budget, is_table=False)
    for shares, first_two in (((0.6, 0.39, 0.001, 0.001), 0.9), ((0.6, 0.1, 0.1, 0.1), 0.35)):
        said = Candidates((5, 6, 7, 8), 0.6, shares=shares)
        sprout = BudgetSprout(request, budget, {ROOT: said})
        assert sprout.grown().tokens == (5, 6)
        assert sprout._reach[1] == pytest.approx((1 - said.lead) * first_two, abs=0.01)


def test_a_first_guess_leads_by_what_it_has_over_all_others_and_over_the_second():
    """Odds of 1 against all others, and of 1 and 4 against the second: 1 and 2 in the mean of their logarithms."""
    assert Candidates((5, 6, 7), 0.5, shares=(0.5, 0.5, 0.0)).lead == pytest.approx(1 / 2)
    assert Candidates((5, 6, 7), 0.5, shares=(0.5, 0.125, 0.125)).lead == pytest.approx(2 / 3)
    assert Candidates((5, 6, 7), 0.5).lead == 0.5, "where shares are not known"
    assert 0.999 < Candidates((5, 6), 1.0, shares=(1.0, 0.0)).lead <= 1.0
    assert 0.0 <= Candidates((5, 6), 0.0, shares=(0.0, 0.0)).lead < 0.5


def reaching(min_reach, num_passes=4, confidence=0.5):
    """Passes made for a chain whose every guess is right in half of all cases: reached in 1, 1/2, 1/4, ..."""
    budget = Budget(8, num_passes, 1, 8, 1, tail=TAIL, min_reach=min_reach)
    sprout = BudgetSprout(request_of(budget, is_table=False), budget, {})
    while not sprout.is_done:
        sprout.take({node: Candidates((5, 6, 7), confidence) for node in sprout.frontier()})
    return sprout.num_passes, len(sprout.grown().tokens)


def test_no_pass_is_made_for_what_the_text_hardly_reaches():
    assert reaching(0.0) == (4, 4)
    assert reaching(0.25) == (3, 3), "the third is for a guess that is reached in a quarter of all cases"
    assert reaching(0.26) == (2, 2)
    assert reaching(5.0) == (1, 1), "the first pass is always made"
    assert reaching(0.26, confidence=0.99) == (4, 4), "where the draft is sure it goes on"


def test_where_guesses_are_there_no_pass_is_made_that_cannot_pay():
    budget = Budget(8, 4, 2, 8, 2, tail=TAIL, min_reach=2.5)
    sprout = BudgetSprout(request_of(budget, is_table=False), budget, {ROOT: Candidates((5, 6, 7), 0.5)})
    assert sprout.is_done
    assert sprout.grown().tokens == (5, 6)


def test_a_pass_that_pays_is_made_whole():
    """Two guesses of a half and of a quarter, fed one by one: the rest of the pass alone would not be worth it."""
    budget = Budget(8, 3, 2, 4, 2, tail=(0.5,), min_reach=0.7)
    sprout = BudgetSprout(request_of(budget, is_table=False), budget, {})
    sprout.take({ROOT: Candidates((5, 6, 7), 0.5)})
    first, second = sprout.frontier()
    sprout.take({first: Candidates((5, 6, 7), 0.5)})
    assert second in sprout.frontier()


def test_nodes_of_a_pass_reach_together():
    """Two guesses of a half and of a quarter: a pass for both reaches three quarters."""
    for min_reach, is_made in ((0.74, True), (0.76, False)):
        budget = Budget(8, 2, 2, 4, 2, tail=(0.5,), min_reach=min_reach)
        sprout = BudgetSprout(request_of(budget, is_table=False), budget, {})
        sprout.take({ROOT: Candidates((5, 6, 7), 0.5)})
        assert (not sprout.is_done) == is_made


def test_no_candidate_is_likelier_than_the_first():
    """Nearly equal shares and a doubtful first: both estimates together would put the second before it."""
    budget = Budget(num_nodes=3, num_passes=1, rows_per_pass=8, max_depth=1, fanout=4, tail=(0.5, 0.3, 0.2))
    said = Candidates((5, 6, 7, 8), 0.2, shares=(0.2, 0.19, 0.01, 0.01))
    sprout = BudgetSprout(request_of(budget, is_table=False), budget, {ROOT: said})
    assert sprout.grown().tokens == (5, 6, 7)
    assert sprout._reach[0] == pytest.approx(said.lead)
    assert sprout._reach[1] == sprout._reach[0] > 0.9 * (1 - said.lead) * 0.5


def test_no_lead_is_surer_than_what_was_ever_seen():
    """A line that was fitted to log odds of at most 5.3, and chances of at most 0.99, says no more beyond them."""
    reaches = []
    for intercept, confidence in ((0.0, 0.9999999), (5.0, 0.9), (5.0, 0.9999999)):
        budget = Budget(1, 1, 8, 1, 4, sureness=(intercept, 1.0), tail=TAIL)
        sprout = BudgetSprout(request_of(budget, is_table=False), budget, {ROOT: Candidates((5, 6), confidence)})
        sprout.grown()
        reaches.append(sprout._reach[0])
    assert reaches == [0.99, 0.99, 0.99]


def test_candidates_of_no_share_leave_what_is_usual():
    """All the mass on the first: nothing is known of the others, and nothing is divided by it."""
    budget = Budget(num_nodes=4, num_passes=1, rows_per_pass=8, max_depth=1, fanout=4, sureness=(0.0, 0.1), tail=TAIL)
    said = Candidates((5, 6, 7, 8), 1.0, shares=(1.0, 0.0, 0.0, 0.0))
    sprout = BudgetSprout(request_of(budget, is_table=False), budget, {ROOT: said})
    head = sprout._reach[0]
    assert [reach / (1 - head) for reach in sprout._reach[1:]] == pytest.approx(TAIL)


@given(requests())
def test_blocks_that_are_not_to_branch_do_not_and_outcomes_are_as_many_as_ever(request):
    straight = replace(request, growth=replace(request.growth, is_chain=True))
    answer = grow(straight)[0].grown()
    num_block = len(request.block)
    is_place = [parent < num_block and request.is_table for parent in answer.growth.parents]
    below = [parent for parent, place in zip(answer.growth.parents, is_place, strict=True) if not place]
    assert len(set(below)) == len(below)
    many = Budget(num_nodes=40, num_passes=2, rows_per_pass=20, max_depth=2, fanout=3, tail=TAIL, is_chain=True)
    outcomes = grow(request_of(many, TokenTree.chain([20])))[0].grown().growth.parents.count(ROOT)
    assert outcomes == 3


def test_what_is_known_is_not_fed_again():
    budget = Budget(num_nodes=40, num_passes=3, rows_per_pass=4, max_depth=2, fanout=3, tail=TAIL)
    request = request_of(budget, TokenTree.chain([20, 21]))
    _, fresh = grow(request)
    _, known = grow(request, known=(ROOT, 0))
    assert fresh[0] == [ROOT, 0, 1]
    assert ROOT not in known[0]
    assert 0 not in known[0]
    assert len(known[0]) == 4, "the rest of the pass is outcomes already"


def test_where_there_is_no_room_growth_ends():
    budget = Budget(num_nodes=40, num_passes=9, rows_per_pass=4, max_depth=9, fanout=3, tail=TAIL)
    sprout = BudgetSprout(request_of(budget, is_table=False), budget, {})
    sprout.take({ROOT: says([])})
    first, *others = sprout.frontier()
    sprout.drop(others)
    assert sprout.frontier() == [first]
    sprout.take({first: says(sprout.path(first))})
    assert sprout.is_done
    assert len(sprout.grown().growth) > 0


def test_a_request_is_grown_as_it_says():
    budget = Budget(1, 1, 1, 1, 1)
    assert isinstance(sprout_of(request_of(budget), False, {}), BudgetSprout)
    assert isinstance(sprout_of(request_of(Growth.chain(2), is_table=False), True, {}), Sprout)
    assert sprout_of(request_of(NO_GROWTH), False, {}).is_done


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nodes": 0},
        {"fanout": 0},
        {"sureness": (math.nan, 1.0)},
        {"tail": (0.9, 0.2)},
        {"tail": (-0.1,)},
        {"min_reach": -1},
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ValueError, match="budget"):
        Budget(**{"num_nodes": 4, "num_passes": 1, "rows_per_pass": 2, "max_depth": 2, "fanout": 2} | changes)
