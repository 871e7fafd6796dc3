"""The target goes on by itself with what it was offered: the same tokens in the same order, whatever comes of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from core.continuations import UNUSED, Continuations
from core.records import (
    Chunk,
    Continuation,
    DraftRequest,
    Grammar,
    GrammarKind,
    Missing,
    Refused,
    Timing,
    VerifyRequest,
    Want,
)
from core.rules import Outcome
from core.speculation.growth import NewNodes
from core.speculation.speculation_tree import SpeculationTree
from core.speculation.token_tree import ROOT, TokenTree
from orchestrator.policy.adaptive import AdaptivePolicy
from orchestrator.policy.mode_choice import MeasuredRound, Mode
from orchestrator.policy.offers import OFFERED_OUTCOMES, PLAIN_STEPS, QUIET_ROUNDS, REST_ROUNDS
from orchestrator.policy.policies import Controller
from orchestrator.policy.policy import Found, RoundOutcome, Shape
from orchestrator.policy.shared_estimates import SharedEstimates
from orchestrator.session import messages as m
from orchestrator.session.sourced_block import NO_BLOCK, Offer
from tests.orchestrator.fakes import plain, request
from tests.orchestrator.session.test_growing import CONFIG, PROMPT, Stage


class OfferingStage(Stage):
    """Its target takes offers by the protocol's own rules."""

    def __init__(self, *args, outcomes=OFFERED_OUTCOMES, is_open=False, **changes):
        self.offers = Continuations()
        self.made: VerifyRequest | None = None
        """The message that the target has made for itself."""
        self.refused: list[Refused] = []
        self._outcomes, self._is_open = outcomes, is_open
        self.is_due, self.moments = True, []
        super().__init__(*args, **changes)

    def do(self, commands):
        for command in commands:
            if isinstance(command, Continuation):
                self.refused += self.offers.offer(command)
            if isinstance(command, VerifyRequest):
                self.made = None
            if isinstance(command, m.LeaseTarget):
                policy = self.session._policy
                policy.may_offer, policy.num_outcomes = True, self._outcomes
                policy.is_worth_a_plain_step = lambda _num_now: self._is_open
                policy.is_offer_due = self._is_offer_due
        return super().do(commands)

    def _is_offer_due(self, elapsed_s, num_now, *, is_continued, is_more_to_come):
        self.moments.append((elapsed_s, num_now, is_continued, is_more_to_come))
        return self.is_due

    def next_verdict(self, **changes):
        """The target's next reply, not delivered yet."""
        self.now_s += 0.1
        asked = self.made or self.last(VerifyRequest)
        verdict = replace(self.target.verify(asked), timing=Timing(0.0, 0.05, 1, 1 + len(asked.block)))
        verified = [(asked, self.target.logs[asked.stamp.lease], Outcome(verdict.path, verdict.next_token))]
        (continued,), following, refused = self.offers.after_pass(verified, lambda *_: True)
        self.refused += refused
        self.made = following[0] if following else None
        return m.TargetReplied(replace(verdict, **{"continued": continued} | changes), self.now_s - 0.1, self.now_s)

    def verdict(self):
        return self.event(self.next_verdict())

    @property
    def offer(self):
        return self.last(Continuation)

    @property
    def num_continued(self):
        return self.session.stats.num_continued


@pytest.fixture
def stage(tokenizer):
    return OfferingStage(tokenizer)


def test_the_target_goes_on_with_what_has_grown_below_a_verdict_and_nothing_is_sent(stage):
    text = stage.right(5)
    stage.grows_right(5)
    assert (stage.offer.after, stage.offer.tree) == (1, TokenTree.chain(text))
    sent = stage.verdict()
    assert stage.made.block == TokenTree.chain(text[1:])
    assert stage.made.suffix == (text[0],)
    assert [type(command) for command in sent] == [DraftRequest, Chunk]
    sent = stage.verdict()
    assert (stage.num_continued, stage.count(VerifyRequest)) == (1, 2)
    assert stage.tokens == plain(PROMPT, 6)
    assert [(seen.elapsed_s, seen.is_continued) for seen in stage.policy.seen] == [
        (pytest.approx(0.1), False),
        (pytest.approx(0.1), True),
    ]
    assert [seen.path for seen in stage.policy.seen] == [(), (0, 1, 2, 3)]


def test_one_goes_on_after_another_as_long_as_something_has_grown(stage):
    stage.policy.max_nodes = 1
    stage.grows_right(6)
    for _ in range(4):
        stage.verdict()
    assert (stage.num_continued, stage.count(VerifyRequest)) == (3, 2), (
        "each block is one token, and a verdict takes two"
    )
    assert stage.tokens == plain(PROMPT, 7)


def test_the_last_offer_counts_and_the_same_is_not_made_twice(stage):
    text = stage.right(3)
    stage.grows((ROOT, text[0]), (0, text[1]))
    first = stage.offer
    stage.grows((ROOT, 37))
    assert stage.offer is first, "37 has nothing below it"
    stage.grows((1, text[2]))
    assert stage.refused == [Refused(first.stamp, UNUSED)]
    assert stage.offer.stamp.round > first.stamp.round
    stage.verdict()
    assert stage.made.block == TokenTree.chain(text[1:])


def test_what_grows_long_before_the_verdict_is_not_offered_but_with_what_grows_later(stage):
    stage.verdict()
    text = stage.right(4)
    stage.is_due = False
    stage.grows((ROOT, text[0]), (0, text[1]))
    assert stage.count(Continuation) == 0
    stage.is_due = True
    stage.grows((1, text[2]))
    assert stage.offer.tree == TokenTree.chain(text[:3])


def test_the_policy_hears_when_what_is_offered_and_whether_more_will_be(stage):
    stage.grows_right(8)
    stage.moments.clear()
    stage.verdict()  # the target goes on, and the round begins with it
    began_s = stage.now_s
    stage.now_s += 0.03
    stage.grows()
    last = stage.growth()
    stage.event(replace(last, reply=replace(last.reply, is_over=True)))
    refused = Refused(stage.last(DraftRequest).stamp, "overtaken")
    stage.event(m.DraftReplied(refused, began_s, began_s + 0.04))
    num_now = len(stage.made.block)
    assert stage.moments == [
        (0.0, num_now, True, False),
        (pytest.approx(0.03), num_now, True, True),
        (pytest.approx(0.03), num_now, True, False),
        (pytest.approx(0.04), num_now, True, False),
    ]


def waits(stage):
    """After a verdict below which nothing is left of the tree."""
    stage.policy.is_patient = True
    stage.grows((ROOT, 1))
    stage.verdict()
    stage.policy.is_patient = False
    stage.now_s += 0.05
    return stage.last(m.Await)


def test_a_block_that_waited_for_the_draft_has_its_verdict_that_much_later(stage):
    waits(stage)
    text = stage.right(2)
    stage.grows((ROOT, text[0]))
    stage.moments.clear()
    stage.now_s += 0.01
    stage.grows((0, text[1]))
    assert stage.moments == [(pytest.approx(0.01), 1, False, True)]


def test_of_a_block_whose_wait_was_ended_by_the_clock_each_offer_is_due(stage):
    """The clock's event says no time."""
    stage.event(m.DraftLate(waits(stage).stamp))
    stage.moments.clear()
    stage.is_due = False
    stage.grows_right(2)
    assert stage.moments == []


@pytest.mark.parametrize("is_lost", [False, True])
def test_of_a_block_that_was_sent_again_each_offer_is_due(stage, is_lost):
    """The whole text goes with it, and may have to wait for room."""
    stage.verdict()
    if is_lost:
        stage.event(m.TargetLost(1, "gone"))
        stage.event(m.TargetLeased("t", 2))
    else:
        stage.event(m.TargetReplied(Missing(stage.last(VerifyRequest).stamp, 0), 0.0, stage.now_s))
    assert stage.count(VerifyRequest) == 3
    stage.moments.clear()
    stage.is_due = False
    stage.grows_right(2)
    assert stage.moments == []
    assert stage.count(Continuation) >= 1


def test_a_round_without_a_verdict_before_it_has_no_time_to_wait_for(stage):
    """The prompt's length determines the duration of the first message."""
    stage.is_due = False
    stage.grows_right(3)
    assert stage.moments == []
    assert stage.count(Continuation) == 1


def test_the_refusal_of_an_offer_that_another_has_replaced_has_nothing_offered_anew(stage):
    text = stage.right(3)
    stage.grows((ROOT, text[0]), (0, text[1]))
    stage.grows((1, text[2]))
    (refusal,), last = stage.refused, stage.offer
    assert stage.event(m.TargetReplied(refusal)) == []
    stage.grows((ROOT, 37))
    assert stage.offer is last


def test_an_outcome_that_was_not_foreseen_is_sent_for_as_ever(stage):
    stage.grows((ROOT, 37), (0, 38))
    assert stage.offer.tree == TokenTree.chain((37, 38))
    sent = stage.verdict()
    assert [type(command) for command in sent] == [VerifyRequest, DraftRequest, Chunk]
    (refusal,) = stage.refused
    assert stage.event(m.TargetReplied(refusal)) == []
    assert stage.session.stats.num_stale_replies == 0, "it was to be expected"
    stage.verdict()
    assert (stage.num_continued, stage.tokens) == (0, plain(PROMPT, 2))


def test_a_verdict_that_overtakes_the_one_before_it_waits_for_it(stage):
    stage.grows_right(3)
    first, second = stage.next_verdict(), stage.next_verdict()
    assert stage.event(second) == []
    sent = stage.event(first)
    assert [type(command) for command in sent if isinstance(command, Chunk | VerifyRequest)] == [
        Chunk,
        VerifyRequest,
        Chunk,
    ]
    assert stage.tokens == plain(PROMPT, 4)
    assert stage.event(second) == stage.event(first) == []
    assert stage.session.stats.num_stale_replies == 2
    assert stage.tokens == plain(PROMPT, 4)


@pytest.mark.parametrize("claim", [99, 1])
def test_a_target_that_goes_on_with_what_it_was_not_offered_is_left(stage, claim):
    stage.grows_right(3)
    sent = stage.event(stage.next_verdict(continued=claim))
    assert [type(command) for command in sent] == [m.ReleaseTarget, m.LeaseTarget]
    assert stage.tokens == []


def test_a_target_that_goes_on_where_the_offer_has_nothing_is_left(stage):
    stage.grows((ROOT, 37), (0, 38))
    sent = stage.event(stage.next_verdict(continued=stage.offer.stamp.round))
    assert [type(command) for command in sent] == [m.ReleaseTarget, m.LeaseTarget]


def test_a_target_that_goes_on_with_what_another_was_offered_is_left(stage):
    stage.grows_right(3)
    of_another = stage.offer.stamp.round
    stage.event(m.TargetLost(1, "gone"))
    stage.target.forget("t")
    stage.event(m.TargetLeased("t2", 1))
    assert stage.offer.stamp.round > of_another, "the same was offered once more"
    sent = stage.event(stage.next_verdict(continued=of_another))
    assert [type(command) for command in sent] == [m.ReleaseTarget, m.LeaseTarget]


def test_what_a_lost_target_went_on_with_is_verified_by_the_next(stage):
    text = stage.right(4)
    stage.grows_right(4)
    stage.verdict()
    stage.event(m.TargetLost(1, "gone"))
    stage.target.forget("t")
    stage.event(m.TargetLeased("t2", 1))
    again = stage.last(VerifyRequest)
    assert (again.block.tokens, again.base.num_tokens, again.num_committed) == (tuple(text[1:]), 0, 4)
    stage.verdict()
    assert stage.tokens == plain(PROMPT, 5)


def test_nothing_is_offered_beyond_the_end(tokenizer):
    stage = OfferingStage(tokenizer, max_tokens=2, is_open=True)
    text = stage.right(3)
    stage.grows((ROOT, text[0]), (0, text[1]), (1, text[2]))
    assert stage.offer.tree == TokenTree.chain(text[:1]), "one more follows, and that needs no guess"
    num_offers = stage.count(Continuation)
    stage.verdict()
    sent = stage.verdict()
    assert stage.count(Continuation) == num_offers
    assert [type(command) for command in sent] == [Chunk, m.ReleaseTarget, m.ReleaseDraft]
    assert stage.tokens == plain(PROMPT, 2)


def test_where_it_is_worth_it_the_target_takes_plain_steps_by_itself(tokenizer):
    stage = OfferingStage(tokenizer, max_tokens=8, is_open=True, max_draft_tokens=0)
    for _ in range(8):
        stage.verdict()
    assert (stage.count(VerifyRequest), stage.count(Continuation), stage.num_continued) == (1, 7, 7)
    assert stage.tokens == plain(PROMPT, 8)
    assert stage.session.is_closed


class PlainStage(OfferingStage):
    """A session that is to decode plainly, on a target that is some steps ahead of it."""

    def __init__(self, tokenizer, plain_steps=3, **changes):
        self._plain_steps = plain_steps
        super().__init__(tokenizer, is_open=True, max_draft_tokens=0, **changes)

    def do(self, commands):
        self.session._policy.plain_steps = self._plain_steps
        return super().do(commands)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("plain_steps", [1, 2, 3, 4, 8])
def test_plain_steps_are_offered_ahead_and_none_beyond_the_end(tokenizer, plain_steps, max_tokens):
    stage = PlainStage(tokenizer, plain_steps, max_tokens=max_tokens)
    assert stage.count(Continuation) == min(plain_steps, max_tokens - 1)
    for _ in range(max_tokens):
        stage.verdict()
    assert (stage.count(VerifyRequest), stage.count(Continuation)) == (1, max_tokens - 1)
    assert stage.tokens == plain(PROMPT, max_tokens)
    assert stage.session.is_closed


def test_more_is_offered_when_half_of_it_is_used(tokenizer):
    stage = PlainStage(tokenizer, 4, max_tokens=20)
    counts = []
    for _ in range(5):
        stage.verdict()
        counts.append(stage.count(Continuation))
    assert counts == [4, 6, 6, 8, 8]


def test_one_step_is_offered_where_the_target_stops_behind_each_message_until_it_goes_on_again(tokenizer):
    """It stops if another session in its passes offers nothing: all offers would be refused, round after round."""
    stage = PlainStage(tokenizer, 4, max_tokens=40)
    counts = [stage.count(Continuation)]
    for is_stop in (True, True, True, True, False, False, True, True, True):
        stage.event(stage.next_verdict(**({"continued": 0} if is_stop else {})))
        counts.append(stage.count(Continuation) - sum(counts))
    assert counts == [4, 4, 4, 1, 1, 4, 0, 4, 4, 4], "stops behind steps of its own do not count"
    assert stage.tokens == plain(PROMPT, 9)


def test_verdicts_of_steps_ahead_count_in_their_order_whatever_the_order_in_which_they_come(tokenizer):
    stage = PlainStage(tokenizer, 3, max_tokens=20)
    first, second, third = (stage.next_verdict() for _ in range(3))
    assert stage.event(third) == stage.event(second) == []
    sent = stage.event(first)
    assert [command.token_ids for command in sent if isinstance(command, Chunk)] == [
        (token,) for token in plain(PROMPT, 3)
    ]
    assert stage.event(third) == stage.event(second) == stage.event(first) == [], "each counts once"
    stage.verdict()
    assert stage.tokens == plain(PROMPT, 4)


def test_refusals_of_steps_that_others_have_replaced_leave_those_in_place(stage):
    plain_step, side = Offer(NO_BLOCK, 0, is_open=True), stage.session._target
    stage.grows_right(3)
    replaced = stage.offer
    first, *_ = side.offer(plain_step, 3)
    assert first.after == replaced.after
    assert stage.event(m.TargetReplied(Refused(replaced.stamp, UNUSED))) == []
    assert side.offer(plain_step, 3) == []


def test_steps_behind_one_that_is_refused_are_offered_anew(stage):
    plain_step, side = Offer(NO_BLOCK, 0, is_open=True), stage.session._target
    stage.grows_right(3)
    first, second, _ = side.offer(plain_step, 3)
    stage.event(m.TargetReplied(Refused(second.stamp, UNUSED)))
    assert [each.after for each in side.offer(plain_step, 3)][:1] == [first.stamp.round]


def test_who_goes_on_with_what_was_offered_for_a_later_verdict_loses_its_lease(tokenizer):
    stage = PlainStage(tokenizer, 3, max_tokens=20)
    for_a_later_one = stage.last(Continuation).stamp.round
    sent = stage.event(stage.next_verdict(continued=for_a_later_one))
    assert [type(command) for command in sent][:2] == [m.ReleaseTarget, m.LeaseTarget]
    assert stage.tokens == []


def test_steps_ahead_that_are_refused_are_asked_for_with_the_whole_text(tokenizer):
    """Nothing of what was offered beyond a verdict at which the target stopped is taken for the next one."""
    stage = PlainStage(tokenizer, 3, max_tokens=20)
    stage.verdict()
    stopped = stage.next_verdict(continued=0)
    assert stage.made is not None, "what it would have gone on with"
    stale = stage.next_verdict()
    sent = stage.event(stopped)
    asked = next(command for command in sent if isinstance(command, VerifyRequest))
    assert asked.num_committed == len(PROMPT) + 2
    assert stage.event(stale) == []
    stage.made = None
    stage.verdict()
    assert stage.tokens == plain(PROMPT, 3)


def test_a_target_that_took_an_earlier_offer_has_nothing_of_what_was_offered_behind_the_later(stage):
    """The two cross on the way."""
    plain_step, side = Offer(NO_BLOCK, 0, is_open=True), stage.session._target
    stage.grows_right(3)
    earlier = stage.offer
    crossing = side.offer(plain_step, 3)
    assert [each.after for each in crossing] == [earlier.after, *(each.stamp.round for each in crossing[:-1])]
    stage.verdict()
    assert stage.made.stamp == earlier.stamp
    after = [each.after for each in side.offer(plain_step, 3)]
    assert after[0] == earlier.stamp.round, "it is offered anew"
    assert len(after) == 3


def test_a_draft_that_begins_anew_is_offered_from_again_when_its_tree_is_the_one_in_flight(stage):
    stage.grows_right(3)
    stage.verdict()
    stage.verdict()
    stage.grows_right(2)
    stage.verdict()
    num_offers = stage.count(Continuation)
    stage.event(m.DraftLost(1))
    stage.event(m.DraftLeased("d2", 1))
    stage.num_reported = 0
    stage.grows_right(2)
    assert stage.count(Continuation) == num_offers, "the block in flight is no part of that tree"
    stage.verdict()
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


def test_a_refusal_that_comes_before_the_verdict_that_goes_on_ends_the_stream_after_it(stage):
    stage.grows_right(3)
    first = stage.next_verdict()
    assert first.reply.continued == stage.made.stamp.round
    assert stage.event(m.TargetReplied(Refused(stage.made.stamp, "NaN", is_final=True), stage.now_s, stage.now_s)) == []
    sent = stage.event(first)
    assert [type(command) for command in sent if isinstance(command, Chunk | m.Fail)] == [Chunk, m.Fail]
    assert stage.session.is_closed


def test_who_claims_to_go_on_with_what_it_has_refused_loses_its_lease(stage):
    text = stage.right(3)
    stage.grows((ROOT, text[0]), (0, text[1]))
    first = stage.offer
    stage.grows((1, text[2]))
    assert stage.refused[0].stamp == first.stamp
    stage.event(m.TargetReplied(stage.refused[0], 0.0, 0.0))
    sent = stage.event(stage.next_verdict(continued=first.stamp.round))
    assert [type(command) for command in sent][:2] == [m.ReleaseTarget, m.LeaseTarget]


def test_a_verdict_that_overtakes_the_one_before_it_took_no_time_of_its_own(stage):
    stage.grows_right(3)
    first, second = stage.next_verdict(), stage.next_verdict()
    late = replace(first, received_s=second.received_s + 0.5)
    stage.event(second)
    stage.event(late)
    assert stage.num_continued == 1
    assert stage.policy.seen[-1].elapsed_s == 0.0
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


# What is worth it


@pytest.fixture
def policy():
    policy = AdaptivePolicy(request(PROMPT, 40), CONFIG, SharedEstimates())
    for _ in range(200):
        policy._known.verify.observe(Timing(0.0, 0.005, 1, 1), 0.008)
        policy._known.verify.observe(Timing(0.0, 0.005, 1, 9), 0.008)
    for _ in range(200):
        policy.observe_pass(Timing(0.0, 0.001, 1, 1))
    policy._known._costs = None
    return policy


def sees_rounds(policy, num_tokens, elapsed_s):
    for _ in range(600):
        policy.observe_interval(MeasuredRound(num_tokens, elapsed_s))


def test_plain_steps_go_on_while_rounds_yield_no_more(policy):
    sees_rounds(policy, 1, 0.008)
    assert policy.is_worth_a_plain_step(0)
    sees_rounds(policy, 1, 0.005)
    assert policy.is_worth_a_plain_step(0), "as it is when they do go on"
    sees_rounds(policy, 4, 0.008)
    assert not policy.is_worth_a_plain_step(4), "four tokens take 8 ms, and one would take 5"


def test_where_the_target_is_near_only_a_session_without_a_draft_goes_on(policy):
    assert policy.num_outcomes > 0
    for _ in range(200):
        policy.observe_pass(Timing(0.0, 0.002, 1, 1))
    policy._known._costs = None
    assert policy.num_outcomes > 0, "what grows in a pass of 2 ms is there in time"
    for _ in range(200):
        policy.observe_pass(Timing(0.0, 0.004, 1, 1))
    policy._known._costs = None
    sees_rounds(policy, 1, 0.008)
    assert policy.num_outcomes == 0, "a pass of 4 ms grows too late to be offered, and the way takes 3 ms"
    assert not policy.is_worth_a_plain_step(4)
    assert not policy.may_offer
    policy.rest()
    assert policy.num_outcomes > 0
    assert policy.may_offer
    assert policy.is_worth_a_plain_step(0)


@pytest.mark.parametrize(("way_s", "is_offered"), [(0.0024, False), (0.0026, True)])
def test_guesses_are_offered_only_where_the_way_is_longer_than_offers_take_to_be_made(way_s, is_offered):
    """However quick the draft is: an offer may follow each of its passes."""
    policy = AdaptivePolicy(request(PROMPT, 40), CONFIG, SharedEstimates())
    for _ in range(200):
        policy._known.verify.observe(Timing(0.0, 0.005, 1, 1), 0.005 + way_s)
        policy.observe_pass(Timing(0.0, 0.0005, 1, 1))
    policy._known._costs = None
    assert (policy.num_outcomes > 0) == is_offered


def due(policy, elapsed_s, *, is_continued=False, is_more_to_come=True):
    return policy.is_offer_due(elapsed_s, 4, is_continued=is_continued, is_more_to_come=is_more_to_come)


def test_an_offer_is_due_within_two_passes_of_the_verdict_or_if_it_is_the_last(policy):
    """A pass of the target takes 5 ms, one of the draft 1 ms, and the way 3 ms there and back."""
    policy.begin_drafting()
    assert not due(policy, 0.0025)
    assert due(policy, 0.0025, is_more_to_come=False)
    assert due(policy, 0.0035)
    assert due(policy, 0.0065)
    assert not due(policy, 0.0075)
    assert not due(policy, 0.0075, is_more_to_come=False), "the verdict has been given, though it is not here yet"


def test_offers_are_due_later_by_the_time_in_which_the_targets_head_guesses(policy):
    policy.begin_drafting()
    for _ in range(20):
        policy._known.verify.observe(Timing(0.0, 0.009, 1, 1, guessing_s=0.004), 0.012)
    policy._known._costs = None
    assert not due(policy, 0.0065)
    assert due(policy, 0.0075)


def test_an_offer_for_a_pass_that_began_before_it_was_heard_of_is_due_one_way_earlier(policy):
    policy.begin_drafting()
    assert due(policy, 0.0005, is_continued=True)
    assert due(policy, 0.0035, is_continued=True)
    assert not due(policy, 0.0045, is_continued=True)


def test_without_growth_that_follows_and_where_passes_are_shared_each_offer_is_due(policy):
    policy.end_drafting()
    assert due(policy, 0.0)
    assert due(policy, 0.01), "plain steps are offered several ahead"
    policy.begin_drafting()
    assert not due(policy, 0.0)
    policy._choice.limit = Mode.GUESSERS
    assert due(policy, 0.0)
    policy._choice.limit = Mode.DRAFT
    policy.observe_silence(is_silent=True)
    assert due(policy, 0.0), "plain steps are offered, several ahead"
    policy.observe_silence(is_silent=False)
    for _ in range(3):
        AdaptivePolicy(request(PROMPT, 40), CONFIG, policy._known)
    assert due(policy, 0.0)


@pytest.mark.parametrize("named", ["adaptive", "static"])
@pytest.mark.parametrize("where", ["settings", "request"])
def test_who_lacks_its_draft_goes_on_at_once_unless_others_may_guess(named, where):
    no_form = ("draft", "grammar", "template")
    for guessers, is_at_once in ((("draft",), True), (no_form, True), (("draft", "prompt_lookup"), False)):
        config = replace(CONFIG, policy=named, guessers=guessers if where == "settings" else CONFIG.guessers)
        asked = request(PROMPT, 40, guessers=guessers if where == "request" else ())
        policy = Controller(config).policy(asked)
        sees_rounds(policy, 4, 0.008)
        assert not policy.is_worth_a_plain_step(4)
        policy.observe_silence(is_silent=True)
        assert policy.is_worth_a_plain_step(4) == is_at_once
        assert policy.may_offer == (is_at_once or policy.num_outcomes > 0)


@pytest.mark.parametrize("named", ["adaptive", "static"])
@pytest.mark.parametrize("form", ["template", "grammar"])
def test_what_an_output_must_look_like_guesses_and_a_template_whomever_the_request_names(named, form):
    guessers = ("draft",) if form == "template" else ("draft", "grammar")
    asked = request(PROMPT, 40, guessers=guessers, **{form: Grammar(GrammarKind.REGEX, "a+")})
    policy = Controller(replace(CONFIG, policy=named)).policy(asked)
    sees_rounds(policy, 4, 0.008)
    policy.observe_silence(is_silent=True)
    assert not policy.is_worth_a_plain_step(4)


@pytest.mark.parametrize(
    ("max_draft_tokens", "guessers", "mode", "is_without_draft", "num_steps"),
    [
        (0, (), Mode.DRAFT, False, PLAIN_STEPS),
        (4, ("draft",), Mode.GUESSERS, False, PLAIN_STEPS),
        (4, ("draft", "prompt_lookup"), Mode.GUESSERS, False, 1),
        (4, ("draft", "prompt_lookup"), Mode.PLAIN, False, PLAIN_STEPS),
        (4, ("draft",), Mode.DRAFT, True, 1),
        (4, ("draft",), Mode.DRAFT, False, 1),
    ],
)
def test_plain_steps_are_offered_ahead_where_nothing_is_to_change_soon(
    max_draft_tokens, guessers, mode, is_without_draft, num_steps
):
    policy = Controller(CONFIG).policy(request(PROMPT, 40, max_draft_tokens=max_draft_tokens, guessers=guessers))
    policy._choice.limit = mode
    policy.observe_silence(is_silent=is_without_draft)
    assert policy.plain_steps == num_steps


def test_who_lacks_its_draft_is_offered_what_others_guess_where_it_has_its_passes_for_itself(policy):
    for _ in range(200):
        policy.observe_pass(Timing(0.0, 0.004, 1, 1))
    policy._known._costs = None
    assert policy.num_outcomes == 0
    policy.observe_silence(is_silent=True)
    assert policy.num_outcomes == OFFERED_OUTCOMES
    AdaptivePolicy(request(PROMPT, 40), CONFIG, policy._known)
    assert policy.num_outcomes == 0


def test_who_shares_passes_does_not_go_on_without_what_its_draft_grows(policy):
    """Or it would: a round is worth a token then, and so a token is worth a round."""
    sees_rounds(policy, 1, 0.008)
    assert policy.is_worth_a_plain_step(0)
    for _ in range(3):
        AdaptivePolicy(request(PROMPT, 40), CONFIG, policy._known)
    assert not policy.is_worth_a_plain_step(0)


IDLE = RoundOutcome(Shape(), (), Found.HIT, 0.008, None)
GUESSED = RoundOutcome(Shape((ROOT,), (0,), (0.9,)), (0,), Found.HIT, 0.008, None)


def tree_with(*chances):
    """Nodes below the root."""
    tree, num = SpeculationTree(), len(chances)
    tree.add(NewNodes(0, (ROOT,) * num, tuple(range(num)), tuple(range(num)), chances, chances))
    return tree


def observe(policies, seen, num_rounds=1):
    """Each of them in turn has a round like this."""
    for number in range(num_rounds):
        policies[number % len(policies)].observe_round(seen)


@pytest.fixture
def sharing(policy):
    """Two sessions that share passes; a node that stands with 1% is not worth its row."""
    for number in range(200):
        policy._known.verify.observe(Timing(0.0, 0.006 + 1e-6 * number, 1, 9), 0.008)
    policy._known._costs = None
    return [policy, AdaptivePolicy(request(PROMPT, 40), CONFIG, policy._known)]


def test_who_shares_passes_goes_on_plainly_once_no_guess_was_worth_its_row_for_some_rounds(sharing):
    one, other = sharing
    observe(sharing, IDLE, REST_ROUNDS - 1)
    assert not other.goes_on_plainly(tree_with(0.01))
    observe([other], IDLE)
    assert one.goes_on_plainly(tree_with())
    assert other.goes_on_plainly(tree_with(0.01))
    observe(sharing, GUESSED, 2)
    assert not other.goes_on_plainly(tree_with(0.01))


def test_rounds_of_who_never_drafts_do_not_make_those_who_draft_idle(sharing):
    one, other = sharing
    plain = AdaptivePolicy(request(PROMPT, 40, max_draft_tokens=0), CONFIG, one._known)
    observe([plain], IDLE, 2 * REST_ROUNDS)
    assert not other.goes_on_plainly(tree_with())


def test_a_guess_that_is_worth_its_row_has_all_sessions_told_again(sharing):
    one, other = sharing
    observe(sharing, IDLE, 2 * REST_ROUNDS)
    assert other.goes_on_plainly(tree_with())
    observe(sharing, IDLE, 2)
    assert not one.goes_on_plainly(tree_with(0.9))
    assert not other.goes_on_plainly(tree_with())


def test_a_session_is_asked_once_a_round_whether_it_goes_on_plainly(sharing, monkeypatch):
    """Whatever its draft tells meanwhile: to choose a block is dear."""
    observe(sharing, IDLE, 2 * REST_ROUNDS)
    assert sharing[0].goes_on_plainly(tree_with())
    monkeypatch.setattr(AdaptivePolicy, "choose", None)
    assert sharing[0].goes_on_plainly(tree_with(0.9))


def test_who_has_its_passes_for_itself_is_told_of_each_round_until_its_draft_rests(policy):
    policy.begin_drafting()
    observe([policy], IDLE, 2 * REST_ROUNDS)
    assert not policy.goes_on_plainly(tree_with())


def test_guessers_without_a_draft_that_have_found_nothing_for_some_rounds_do_not_keep_the_target_waiting():
    """Until they find something."""
    policy = AdaptivePolicy(request(PROMPT, 40), replace(CONFIG, guessers=("prompt_lookup",)), SharedEstimates())
    observe([policy], IDLE, QUIET_ROUNDS - 1)
    assert not policy.may_offer
    observe([policy], IDLE, 1)
    assert policy.may_offer
    assert policy.goes_on_plainly(tree_with())
    observe([policy], IDLE, 1)
    assert not policy.goes_on_plainly(tree_with(0.9))
    assert not policy.may_offer


def test_while_one_drafts_in_turn_the_others_do_not_go_on_plainly(monkeypatch):
    """Or they would be a pass ahead of it, and their passes would fall apart."""
    known = SharedEstimates()
    one, other = [AdaptivePolicy(request(PROMPT, 40), replace(CONFIG, pipelining=False), known) for _ in range(2)]
    for forecast, num_trials, is_plain in ((0, 0, True), (3, 0, False), (0, 2, False)):
        monkeypatch.setattr(AdaptivePolicy, "_forecast", lambda _self, forecast=forecast: forecast)
        observe([one, other], IDLE, 2 * REST_ROUNDS)
        one._num_trials = num_trials
        assert one.wants_turn() is not is_plain
        assert other.goes_on_plainly(tree_with()) is is_plain


def test_the_plain_step_is_offered_while_the_policy_goes_on_plainly(stage):
    stage.policy.goes_on_plainly = lambda _tree: True
    stage.grows((ROOT, 37))
    stage.verdict()
    assert stage.offer.is_open
    stage.verdict()
    assert stage.num_continued == 1


def test_in_plain_mode_no_guesser_is_asked_and_guesses_of_a_head_are_wanted_in_its_own(stage):
    panel, asked = stage.session._panel, []
    panel.ask = lambda text: asked.append(len(text)) or []
    panel._delivered["head"] = SimpleNamespace(deliver=lambda *_: None)
    for limit, num_asked, wants in ((Mode.PLAIN, 0, ()), (Mode.GUESSERS, 1, ()), (Mode.HEAD, 2, (Want.GUESSES,))):
        stage.policy._choice.limit = limit
        stage.verdict()
        assert len(asked) == num_asked
        assert stage.last(VerifyRequest).wants == wants
