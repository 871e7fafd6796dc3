"""All policies learn the same figures, and no token id reaches them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from types import UnionType
from typing import get_args

import pytest

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.records import (
    GenerationRequest,
    Policy,
    Sampling,
    Timing,
    Verification,
)
from core.speculation.calibration import logistic, logit
from core.speculation.growth import NewNodes
from core.speculation.guesser import Guesses
from core.speculation.speculation_tree import SpeculationTree
from core.speculation.token_tree import ROOT
from core.speculation.tree_nodes import Part
from orchestrator.policy.choice import TreeView
from orchestrator.policy.growth import TIMEOUT_PASSES, Growth
from orchestrator.policy.policies import Controller, Policies
from orchestrator.policy.policy import Found, RoundOutcome, Shape
from orchestrator.policy.shared_estimates import MAX_HELD, SharedEstimates
from orchestrator.policy.tree_policy import TreePolicy

POLICIES = get_args(Policy)


def request(temperature=1.0, verification=Verification.COUPLED, **changes):
    return GenerationRequest("r", (1, 2, 3), Sampling(temperature=temperature), 100, verification, **changes)


def chain(num, confidence=0.9):
    return Shape(tuple(range(-1, num - 1)), (0,) * num, (confidence,) * num)


def verdict(shape, num_accepted, verify_s=0.025, rows=None, found=Found.HIT):
    timing = Timing(0.0, verify_s, 1, rows or len(shape) + 1)
    return RoundOutcome(shape, tuple(range(num_accepted)), found, verify_s + 0.001, timing)


def drafted(num_passes=4, pass_s=0.003, rows=8):
    timing = Timing(0.0, num_passes * pass_s, num_passes, num_passes * rows)
    return num_passes * pass_s + 0.001, timing


FORKED = Shape((-1, 0, 0, 1), (0, 0, 1, 0), (0.6,) * 4)


def test_what_branches_cost_is_learned_from_passes_that_nobody_shared():
    for others, learned in ((0, 0.004), (3, 0.0)):
        policy = Controller(SpeculationConfig()).policy(request())
        for index in range(200):
            shape, branch_s = (FORKED, 0.004) if index % 3 == 0 else (chain(4), 0.0)
            time_s = 0.025 + branch_s + 1e-4 * (index % 7)
            policy.observe_round(verdict(shape, 2, time_s, rows=5 + others))
        assert policy._known.costs.branch_s == pytest.approx(learned, rel=0.15)


def test_costs_are_looked_at_anew_when_sessions_have_come_or_gone():
    controls = Controller(SpeculationConfig())
    policies = [controls.policy(request()) for _ in range(8)]
    knowledge = policies[0]._known
    assert knowledge.costs.num_verifying == 8
    for policy in policies[2:]:
        policy.close()
    assert knowledge.costs.num_verifying == 2


def test_a_draft_is_learned_about_that_is_never_believed():
    policy = Controller(SpeculationConfig()).policy(request())
    for is_right in (True, False):
        for _ in range(600):
            timing = Timing(0.0, 0.02, 1, 1)
            policy.observe_round(RoundOutcome(Shape(), (), Found.HIT, 0.021, timing, unverified=(0.9, is_right)))
        shift = policy._learned.calibration.shift
        assert logistic(shift + logit(0.9)) == pytest.approx(float(is_right), abs=0.2)
        assert policy._learned.accepted.value == pytest.approx(float(is_right), abs=0.1)


def leaves(kind, path, found):
    """Everything below a type that is neither a record nor a container of them, with the way to it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            leaves(hints[field.name], f"{path}.{field.name}", found)
    elif origin in (typing.Union, UnionType) or origin is not None:
        for arg in args:
            if arg not in (Ellipsis, type(None)):
                leaves(arg, path, found)
    else:
        found.add((path, kind))
    return found


def parameters(protocol):
    """Parameters of a protocol's methods."""
    found = set()
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_"):
            continue
        for parameter, kind in typing.get_type_hints(method).items():
            if parameter != "return":
                leaves(kind, f"{name}.{parameter}", found)
    return found


ALLOWED_INTS = {
    "tree_spec.context_left",
    "tree_spec.turn",
    "choose.max_nodes",
    "choose.max_depth",
    "choose_draws.max_nodes",
    "choose_draws.max_depth",
    "kept.max_nodes",
    "is_worth_waiting.num_passes",
    "is_offer_due.num_now",
    "is_worth_a_plain_step.num_now",
    "is_worth_asking.num_nodes",
    "is_worth_asking.num_with",
    "observe_interval.round_.num_tokens",
    "why_block.branches",
    "observe_pass.timing.num_passes",
    "observe_pass.timing.num_rows",
    "observe_pass.timing.num_sessions",
    "observe_round.outcome.shape.parents",
    "observe_round.outcome.shape.ranks",
    "observe_round.outcome.path",
    "observe_round.outcome.gained",
    "observe_round.outcome.timing.num_passes",
    "observe_round.outcome.timing.num_rows",
    "observe_round.outcome.timing.num_sessions",
    "observe_draft.timing.num_passes",
    "observe_draft.timing.num_rows",
    "observe_draft.timing.num_sessions",
}
"""Node numbers, ranks, depths and counts: none of them a token id."""


def test_no_token_id_can_reach_a_policy():
    """The bias rule by structure: whatever a policy does, it cannot look at what was drawn.

    All that a policy is told is walked through, type by type. Token ids are integers, so each integer has to be known
    by name here, and nothing may come that is no number, truth value or name out of a fixed list.
    """
    found = parameters(TreePolicy)
    assert {path for path, kind in found if kind is int} == ALLOWED_INTS
    assert {kind for _, kind in found} <= {int, float, bool, Found, TreeView, Growth}, (
        "a policy that another follows knows no tokens either"
    )


class BlindTree:
    """A tree with all that a `TreeView` has, and nothing else."""

    def __init__(self, tree):
        self._tree = tree

    def __getattr__(self, name):
        assert name in VIEWED, f"a policy looks at {name} of a tree"
        return getattr(self._tree, name)


VIEWED = {name for name in vars(TreeView) if not name.startswith("_")}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_chooses_nodes_of_a_tree_whose_tokens_it_cannot_see(policy):
    assert {"has_drafted", "best", "first_chain"} == VIEWED
    assert not {"tokens", "nodes"} & {name for name in dir(Part) if not name.startswith("_")}
    tree = SpeculationTree()
    assert len(Controller(SpeculationConfig(policy=policy)).policy(request()).choose(BlindTree(tree), 9, 9)) == 0
    new_nodes = NewNodes(0, (ROOT, ROOT, 0, 2), (10, 11, 12, 13), (0, 1, 0, 0), (0.9, 0.1, 0.9, 0.9), (0.9,) * 4)
    tree.add(new_nodes)
    tree.add_guesses(Guesses.chain((30, 31), (0.9, 0.9)))
    policy = Controller(SpeculationConfig(policy=policy)).policy(request())
    assert len(policy.choose(BlindTree(tree), 9, 9)) > 0


def test_a_policy_forgets_the_request_that_it_is_made_for():
    """The request has a prompt in it, and the output so far where it is resumed; but no guess, and none is kept."""
    guess_free = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert not guess_free & {"block", "draft", "drafted", "table"}
    assert {path.split(".")[0] for path, _ in parameters(Policies)} == {"policy"}
    for policy in POLICIES:
        asked = request()
        policy = Controller(SpeculationConfig(policy=policy)).policy(asked)
        policy.observe_round(verdict(chain(2), 1))
        assert not reaches(policy, asked, set())


def reaches(held, wanted, seen):
    """Whether `wanted` can be got at from `held`."""
    if held is wanted or (isinstance(held, tuple) and held is wanted.prompt):
        return True
    if id(held) in seen or isinstance(held, (int, float, str, bytes, type(None))):
        return False
    seen.add(id(held))
    inner = list(getattr(held, "__dict__", {}).values())
    inner += [getattr(held, name) for name in getattr(held, "__slots__", ()) if hasattr(held, name)]
    if isinstance(held, dict):
        inner += [*held.keys(), *held.values()]
    elif isinstance(held, (list, tuple, set, frozenset)):
        inner += list(held)
    return any(reaches(each, wanted, seen) for each in inner)


def test_nobody_sets_an_attribute_of_a_policy_from_outside():
    setting = re.compile(r"^.*polic(y|ies)\b(\[\w+\])?\.\w+ [-+|&]?= .*$", re.MULTILINE)
    for package in ("orchestrator", "simulation"):
        for path in (Path(__file__).parents[3] / package).rglob("*.py"):
            assert [match[0] for match in setting.finditer(path.read_text())] == [], path


@pytest.mark.parametrize("policy", POLICIES)
def test_a_report_says_why_as_soon_as_a_session_has_begun(policy):
    controls = Controller(SpeculationConfig(policy=policy))
    assert controls.report().reason == ""
    chosen = controls.policy(request())
    report = controls.report()
    assert "gamma" in report.reason
    assert any(letter.isdigit() for letter in report.reason)
    assert (report.policy, report.num_sessions, report.num_changes) == (policy, 1, 0)
    assert report.draft_tokens > 0
    chosen.close()
    chosen.close()
    assert controls.report().num_sessions == 0


@pytest.mark.parametrize("floor", [-0.1, 1.1, float("nan")])
def test_a_least_path_probability_is_a_probability(floor):
    with pytest.raises(ConfigError, match=r"min_path_probability must be in \[0, 1\]"):
        SpeculationConfig(min_path_probability=floor)


def timeout_s(pass_s):
    """A policy whose draft takes this long for a pass, after a request for a block of four."""
    config = SpeculationConfig(policy="static", max_draft_tokens=4, pipelining=False)
    policy = Controller(config).policy(request())
    for _ in range(40):
        policy.observe_draft(*drafted(pass_s=pass_s, rows=1))
        policy.observe_round(verdict(chain(2), 1))
    policy.tree_spec(100, 8)
    return policy.timeout_s


def test_the_timeout_is_the_configured_one_unless_the_draft_is_usually_slower():
    assert timeout_s(0.003) == timeout_s(0.025) == SpeculationConfig().draft_timeout_s
    assert timeout_s(0.3) == pytest.approx(TIMEOUT_PASSES * 4 * 0.3, rel=0.01)


@pytest.mark.parametrize("served", POLICIES)
def test_a_request_says_for_itself_which_policy_it_has_and_whether_it_drafts_in_turn(served):
    controls = Controller(SpeculationConfig(policy=served, pipelining=served == "static"))
    usual = {policy: type(Controller(SpeculationConfig(policy=policy)).policy(request())) for policy in POLICIES}
    for policy in POLICIES:
        for pipelining in (True, False):
            chosen = controls.policy(request(policy=policy, pipelining=pipelining))
            assert type(chosen) is usual[policy]
            assert chosen.is_in_turn is not pipelining
    assert controls.policy(request()).is_in_turn is (served != "static")
    assert controls.report().policy == served


def held(num_sessions):
    """A timing of an engine that holds so many sessions."""
    return Timing(0.0, 0.01, 1, 1, num_sessions)


@pytest.mark.parametrize(
    ("num_own", "num_held", "shared"),
    [(8, 2, 2.0), (8, 8, 8.0), (4, 16, 16.0), (8, 1, 1.0)],
    ids=["four engines", "one engine", "four orchestrators", "an engine each"],
)
def test_engines_say_how_many_sessions_share_them(num_own, num_held, shared):
    knowledge = SharedEstimates()
    knowledge.num_sessions = num_own
    assert knowledge.costs.num_verifying == knowledge.costs.num_drafting == num_own
    for _ in range(20):
        knowledge.observe_verdict(held(num_held))
    assert (knowledge.costs.num_verifying, knowledge.costs.num_drafting) == (shared, num_own)
    knowledge.num_with_draft = num_own
    for _ in range(20):
        knowledge.observe_growth(held(num_held))
    assert (knowledge.costs.num_verifying, knowledge.costs.num_drafting) == (shared, shared)


def test_half_as_many_sessions_share_engines_half_as_much_at_once():
    """Eight targets and one draft: when six of eight sessions have ended, a target still has one."""
    knowledge = SharedEstimates()
    knowledge.num_sessions = knowledge.num_with_draft = 8
    for _ in range(20):
        knowledge.observe_verdict(held(1))
        knowledge.observe_growth(held(8))
    assert (knowledge.costs.num_verifying, knowledge.costs.num_drafting) == (1.0, 8.0)
    knowledge.num_sessions = 2
    assert (knowledge.costs.num_verifying, knowledge.costs.num_drafting) == (1.0, 2.0)


def test_sessions_that_rest_do_not_make_a_draft_look_as_if_there_were_several():
    controls = Controller(SpeculationConfig())
    policies = [controls.policy(request()) for _ in range(8)]
    knowledge = policies[0]._known
    for policy in policies:
        policy.begin_drafting()
    for policy in policies[:6]:
        policy.end_drafting()
        policy.end_drafting()
    assert (knowledge.num_sessions, knowledge.num_with_draft) == (8, 2)
    for _ in range(20):
        policies[7].observe_pass(held(2))
    assert knowledge.costs.num_drafting == 8.0
    for policy in policies:
        policy.close()
    assert (knowledge.num_sessions, knowledge.num_with_draft) == (0, 0)


@pytest.mark.parametrize("num_held", [0, MAX_HELD + 1, 2**32 - 1])
def test_an_engine_that_does_not_say_or_lies_changes_nothing(num_held):
    knowledge = SharedEstimates()
    knowledge.num_sessions = 3
    for _ in range(20):
        knowledge.observe_verdict(held(num_held))
    assert knowledge.costs.num_verifying == 3.0


def test_what_a_target_measured_at_start_is_known_before_the_first_verdict_and_passes_replace_it():
    known = Controller(SpeculationConfig(), [(1, 0.010), (8, 0.013), (32, 0.040)])._known
    assert known.costs.verify_s(31) - known.costs.verify_s(0) == pytest.approx(0.030)
    assert known.costs.verify_s(7) - known.costs.verify_s(0) == pytest.approx(0.003)
    for _ in range(20):
        known.verify.passes.observe(8, 0.016)
    known.observe_verdict(None)
    known._costs = None
    assert known.costs.verify_s(7) - known.costs.verify_s(0) == pytest.approx(0.006)
