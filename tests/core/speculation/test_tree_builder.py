"""The draft's half of the tree: best first over all sessions, and nothing that stays valid is lost at a verdict."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.speculation.candidates import Candidates
from core.speculation.chances import chances_of
from core.speculation.growth import UNRANKED, Measure, TreeSpec
from core.speculation.guesser import Guesses
from core.speculation.passes import add_candidates, feed_likeliest
from core.speculation.speculation_tree import SpeculationTree
from core.speculation.token_tree import NO_Q, ROOT, SparseDistribution
from core.speculation.tree_builder import MIN_PATH_PROB, TreeBuilder

TREE_SPEC = TreeSpec(rows_per_pass=4, max_depth=6, calibration=(0.0, 1.0), tail=(0.5, 0.25, 0.1))


def said_after(path):
    """Candidates of a fake model after a path, the same each time."""
    random = Random(str(tuple(path)))
    ranked = tuple(random.sample(range(1, 9), 4))
    first = random.uniform(0.2, 0.95)
    rest = 1.0 - first
    return Candidates(ranked, first, 0.0, shares=(first, rest * 0.6, rest * 0.3, rest * 0.1))


def builder(tree_spec=TREE_SPEC):
    new = TreeBuilder()
    new.tree_spec = tree_spec
    return new


def feed(builders, num_rows, prefixes=None):
    """One pass, the root of each before all else; how many rows each had."""
    prefixes = prefixes or [(place,) for place in range(len(builders))]
    feed_likeliest(builders, num_rows)
    counts = [len(one.feeding) for one in builders]
    fed = [(one, prefix) for one, prefix in zip(builders, prefixes, strict=True) if one.being_fed]
    add_candidates([one for one, _ in fed], [said_of_all(one, prefix) for one, prefix in fed])
    return counts


def said_of_all(one, prefix):
    """Candidates of the fake model after each node that is being fed."""
    return [said_after((*prefix, *one.path(node))) for node in one.being_fed]


def paths(one, nodes=None):
    """Tokens to each node, the root's none."""
    return [tuple(one.path(node)) for node in (range(len(one)) if nodes is None else nodes)]


def chances(said, *rules):
    """Chances of all candidates of each place, by the rule of each or of all."""
    rules = rules or (TREE_SPEC,)
    return chances_of(said, [each.margin for each in said], [(rule, len(said) // len(rules)) for rule in rules])


def test_the_first_candidate_is_as_likely_as_its_lead_says_and_the_others_share_the_rest():
    candidates = Candidates((1, 2, 3), 0.8, 0.0, shares=(0.8, 0.1, 0.05))
    first, second, third = chances([candidates])[0]
    assert first == pytest.approx(candidates.margin)
    weights = [0.5**0.5 * 0.1, 0.25**0.5 * 0.05]
    assert second == pytest.approx((1 - first) * 0.85 * weights[0] / sum(weights))
    assert third == pytest.approx((1 - first) * 0.85 * weights[1] / sum(weights))
    assert chances([candidates], replace(TREE_SPEC, fanout=1)) == [[first]]


def test_what_a_place_says_does_not_depend_on_the_others_of_its_pass():
    places = [said_after((n,)) for n in range(20)] + [Candidates(tuple(range(9)), 0.5), Candidates((7,), 1.0)]
    together = chances(places)
    assert together == [chances([each])[0] for each in places]
    assert [len(row) for row in together] == [min(len(each.ranked), 1 + len(TREE_SPEC.tail)) for each in places]


def test_each_place_is_rated_by_the_rule_of_its_own_session():
    rules = [TREE_SPEC, replace(TREE_SPEC, calibration=(-1.0, 0.5), tail=(0.9,), fanout=2), TreeSpec(1, 1, fanout=1)]
    said = [said_after((n,)) for n in range(6)]
    apart = [chances([each], rules[place // 2])[0] for place, each in enumerate(said)]
    assert chances(said, *rules) == apart
    assert [len(row) for row in apart] == [4, 4, 2, 2, 1, 1]


def test_where_shares_are_not_known_the_others_are_as_likely_as_usual():
    assert chances([Candidates((1, 2, 3), 0.5)])[0] == pytest.approx([0.5, 0.25, 0.125])


def test_no_candidate_is_likelier_than_the_first():
    first, second = chances([Candidates((1, 2), 0.01)], TreeSpec(1, 1, calibration=(0.0, 1.0), tail=(0.9,)))[0]
    assert second <= first


def test_the_root_is_fed_first_and_then_what_is_likeliest():
    one = builder()
    assert one.being_fed == [0]
    assert not one.best_path_prob, "there is nothing but the root"
    one.take([said_after((0,))])
    for _ in range(5):
        feed_likeliest([one], 3)
        others = set(range(1, len(one))) - one.rows.keys() - set(one.feeding)
        assert min(one.path_prob[node] for node in one.feeding) >= max(
            (one.path_prob[node] for node in others), default=0.0
        )
        one.take(said_of_all(one, (0,)))


def test_of_nodes_as_likely_the_one_that_was_found_first_is_fed_first_also_if_it_was_put_back():
    one = builder(replace(TREE_SPEC, tail=(0.2, 0.2, 0.2)))
    one.take([Candidates((1, 2, 3, 4), 0.5)])
    assert len(set(one.chances[2:])) == 1
    feed_likeliest([one], 3)
    assert paths(one, one.feeding) == [(1,), (2,), (3,)]
    one.put_back(one.path_prob[1])
    assert paths(one, one.feeding) == [(1,)]
    feed_likeliest([one], 2)
    assert paths(one, one.feeding) == [(1,), (2,), (3,)]


def test_a_pass_goes_to_whoever_needs_it_most():
    sure, unsure = builder(), builder()
    sure.take([Candidates((1,), 0.99)])
    unsure.take([Candidates((1, 2), 0.5, shares=(0.5, 0.5))])
    feed_likeliest([unsure, sure], 1)
    assert (unsure.feeding, paths(sure, sure.feeding)) == ([], [(1,)])


def test_of_sessions_as_likely_the_first_is_fed_first():
    builders = [builder() for _ in range(3)]
    add_candidates(builders, [[Candidates((1, 2), 0.9)]] * 3)
    feed_likeliest(builders, 2)
    assert [len(one.feeding) for one in builders] == [1, 1, 0]


def test_nobody_starves_whose_nodes_are_as_likely_as_others():
    builders = [builder() for _ in range(8)]
    counts = [0] * 8
    for _ in range(30):
        for place, num in enumerate(feed(builders, 8, [(0,)] * 8)):  # all have the same text
            counts[place] += num
    assert max(counts) - min(counts) <= 8


def test_what_is_too_unlikely_is_left():
    one = builder()
    feed([one], 1)
    feed_likeliest([one], 9, min_path_prob=1.0)
    assert not one.feeding
    while feed([one], 64)[0]:
        pass
    assert one.has_fed_all
    assert min(one.path_prob) >= MIN_PATH_PROB
    assert max(one.depths) == TREE_SPEC.max_depth


def test_a_verdict_keeps_what_grew_below_and_looks_further():
    one = builder()
    for _ in range(8):
        feed([one], 16)
    before = paths(one)
    top = max(paths(one, one.children(0)), key=lambda path: sum(each[:1] == path for each in before))
    kept = [path[1:] for path in before if path[:1] == top]
    assert one.reroot(top)
    assert paths(one)[: len(kept)] == kept, "in the same order"
    assert len(one) > len(kept), "what is likely enough by now is new"
    assert (one.path_prob[0], one.depths[0]) == (1.0, 0)
    for node in range(1, len(one)):
        assert one.path_prob[node] == one.path_prob[one.parents[node]] * one.chances[node]
        assert one.depths[node] == one.depths[one.parents[node]] + 1
    assert one.best_path_prob == max(one.path_prob[node] for node in range(len(one)) if node not in one.rows)


def test_a_token_that_the_tree_does_not_know_begins_it_anew():
    one = builder()
    feed([one], 1)
    assert not one.reroot([99])
    assert (len(one), one.being_fed, one.has_root) == (1, [0], False)


def test_what_is_being_fed_below_the_new_root_is_fed_and_what_is_not_is_forgotten():
    one = builder()
    feed([one], 1)
    feed([one], 2)
    feed_likeliest([one], 64)
    top = one.tokens[one.children(0)[0]]
    kept = [path[1:] for path in paths(one, one.feeding) if path[0] == top and len(path) > 1]
    assert 0 < len(kept) < len(one.feeding)
    assert one.reroot([top])
    assert paths(one, one.feeding) == kept
    assert not one.has_ended
    assert not {node for _, node in one._open} & set(one.feeding), "each is fed once"
    said = [Candidates((90 + number, 80), 0.9) for number in range(len(kept))]
    one.take(said)
    assert {path[-1] - 90: path[:-1] for path in paths(one) if path[-1:] >= (90,)} == dict(enumerate(kept))
    assert not one.feeding


def test_a_node_that_is_being_fed_and_becomes_the_root_is_computed_as_a_token():
    one = builder()
    feed([one], 1)
    one.feed()
    assert one.reroot(one.path(one.feeding[0]))
    assert (one.feeding, one.being_fed, one.has_root, one.best_path_prob) == ([], [0], False, 0.0)
    assert one.report().root == ROOT, "nobody was told of it"


def test_while_a_node_is_being_fed_more_may_grow():
    one = builder()
    one.take([Candidates((1,), 0.9)])
    one.feed()
    assert not one.has_fed_all
    one.take([Candidates((), 0.9)])
    assert one.has_fed_all


def test_each_node_is_told_once_and_after_its_parent():
    one, numbers = builder(), set()
    for _ in range(6):
        feed([one], 3)
        new_nodes = one.report()
        assert new_nodes.first == len(numbers)
        for number, parent in enumerate(new_nodes.parents, new_nodes.first):
            assert parent == ROOT or parent in numbers
            numbers.add(number)
    assert not len(one.report())


@pytest.mark.parametrize("has_guesser", [False, True])
@given(seed=st.integers(0, 2**32))
def test_both_halves_agree_once_all_messages_have_come(has_guesser, seed):
    """Growth and verdicts cross on their way: each message arrives some steps after it was sent, in order.

    Somebody else may guess meanwhile, the same nodes as the draft or others, and verdicts lead there, too.
    """
    random = Random(seed)
    draft, tree, text = builder(), SpeculationTree(), [0]
    to_draft, to_tree = deque(), deque()
    drafted_text = [0]
    actions = ("feed", "feed", "verdict", "to draft", "to tree", "to tree", *["guess"] * has_guesser)
    for _ in range(60):
        action = random.choice(actions)
        if action == "feed":
            feed([draft], random.randrange(1, 5), [drafted_text])
            to_tree.append((draft.report(), len(drafted_text)))
        elif action == "guess":
            _guess(tree, text, random)
        elif action == "verdict":
            tokens = _random_path(tree, random)
            tree.reroot(tokens)
            text += tokens
            to_draft.append(tokens)
        elif action == "to draft" and to_draft:
            _hear(draft, drafted_text, to_draft)
            to_tree.append((draft.report(), len(drafted_text)))
        elif action == "to tree" and to_tree:
            new_nodes, num_known = to_tree.popleft()
            tree.add(new_nodes, len(text) - num_known)
    while to_draft:
        _hear(draft, drafted_text, to_draft)
    to_tree.append((draft.report(), len(drafted_text)))
    for new_nodes, num_known in to_tree:
        tree.add(new_nodes, len(text) - num_known)
    assert drafted_text == text
    assert not tree.needs_full_report
    assert {path for path, rank in _paths_of_tree(tree).items() if rank != UNRANKED} == {
        path for path in paths(draft) if path
    }
    for node in range(1, len(draft)):
        found = _find(tree, draft.path(node))
        assert draft.numbers[node] in found.numbers, "what the draft calls by this number is this node"
        assert (found.rank, found.chance) == (draft.ranks[node], pytest.approx(draft.chances[node]))


def _hear(draft, drafted_text, to_draft):
    tokens = to_draft.popleft()
    draft.reroot(tokens)
    drafted_text += tokens


def _guess(tree, text, random):
    """A few nodes below any node: some that the draft will think of, too."""
    tokens = list(random.choice([(), *_paths_of_tree(tree)]))
    chances = [0.0] * len(tokens)
    for _ in range(random.randrange(1, 4)):
        tokens.append(random.choice([*said_after((*text, *tokens)).ranked, random.randrange(1, 9)]))
        chances.append(random.random())
    tree.add_guesses(Guesses.chain(tokens, chances))


def _random_path(tree, random):
    """Tokens down the tree, and one more that it may know or not."""
    tokens = list(random.choice([(), *_paths_of_tree(tree)]))
    known = list(_find(tree, tokens).children)
    return [*tokens, random.choice([*known, random.randrange(1, 9)])]


def _find(tree, tokens):
    """The node that these tokens lead to."""
    node = tree._root
    for token in tokens:
        node = node.children[token]
    return node


def _paths_of_tree(tree):
    """With the rank of each."""
    part, found = tree.best(10_000, 10_000), {}
    block, paths = tree.block(part), []
    for token, parent, rank in zip(block.tokens, block.parents, part.ranks, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
        found[paths[-1]] = rank
    assert len(found) == len(tree), "no two siblings are alike"
    return found


# Growth that ends by itself


def ending(**changes):
    new = TreeBuilder()
    new.set_spec(replace(TREE_SPEC, **{"num_passes": 4, **changes}))
    new.begin()
    return new


def passes(one, num_rows=64):
    """Tokens of the paths that each pass feeds, until growth has ended."""
    found = []
    while one.being_fed:
        found.append(paths(one, one.being_fed))
        one.take(said_of_all(one, ()))
        one.count_pass()
        has_ended = one.has_ended
        one.feed_pass(num_rows)
        assert has_ended == (not one.being_fed), "to ask changes nothing"
    return found


def test_it_ends_after_so_many_passes_the_roots_included():
    for num_passes in (1, 2, 4):
        assert len(passes(ending(num_passes=num_passes, max_depth=9))) == num_passes
    assert len(passes(ending(num_passes=9, max_depth=3, rows_per_pass=64))) == 3, "nothing is fed at full depth"


def test_with_one_candidate_a_place_a_chain_grows_whatever_is_likelier_beside_it():
    one = ending(rows_per_pass=1, fanout=1, num_passes=5)
    fed = passes(one)
    assert [len(path) for (path,) in fed] == [0, 1, 2, 3, 4]
    new_nodes = one.report()
    assert (new_nodes.parents.tolist(), set(new_nodes.ranks.tolist())) == ([ROOT, 0, 1, 2, 3], {0})


def test_a_chain_is_as_long_as_was_asked_however_unsure_the_draft_is():
    one = TreeBuilder()
    one.set_spec(TreeSpec.chain(40))
    depths = []
    while one.being_fed:
        depths += [one.depths[node] for node in one.being_fed]
        one.take([Candidates((1, 2), 0.01, shares=(0.01, 0.01))])
        one.count_pass()
        one.feed_pass(64)
    assert (depths, len(one.report())) == (list(range(40)), 40)


def test_it_ends_where_a_pass_reaches_too_little():
    whole, ended = (
        passes(ending(num_passes=9, max_depth=9)),
        passes(ending(num_passes=9, max_depth=9, min_path_prob=0.5)),
    )
    assert 1 < len(ended) < len(whole)
    assert ended == whole[: len(ended)]
    assert len(passes(ending(min_path_prob=100.0))) == 1, "without the root there would be no guess"


@pytest.mark.parametrize(
    ("measure", "bound", "is_grown"),
    [
        (Measure.MARGIN, 0.749, True),
        (Measure.MARGIN, 0.751, False),
        (Measure.CONFIDENCE, 0.6, True),
        (Measure.CONFIDENCE, 0.61, False),
        (Measure.ENTROPY, math.exp(-0.5), True),
        (Measure.ENTROPY, math.exp(-0.49), False),
    ],
)
def test_nothing_grows_where_the_draft_is_less_sure(measure, bound, is_grown):
    """The log odds of 0.6 over 0.4 and over 0.1 have e^0 and more between them: the lead is 1 / (1 + 1/3)."""
    one = ending(measure=measure, min_confidence=bound)
    one.take([Candidates((1, 2), 0.6, 0.5, shares=(0.6, 0.1))])
    assert bool(one.children(0)) is is_grown
    new_nodes = one.report()
    assert len(new_nodes) == (2 if is_grown else 0)
    confidence = {Measure.MARGIN: 0.75, Measure.CONFIDENCE: 0.6, Measure.ENTROPY: math.exp(-0.5)}[measure]
    assert new_nodes.confidences == pytest.approx((confidence,) * len(new_nodes))


def test_a_pass_feeds_no_more_than_there_is_room_for():
    one = ending()
    one.take([said_after([])])
    one.count_pass()
    one.feed_pass(2)
    assert len(one.feeding) == 2
    one.put_back()
    one.feed_pass(0)
    assert not one.feeding


# Draws


LAWS = st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0.0, 2.0)), min_size=4, max_size=4)
"""How sure the draft is after each of so many tokens, and the entropy there."""


def drawn_after(laws, depth, choice):
    """Report of a draft that samples: its candidates in order, and a draw that is any of them."""
    confidence, entropy = laws[min(depth, len(laws) - 1)]
    ranked = (10 * depth + 1, 10 * depth + 2, 10 * depth + 3)
    q = SparseDistribution(ranked, (confidence, (1 - confidence) * 0.75, (1 - confidence) * 0.25))
    return Candidates(ranked, confidence, entropy, ranked[choice], q)


def drawing(tree_spec, laws, choices):
    """Growth to its end; each place's draw is the candidate of that rank. How many nodes were fed, and what was told"""
    one, num_fed = TreeBuilder(), 0
    one.set_spec(tree_spec)
    while one.being_fed:
        depths = [one.depths[node] for node in one.being_fed]
        num_fed += len(depths)
        one.take([drawn_after(laws, depth, choices[depth]) for depth in depths])
        one.count_pass()
        one.feed_pass(64)
    return num_fed, one.report()


def test_a_draft_that_samples_grows_a_chain_of_its_draws_and_tells_what_each_was_drawn_from():
    """However many rows and candidates were asked for: there is one draw at a place."""
    laws = [(0.5, 0.1)] * 4
    num_fed, new_nodes = drawing(TreeSpec(4, 5, num_passes=5, tail=(0.5, 0.25)), laws, (2, 0, 1, 2, 1))
    assert num_fed == 5
    assert new_nodes.tokens.tolist() == [3, 11, 22, 33, 42]
    assert new_nodes.parents.tolist() == [ROOT, 0, 1, 2, 3]
    assert new_nodes.q == tuple(drawn_after(laws, depth, 0).q for depth in range(5))


@given(
    laws=LAWS,
    first=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    other=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    min_path_prob=st.sampled_from([0.0, 0.1, 0.4]),
    min_confidence=st.sampled_from([0.0, 0.2, 0.6]),
    measure=st.sampled_from(Measure),
)
def test_whether_growth_goes_on_below_a_node_does_not_depend_on_what_was_drawn_there(
    laws, first, other, min_path_prob, min_confidence, measure
):
    """The third trap of docs/exactness.md, section 4: here q is the same whatever was drawn, and so the block's length,
    what is told of each guess, and what was fed must be."""
    tree_spec = TreeSpec(
        2,
        6,
        min_path_prob,
        num_passes=6,
        tail=(0.5, 0.25),
        measure=measure,
        min_confidence=min_confidence,
        calibration=(0.3, 0.9),
    )
    (num_fed, new_nodes), (num_others_fed, others) = (drawing(tree_spec, laws, draws) for draws in (first, other))
    assert (num_fed, len(new_nodes)) == (num_others_fed, len(others))
    assert new_nodes.q == others.q
    for column in ("parents", "ranks", "chances", "confidences"):
        assert getattr(new_nodes, column).tolist() == getattr(others, column).tolist()


def test_what_was_chosen_has_no_law():
    one = builder()
    feed([one], 1)
    new_nodes = one.report()
    assert len(new_nodes) > 0
    assert new_nodes.q == ()
    assert said_after((0,)).q == NO_Q
