"""The named policies over a session's tree: what each takes out of a small one, worked out by hand."""

from __future__ import annotations

import math

import pytest

from core.config import SpeculationConfig
from core.records import Timing
from core.speculation.growth import Measure, NewNodes
from core.speculation.guesser import Guesses
from core.speculation.speculation_tree import SpeculationTree
from core.speculation.token_tree import ROOT
from orchestrator.policy.growth import CATCH_UP
from orchestrator.policy.policies import Controller
from orchestrator.policy.policy import Found, RoundOutcome, Shape
from tests.orchestrator.fakes import request

CHAIN = ("static", "heuristic", "confidence", "path_probability", "entropy")


def make_policy(policy, *, pipelining=True, gamma=6, **settings):
    config = SpeculationConfig(policy=policy, pipelining=pipelining, max_draft_tokens=gamma, **settings)
    return Controller(config).policy(request())


def tree(*confidences):
    """A chain 10, 11, 12, ... told with these; beside its first node the second candidate 20, with 21 below."""
    found, num = SpeculationTree(), len(confidences)
    parents = (*range(ROOT, num - 1), ROOT, num)
    tokens = (*range(10, 10 + num), 20, 21)
    found.add(
        NewNodes(
            0, parents, tokens, (0,) * num + (1, 0), (0.8,) * num + (0.15, 0.9), (*confidences, confidences[0], 0.9)
        )
    )
    return found


def chosen(each, grown, max_depth=100):
    return list(grown.block(each.choose(grown, 100, max_depth)).tokens)


@pytest.mark.parametrize(
    ("policy", "settings", "tokens"),
    [
        ("static", {"gamma": 3}, [10, 11, 12]),
        ("static", {"gamma": 8}, [10, 11, 12, 13, 14]),
        ("heuristic", {"gamma": 8}, [10, 11, 12, 13]),
        ("confidence", {"min_confidence": 0.5}, [10, 11]),
        ("confidence", {"min_confidence": 0.95}, []),
        ("entropy", {"max_entropy": -math.log(0.6)}, [10, 11]),
        ("entropy", {"max_entropy": -math.log(0.3)}, [10, 11, 12, 13, 14]),
        ("path_probability", {"min_path_probability": 0.25}, [10, 11, 12]),
        ("path_probability", {"min_path_probability": 0.3}, [10, 11]),
        ("static_tree", {"max_block_tokens": 4}, [10, 11, 12, 13]),
        ("static_tree", {"max_block_tokens": 4, "gamma": 2}, [10, 11, 20, 21]),
    ],
)
def test_a_block_is_just_what_the_rule_says(policy, settings, tokens):
    """Products of how sure the draft was: 0.9, 0.72, 0.288, 0.2, 0.18. Chances: 0.8, 0.64, 0.51, 0.41, 0.33; 0.15."""
    assert chosen(make_policy(policy, **settings), tree(0.9, 0.8, 0.4, 0.7, 0.9)) == tokens


@pytest.mark.parametrize("policy", [*CHAIN, "static_tree"])
def test_a_block_is_no_deeper_than_there_are_tokens_left(policy):
    assert len(chosen(make_policy(policy, max_block_tokens=2), tree(0.99, 0.99, 0.99, 0.99), max_depth=2)) == 2


@pytest.mark.parametrize("policy", [*CHAIN, "static_tree"])
def test_looked_up_guesses_are_taken_where_the_draft_has_told_of_none(policy):
    each, grown = make_policy(policy), SpeculationTree()
    assert chosen(each, grown) == []
    grown.add_guesses(Guesses.chain((30, 31), (0.9, 0.9)))
    assert chosen(each, grown)[:1] == [30]
    drafted = tree(0.9, 0.9)
    drafted.add_guesses(Guesses.chain((30, 31), (0.99, 0.99)))
    assert 30 not in chosen(each, drafted)


def waits(each, grown, num_passes=1):
    each.choose(grown, 100, 100)
    return each.is_worth_waiting(num_passes, grown.has_drafted)


@pytest.mark.parametrize(
    ("policy", "settings", "confidences", "is_waiting"),
    [
        ("static", {"gamma": 3}, (0.9, 0.9), True),
        ("static", {"gamma": 3}, (0.9, 0.9, 0.9), False),
        ("confidence", {"min_confidence": 0.5}, (0.9, 0.9), True),
        ("confidence", {"min_confidence": 0.5}, (0.9, 0.4), False),
        ("path_probability", {"min_path_probability": 0.5}, (0.9, 0.5), False),
        ("static_tree", {"max_block_tokens": 4}, (0.9, 0.9), False),
        ("static_tree", {"max_block_tokens": 5}, (0.9, 0.9), True),
    ],
)
def test_a_block_is_waited_for_until_it_is_as_the_rule_wants_it(policy, settings, confidences, is_waiting):
    each = make_policy(policy, **settings)
    assert waits(each, tree(*confidences)) is is_waiting
    assert not waits(each, tree(*confidences), num_passes=each.max_depth + 1), "no longer than a block takes"


def test_in_turn_a_chain_grows_for_one_block_and_ends_by_itself():
    each = make_policy("static", pipelining=False, gamma=5)
    tree_spec = each.tree_spec(100, 5)
    assert (tree_spec.num_passes, tree_spec.max_depth, tree_spec.rows_per_pass, tree_spec.fanout) == (5, 5, 1, 1)
    assert each.tree_spec(100, 2).num_passes == 2, "tokens that are left"
    assert each.tree_spec(3, 5).max_depth == 3, "the draft's own context"
    assert each.tree_spec(100, 0) == CATCH_UP, "while the target works it takes in the text and no more"
    assert each.tree_spec(0, 5) is None
    assert make_policy("static", gamma=5).tree_spec(100, 0).num_passes == 0, "behind verification it goes on"


def test_in_turn_a_draft_stops_where_the_rule_ends_the_chain():
    sure = make_policy("confidence", pipelining=False, min_confidence=0.4).tree_spec(100, 6)
    assert (sure.measure, sure.min_confidence) == (Measure.CONFIDENCE, 0.4)
    entropy = make_policy("entropy", pipelining=False, max_entropy=2.0).tree_spec(100, 6)
    assert (entropy.measure, entropy.min_confidence) == (Measure.ENTROPY, pytest.approx(math.exp(-2.0)))
    path = make_policy("path_probability", pipelining=False, min_path_probability=0.1).tree_spec(100, 6)
    assert (path.min_path_prob, path.calibration) == (0.1, (0.0, 1.0)), "by the draft's own chances"
    fixed = make_policy("static_tree", pipelining=False, gamma=6, max_block_tokens=12).tree_spec(100, 6)
    assert (fixed.num_passes, fixed.rows_per_pass, fixed.max_depth, fixed.calibration) == (6, 2, 6, (0.0, 1.0))


def seen(num_guesses, num_accepted, ranks=None):
    shape = Shape(tuple(range(-1, num_guesses - 1)), ranks or (0,) * num_guesses, (0.9,) * num_guesses)
    timing = Timing(0.0, 0.025, 1, num_guesses + 1)
    return RoundOutcome(shape, tuple(range(num_accepted)), Found.HIT, 0.026, timing)


def test_the_heuristic_goes_two_up_and_one_down():
    controls = Controller(SpeculationConfig(policy="heuristic", max_draft_tokens=7))
    each, gammas = controls.policy(request()), []
    for num_guesses, num_accepted in ((4, 4), (6, 6), (7, 7), (7, 2), (6, 0), (0, 0), (2, 2)):
        lookup = (-1,) * num_guesses if num_guesses == 2 else None
        each.observe_round(seen(num_guesses, num_accepted, lookup))
        gammas.append(len(chosen(each, tree(*[0.9] * 9))))
    assert gammas == [6, 7, 7, 6, 5, 5, 5], "neither plain rounds nor lookups say anything about the draft"
    assert "gamma 6 -> 5, 0 of 6 guesses" in controls.report().reason


@pytest.mark.parametrize("policy", ["static_tree", "path_probability"])
def test_what_goes_by_the_drafts_own_chances_learns_none(policy):
    each = make_policy(policy, pipelining=False)
    before = each.tree_spec(100, 6)
    for _ in range(100):
        each.observe_round(seen(4, 0))
    assert each.tree_spec(100, 6) == before


@pytest.mark.parametrize("policy", [*CHAIN, "static_tree"])
def test_a_request_that_forbids_drafts_grows_none(policy):
    each = Controller(SpeculationConfig(policy=policy)).policy(request(max_draft_tokens=0))
    assert each.tree_spec(100, 0) is None
    assert each.gamma == 0
