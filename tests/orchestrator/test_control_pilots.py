"""Pilots of all policies where a draft is asked: what for, what they say of it, and that no token id can reach them."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from types import UnionType
from typing import get_args

import pytest
from core.control import FIRST_PAUSE, Decision, State
from core.planning import Plan

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.records import (
    GenerationRequest,
    Policy,
    Sampling,
    Timing,
    Verification,
)
from core.trees import NO_GROWTH, ROOT, Growth, depths
from orchestrator import course
from orchestrator.control import Controls, Pilots
from orchestrator.knowledge import LOAD_CHANGE, Knowledge
from orchestrator.pilot import AskedPilot, DraftSeen, Found, RoundSeen, Shape, Source
from orchestrator.watching import MAX_PATIENCE_S

POLICIES = get_args(Policy)
IN_TURN = SpeculationConfig(pipelining=False)


def request(temperature=1.0, verification=Verification.REJECTION, **changes):
    """Whose draft is asked for each block; `test_tree_pilots` has the others."""
    return GenerationRequest("r", (1, 2, 3), Sampling(temperature=temperature), 100, verification, **changes)


def chain(num, confidence=0.9, entropy=0.5, source=Source.DRAFT):
    return Shape(tuple(range(-1, num - 1)), (0,) * num, (confidence,) * num, (entropy,) * num, source)


def verdict(shape, num_accepted, verify_s=0.025, rows=None, found=Found.HIT, rank=0):
    timing = Timing(0.0, verify_s, 1, rows or len(shape) + 1)
    num_listed = 0 if found is Found.NOT_ASKED else 4
    return RoundSeen(shape, tuple(range(num_accepted)), found, rank, num_listed, verify_s + 0.001, timing)


def drafted(num_passes=4, pass_s=0.003, rows=8):
    timing = Timing(0.0, num_passes * pass_s, num_passes, num_passes * rows)
    return DraftSeen(True, num_passes * pass_s + 0.001, timing)


def drive(pilot, num_rounds, alpha, verify_s=lambda rows: 0.025, draft_s=0.003, sessions=1):
    """Rounds in which every guess of a run of `alpha` is accepted, at these costs; the tokens that they yield."""
    tokens, luck = 0, 0.0
    for _ in range(num_rounds):
        shape = chain(min(max(pilot.plan.depth, 0), 8))
        shape = shape.prefix(pilot.num_to_verify(shape)) if len(shape) else shape
        num = 0
        while num < len(shape):
            luck = (luck + 0.6180339887) % 1.0
            if luck >= alpha:
                break
            num += 1
        tokens += num + 1
        rows = sessions * (len(shape) + 1)
        found, rank = Found.NOT_ASKED, None
        if pilot.wants_draft:
            if len(pilot.table(shape, 8)) and len(shape):
                found, rank = Found.HIT, 0
            pilot.block(8)
            pilot.saw_draft(drafted(pass_s=draft_s))
        pilot.saw_round(verdict(shape, num, verify_s(rows), rows, found, rank))
    return tokens


FORKED = Shape((-1, 0, 0, 1), (0, 0, 1, 0), (0.6,) * 4, (0.5,) * 4)


def test_what_branches_cost_is_learned_from_passes_that_nobody_shared():
    for others, learned in ((0, 0.004), (3, 0.0)):
        pilot = Controls(SpeculationConfig()).pilot(request())
        for index in range(200):
            shape, branch_s = (FORKED, 0.004) if index % 3 == 0 else (chain(4), 0.0)
            time_s = 0.025 + branch_s + 1e-4 * (index % 7)
            pilot.saw_round(verdict(shape, 2, time_s, rows=5 + others))
        assert pilot._known.economy().branch_s == pytest.approx(learned, rel=0.15)


def test_a_lookup_that_is_cut_stays_a_lookup():
    assert chain(4, source=Source.LOOKUP).prefix(2) == chain(2, source=Source.LOOKUP)


def on_trial():
    """A pilot that tries a plan with a table, after a time of drafting that paid."""
    pilot = Controls(SpeculationConfig()).pilot(request())
    drive(pilot, 60, alpha=0.8)
    course = pilot._course
    assert len(pilot.block(8)) > 0
    course._state, course._trying = State(plan=Plan(2, rows_per_pass=4), is_trial=True), pilot
    return pilot


def test_a_trial_tries_one_plan_and_nothing_else():
    pilot = on_trial()
    assert len(pilot.table(chain(2), 8)) > 0
    assert pilot.block(8) == NO_GROWTH


def test_who_shares_passes_goes_on_with_the_others_on_a_miss():
    controls = Controls(SpeculationConfig())
    pilot, *_ = (controls.pilot(request()) for _ in range(4))
    drive(pilot, 60, alpha=0.8, sessions=4)
    assert pilot.plan.rows_per_pass > 0
    assert pilot.block(8) == NO_GROWTH


def test_what_is_believed_is_doubted_as_a_trial_begins(monkeypatch):
    """So that the trial tells; what it has told is not doubted when it ends."""
    pilot = Controls(IN_TURN).pilot(request())
    drive(pilot, 60, alpha=0.8)
    told, doubted = [], []
    monkeypatch.setattr(type(pilot._profile), "doubt", lambda _: doubted.append(len(told)))
    for is_trial in (True, True, False, False, True):
        state = State(plan=Plan(2), is_trial=is_trial)
        monkeypatch.setattr(course, "decide", lambda _seen, _before, state=state: (Decision(state.plan), state))
        pilot._course._decide(pilot)
        told.append(is_trial)
    assert doubted == [0, 4]


def test_a_trial_ends_though_the_draft_is_late_each_time():
    pilot = on_trial()
    for _ in range(100):
        if not pilot._course._state.is_trial:
            break
        pilot.saw_late_draft()
        pilot.saw_round(verdict(chain(0), 0, found=Found.LATE, rank=None))
    assert not pilot._course._state.is_trial


def test_costs_are_looked_at_anew_when_sessions_have_come_or_gone():
    controls = Controls(SpeculationConfig())
    pilots = [controls.pilot(request()) for _ in range(8)]
    knowledge = pilots[0]._known
    assert knowledge.economy().num_verifying == pytest.approx(8, rel=LOAD_CHANGE - 1.0)
    for pilot in pilots[2:]:
        pilot.close()
    assert knowledge.economy().num_verifying == 2


def test_a_table_that_is_late_says_nothing_of_what_it_would_have_held():
    pilot = Controls(SpeculationConfig()).pilot(request())
    before = pilot._known.hits.mean()
    for found in (Found.LATE, Found.NOT_ASKED):
        pilot.saw_round(verdict(chain(2), 1, found=found, rank=None))
    assert pilot._known.hits.mean() == before
    pilot.saw_round(verdict(chain(2), 1, found=Found.MISS, rank=None))
    assert pilot._known.hits.mean() < before


# No token id


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
    """What the methods of a protocol take."""
    found = set()
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_"):
            continue
        for parameter, kind in typing.get_type_hints(method).items():
            if parameter != "return":
                leaves(kind, f"{name}.{parameter}", found)
    return found


SHAPE_INTS = {"parents", "ranks"}
ALLOWED_INTS = {
    "block.max_depth",
    "table.max_depth",
    "num_to_look_up.max_depth",
    "saw_round.seen.path",
    "saw_round.seen.rank",
    "saw_round.seen.num_listed",
    "saw_round.seen.timing.num_passes",
    "saw_round.seen.timing.num_rows",
    "saw_draft.seen.timing.num_passes",
    "saw_draft.seen.timing.num_rows",
    *(
        f"{where}.{name}"
        for where in ("table.shape", "num_to_verify.shape", "saw_round.seen.shape")
        for name in SHAPE_INTS
    ),
}
"""Node numbers, ranks, depths and counts: none of them a token id."""


def test_no_token_id_can_reach_a_pilot():
    """The bias rule by structure: whatever a policy does, it cannot look at what was drawn.

    All that a pilot is told is walked through, type by type. Token ids are integers, so each integer has to be known
    by name here, and nothing may come that is no number, truth value or name out of a fixed list.
    """
    found = parameters(AskedPilot)
    assert {path for path, kind in found if kind is int} == ALLOWED_INTS
    assert {kind for _, kind in found} <= {int, float, bool, Found, Source}


def test_a_pilot_forgets_the_request_that_it_is_made_for():
    """The request has a prompt in it, and the output so far where it is resumed; but no guess, and none is kept."""
    guess_free = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert not guess_free & {"block", "draft", "drafted", "table"}
    assert {path.split(".")[0] for path, _ in parameters(Pilots)} == {"pilot"}
    for policy in POLICIES:
        asked = request()
        pilot = Controls(SpeculationConfig(policy=policy)).pilot(asked)
        pilot.saw_round(verdict(chain(2), 1))
        assert not reaches(pilot, asked, set())


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


# All policies


@pytest.mark.parametrize("policy", POLICIES)
def test_a_report_says_why_as_soon_as_a_session_has_begun(policy):
    controls = Controls(SpeculationConfig(policy=policy))
    assert controls.report().reason == ""
    pilot = controls.pilot(request())
    report = controls.report()
    assert "gamma" in report.reason
    assert any(letter.isdigit() for letter in report.reason)
    assert (report.policy, report.num_sessions, report.num_changes) == (policy, 1, 0)
    assert report.draft_tokens > 0
    pilot.close()
    pilot.close()
    assert controls.report().num_sessions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_forbids_drafts_gets_none(policy):
    controls = Controls(SpeculationConfig(policy=policy))
    pilot = controls.pilot(request(max_draft_tokens=0))
    for _ in range(200):
        assert not pilot.wants_draft
        assert len(pilot.block(8)) == len(pilot.table(Shape(), 8)) == pilot.num_to_look_up(8) == 0
        pilot.saw_round(verdict(Shape(), 0, found=Found.NOT_ASKED, rank=None))
    assert "gamma 0" in controls.report().reason


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("asked", [1, 3])
def test_a_request_bounds_the_depth_of_its_blocks(policy, asked):
    pilot = Controls(SpeculationConfig(policy=policy)).pilot(request(max_draft_tokens=asked))
    block = pilot.block(8)
    depth = max(depths(block.parents), default=0)
    assert depth == asked
    shape = chain(asked)
    assert deepest_block(pilot.table(shape, 8), len(shape)) <= asked


@pytest.mark.parametrize("policy", POLICIES)
def test_no_block_is_deeper_than_there_are_tokens_left(policy):
    pilot = Controls(SpeculationConfig(policy=policy)).pilot(request())
    block = pilot.block(2)
    assert max(depths(block.parents)) == 2
    assert deepest_block(pilot.table(chain(3), 2), 3) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_without_pipelining_nothing_is_prepared(policy):
    pilot = Controls(SpeculationConfig(policy=policy, pipelining=False)).pilot(request())
    for _ in range(300):
        assert pilot.table(chain(3), 8) == NO_GROWTH
        pilot.saw_round(verdict(chain(3), 0, verify_s=0.05))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
def test_where_q_counts_blocks_are_chains_and_each_guess_is_a_sample(policy, verification):
    pilot = Controls(SpeculationConfig(policy=policy)).pilot(request(1.0, verification))
    block = pilot.block(8)
    assert block == Growth.chain(len(block))
    table = pilot.table(chain(3), 8)
    assert len(table) > 0
    children = [parent for parent in table.parents if parent >= 3]
    assert len(children) == len(set(children))
    assert all(rank == 0 for parent, rank in zip(table.parents, table.ranks, strict=True) if parent >= 3)


def deepest_block(growth, num_block):
    deep = {}
    for node, parent in enumerate(growth.parents, start=num_block):
        deep[node] = 0 if parent < num_block else deep[parent] + 1
    return max(deep.values(), default=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_says_for_itself_whether_anything_is_prepared(policy):
    """Those of one service may differ, and neither changes what the other does."""
    for served in (True, False):
        controls = Controls(SpeculationConfig(policy=policy, pipelining=served))
        in_turn, pipelined = (controls.pilot(request(pipelining=asked)) for asked in (False, True))
        for _ in range(20):
            assert in_turn.table(chain(3), 8) == NO_GROWTH
            assert pipelined.table(chain(3), 8) != NO_GROWTH
            for pilot in (in_turn, pipelined):
                pilot.saw_round(verdict(chain(3), 3, verify_s=0.05))


@pytest.mark.parametrize("served", POLICIES)
def test_a_request_says_for_itself_which_policy_it_has(served):
    controls = Controls(SpeculationConfig(policy=served, max_draft_tokens=5))
    pilots = {policy: controls.pilot(request(policy=policy)) for policy in POLICIES}
    assert pilots["static"].block(8) == Growth.chain(5)
    assert pilots["heuristic"].block(8) == Growth.chain(4)
    unsure = Shape((ROOT,), (0,), (0.1,), (1.0,))
    assert {policy for policy in POLICIES if not pilots[policy].num_to_verify(unsure)} == {"confidence"}
    assert controls.report().policy == served


# The named policies


def test_static_prepares_the_same_chain_below_each_outcome():
    pilot = Controls(SpeculationConfig(policy="static", max_draft_tokens=3, table_fanout=2)).pilot(request())
    assert pilot.block(8) == Growth.chain(3)
    assert pilot.block(2) == Growth.chain(2)
    table = pilot.table(chain(3), 8)
    outcomes = [parent for parent in table.parents if parent < 3]
    assert sorted(outcomes) == sorted([ROOT, 0, 1, 2] * 2)
    assert len(table) == 8 + 8 * 3


def test_a_static_table_that_is_full_cuts_what_is_unlikely():
    config = SpeculationConfig(policy="static", max_draft_tokens=4, table_fanout=8, max_table_tokens=20)
    table = Controls(config).pilot(request()).table(chain(4), 8)
    assert len(table) <= 20
    first = [rank for parent, rank in zip(table.parents, table.ranks, strict=True) if parent < 4]
    assert max(first) < 7


def test_the_heuristic_learns_nothing_from_a_round_without_guesses():
    pilot = Controls(SpeculationConfig(policy="heuristic", max_draft_tokens=7)).pilot(request())
    before = len(pilot.block(8))
    for shape in (Shape(), chain(2, source=Source.LOOKUP)):
        pilot.saw_round(verdict(shape, len(shape), found=Found.NOT_ASKED, rank=None))
    assert len(pilot.block(8)) == before


def test_the_heuristic_goes_two_up_and_one_down():
    controls = Controls(SpeculationConfig(policy="heuristic", max_draft_tokens=7))
    pilot = controls.pilot(request())
    gammas = [len(pilot.block(8))]
    for num_accepted in (4, 6, 7, 2, 1, 0, 0, 0, 0, 0, 0):
        shape = chain(gammas[-1])
        pilot.saw_round(verdict(shape, min(num_accepted, len(shape))))
        gammas.append(len(pilot.block(8)))
    assert gammas == [4, 6, 7, 7, 6, 5, 4, 3, 2, 1, 1, 1]
    assert "gamma 2 -> 1, 0 of 2 guesses" in controls.report().reason
    pilot.saw_round(verdict(chain(3, source=Source.LOOKUP), 0))
    assert len(pilot.block(8)) == 1, "lookups say nothing about the draft"


@pytest.mark.parametrize(
    ("policy", "sure", "unsure"),
    [("confidence", {"confidence": 0.41}, {"confidence": 0.39}), ("entropy", {"entropy": 1.9}, {"entropy": 2.1})],
)
def test_sure_policies_cut_where_the_draft_is_unsure(policy, sure, unsure):
    pilot = Controls(SpeculationConfig(policy=policy)).pilot(request())
    assert pilot.num_to_verify(chain(4, **sure)) == 4
    assert pilot.num_to_verify(chain(4, **unsure)) == 0
    lookup = chain(4, **unsure, source=Source.LOOKUP)
    assert pilot.num_to_verify(lookup) == 4


@pytest.mark.parametrize("policy", ["static_tree", "path_probability"])
@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
def test_where_q_counts_they_ask_for_the_samples_that_static_asks_for(policy, verification):
    """No draft chooses there among its samples, and trees are not taken."""
    controls = Controls(SpeculationConfig(max_draft_tokens=4, max_block_tokens=16))
    fixed, other = (controls.pilot(request(1.0, verification, policy=name)) for name in ("static", policy))
    assert other.block(8) == fixed.block(8) == Growth.chain(4)
    assert other.table(chain(4), 8) == fixed.table(chain(4), 8)
    if policy == "static_tree":
        assert other.num_to_verify(chain(4, confidence=0.01)) == 4


def test_a_chain_ends_where_the_product_of_the_drafts_chances_is_too_small():
    config = SpeculationConfig(policy="path_probability", max_draft_tokens=6, min_path_probability=0.3)
    pilot = Controls(config).pilot(request())
    assert pilot.num_to_verify(chain(6, confidence=0.7)) == 3, "0.343, and 0.24 is too small"
    assert pilot.num_to_verify(chain(6, confidence=0.99)) == 6
    assert pilot.num_to_verify(chain(6, confidence=0.29)) == 0
    assert pilot.num_to_verify(chain(6, confidence=0.29, source=Source.LOOKUP)) == 6
    sampled = Controls(config).pilot(request(1.0, Verification.REJECTION))
    assert sampled.num_to_verify(chain(6, confidence=0.7)) == 3


@pytest.mark.parametrize("floor", [-0.1, 1.1, float("nan")])
def test_a_least_path_probability_is_a_probability(floor):
    with pytest.raises(ConfigError, match=r"min_path_probability must be in \[0, 1\]"):
        SpeculationConfig(min_path_probability=floor)


# The adaptive policy


def steep(rows):
    """A pass whose every row costs: 20 ms and 4 ms a row."""
    return 0.02 + 0.004 * rows


def test_drafting_that_cannot_pay_is_left_rarely_tried_and_taken_up_again():
    controls = Controls(SpeculationConfig(pipelining=False))
    pilot = controls.pilot(request())
    drive(pilot, 60, alpha=0.05, verify_s=steep, draft_s=0.02)
    asked = []
    for _ in range(400):
        drive(pilot, 1, alpha=0.05, verify_s=steep, draft_s=0.02)
        asked.append(pilot.wants_draft)
    assert 0 < sum(asked) < 0.15 * len(asked)
    late, early = sum(asked[200:]), sum(asked[:200])
    assert late <= early
    drive(pilot, 800, alpha=0.95, draft_s=0.001)
    assert pilot.wants_draft
    assert pilot.plan.depth >= 3
    assert controls.report().num_changes > 0


def test_while_the_draft_rests_nothing_is_asked_of_it():
    pilot = Controls(SpeculationConfig(pipelining=False)).pilot(request())
    drive(pilot, 60, alpha=0.05, verify_s=steep, draft_s=0.02)
    for _ in range(60):
        if pilot.wants_draft:
            drive(pilot, 1, alpha=0.05, verify_s=steep, draft_s=0.02)
    assert not pilot.wants_draft
    assert pilot.block(8) == pilot.table(chain(2), 8) == NO_GROWTH


def test_only_one_of_many_sessions_makes_a_trial():
    controls = Controls(SpeculationConfig(pipelining=False))
    pilots = [controls.pilot(request()) for _ in range(8)]
    trying = []
    for _ in range(150):
        for pilot in pilots:
            drive(pilot, 1, alpha=0.05, verify_s=steep, draft_s=0.02, sessions=8)
        trying.append(sum(pilot.wants_draft for pilot in pilots))
    assert 1 in trying[40:]
    assert max(trying[40:]) == 1
    trier = next((pilot for pilot in pilots if pilot.wants_draft), None)
    for _ in range(400):
        if trier is not None:
            break
        for pilot in pilots:
            drive(pilot, 1, alpha=0.05, verify_s=steep, draft_s=0.02, sessions=8)
        trier = next((pilot for pilot in pilots if pilot.wants_draft), None)
    assert trier.num_to_verify(chain(2, confidence=0.01)) == 2, "a trial is to learn, whatever it costs"
    trier.close()
    rest = [pilot for pilot in pilots if pilot is not trier]
    for pilot in rest:
        drive(pilot, 1, alpha=0.05, verify_s=steep, draft_s=0.02, sessions=8)
    assert sum(pilot.wants_draft for pilot in rest) == 1, "another one goes on with it"


def test_a_session_that_has_no_draft_does_not_keep_the_others_from_trying():
    controls = Controls(SpeculationConfig(pipelining=False))
    pilots = [controls.pilot(request()) for _ in range(2)]
    for _ in range(600):
        for pilot in pilots:
            drive(pilot, 1, alpha=0.05, verify_s=steep, draft_s=0.02, sessions=8)
        if any(pilot.wants_draft for pilot in pilots):
            break
    trier = next(pilot for pilot in pilots if pilot.wants_draft)
    other = next(pilot for pilot in pilots if pilot is not trier)
    for _ in range(200):
        trier.saw_round(verdict(Shape(), 0, steep(8), 8, Found.NOT_ASKED, None))  # and no word from its draft
        if not other.wants_draft:
            other.saw_round(verdict(Shape(), 0, steep(8), 8, Found.NOT_ASKED, None))
        if other.wants_draft:
            return
    pytest.fail("the trial stays with a session that cannot make it")


def test_sessions_that_share_engines_share_a_plan():
    controls = Controls(IN_TURN)
    pilots = [controls.pilot(request()) for _ in range(6)]
    for number in range(40):
        for index, pilot in enumerate(pilots):
            drive(pilot, 1, alpha=0.95 if (index + number) % 2 else 0.4)
        assert len({pilot.plan for pilot in pilots}) == 1


def test_a_row_that_costs_more_than_its_guess_is_worth_is_not_verified():
    """Nearly every guess is kept while rows are free; where they cost, only those that are likely enough."""
    free, dear = (Controls(IN_TURN).pilot(request()) for _ in range(2))
    drive(free, 60, alpha=0.7)
    for rows in (1, 3, 6, 12, 24, 48) * 6:
        dear.saw_round(verdict(Shape(), 0, 0.01 + 0.02 * rows, rows, Found.NOT_ASKED, None))
    drive(dear, 40, alpha=0.7, verify_s=lambda rows: 0.01 + 0.02 * rows)
    shape = chain(8)
    assert free.num_to_verify(shape) >= 5
    assert dear.num_to_verify(shape) < free.num_to_verify(shape)
    assert dear.num_to_verify(chain(8, confidence=0.01)) >= 1, "what is never verified is never learned"
    lookup = chain(8, source=Source.LOOKUP)
    assert dear.num_to_verify(lookup) == 8, "what is looked up was priced when it was asked for"


def patience_s(pass_s):
    """Of a pilot whose draft takes so long for a pass, when it has been asked for a table."""
    pilot = Controls(SpeculationConfig(policy="static", max_draft_tokens=4)).pilot(request())
    for _ in range(40):
        pilot.saw_draft(drafted(pass_s=pass_s))
        pilot.saw_round(verdict(chain(2), 1))
    pilot.table(chain(4), 8)
    return pilot.patience_s


def test_patience_is_a_few_times_the_usual_pace_and_bounded_unless_the_draft_is_usually_slower():
    assert patience_s(0.003) == SpeculationConfig().draft_timeout_s
    assert patience_s(0.025) == MAX_PATIENCE_S == 0.4
    assert patience_s(0.3) > 1.0


def test_lookups_are_given_up_where_they_never_hit_and_kept_where_they_do():
    for num_accepted, is_kept in ((0, False), (4, True)):
        pilot = Controls(SpeculationConfig()).pilot(request())
        assert 0 < pilot.num_to_look_up(8) <= 3, "little is risked at first"
        for _ in range(60):
            pilot.saw_round(verdict(chain(4, source=Source.LOOKUP), num_accepted, steep(5), 5, Found.NOT_ASKED, None))
            pilot.saw_round(verdict(Shape(), 0, steep(1), 1, Found.NOT_ASKED, None))
            pilot.saw_round(verdict(Shape(), 0, steep(9), 9, Found.NOT_ASKED, None))
        assert (pilot.num_to_look_up(8) > 0) is is_kept
    assert pilot.num_to_look_up(2) <= 2


def test_a_decision_explains_itself_with_its_figures():
    controls = Controls(IN_TURN)
    pilot = controls.pilot(request())
    drive(pilot, 200, alpha=0.3, verify_s=steep)
    report = controls.report()
    assert report.num_changes > 0
    for figure in ("rejection: gamma", "sessions", "rows", "ms against", "tokens in", "x of plain"):
        assert figure in report.reason
    assert report.acceptance[0] == pytest.approx(0.3, abs=0.15)
    assert report.verify_s
    assert report.draft_s


def test_what_to_do_is_decided_when_nobody_waits_for_it():
    """A verdict's round goes on by the plan that was; one decision is made however many rounds pass meanwhile."""
    due = []
    pilot = Controls(SpeculationConfig(pipelining=False), later=due.append).pilot(request())
    before = pilot.plan
    drive(pilot, 40, alpha=0.95, draft_s=0.0001)
    assert pilot.plan == before
    assert len(due) == 1
    due.pop()()
    assert pilot.plan.depth > before.depth
    drive(pilot, 40, alpha=0.95, draft_s=0.0001)
    assert len(due) == 1


def test_a_session_that_leaves_before_a_trial_is_decided_leaves_it_to_another():
    due = []
    controls = Controls(SpeculationConfig(pipelining=False), later=due.append)
    leaving, staying = controls.pilot(request()), controls.pilot(request())
    course = staying._course
    while not leaving.plan.is_plain:
        drive(leaving, 1, alpha=0.0, draft_s=1.0)
        while due:
            due.pop()()
    course._state = State(num_rested=FIRST_PAUSE - 1)
    while not due:
        drive(leaving, 1, alpha=0.0, draft_s=1.0)
    leaving.close()
    due.pop()()
    assert "a trial after rest" in controls.report().reason
    drive(staying, 1, alpha=0.0, draft_s=1.0)
    assert not staying.plan.is_plain


def test_steps_in_the_cost_of_a_pass_cut_a_block_at_the_step_and_not_below():
    """Passes of up to eight rows cost the same, and of more twice as much: seven guesses go with every root."""
    pilot = Controls(SpeculationConfig(pipelining=False)).pilot(request())
    step = lambda rows: 0.1 if rows <= 8 else 0.2  # noqa: E731
    drive(pilot, 60, alpha=0.8, verify_s=step)
    for rows in (6, 8, 10, 12):
        pilot.saw_round(verdict(chain(rows - 1), 3, step(rows), rows))
    drive(pilot, 20, alpha=0.8, verify_s=step)
    assert pilot.num_to_verify(chain(12, confidence=0.9)) == 7


def test_sessions_that_wait_for_their_prompts_hold_no_decision_up():
    controls = Controls(SpeculationConfig(pipelining=False))
    decoding, *_waiting = [controls.pilot(request()) for _ in range(64)]
    drive(decoding, 2, alpha=0.95, draft_s=0.001, sessions=64)  # the first round decides, for there are so many
    assert decoding.wants_draft
    num_rounds = 0
    while decoding.wants_draft:
        drive(decoding, 1, alpha=0.05, verify_s=steep, draft_s=0.02, sessions=64)
        num_rounds += 1
        assert num_rounds < 32


def test_a_session_that_has_left_holds_no_decision_up():
    due = []
    controls = Controls(SpeculationConfig(pipelining=False), later=due.append)
    leaving, staying = controls.pilot(request()), controls.pilot(request())
    drive(leaving, 1, alpha=0.9)
    due.pop()()  # from now on two rounds of each
    drive(leaving, 1, alpha=0.9)
    assert not due
    leaving.close()
    drive(staying, 1, alpha=0.9)
    assert due


def test_sessions_are_shared_out_among_the_targets_and_the_drafts_that_there_are():
    knowledge = Knowledge(max_depth=8, num_targets=2.0, num_drafts=4.0)
    knowledge.num_sessions = 8
    assert (knowledge.economy().num_verifying, knowledge.economy().num_drafting) == (4.0, 2.0)
