"""Drafting behind verification: what was prepared is used for the verdict it was prepared for, and for no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakePilot, model_info, plain, request
from world import World

from core.config import DECODE_TOKENS, Limits, SpeculationConfig
from core.records import Call, Drafted, Missing, Timing
from core.trees import EMPTY_BLOCK, NO_TOKEN, TokenTree, depths
from orchestrator import messages as m
from orchestrator.drafting import Drafting
from orchestrator.pair import Completion, Pair
from orchestrator.pilot import DraftSeen, Found, RoundSeen, Shape
from orchestrator.statistics import Statistics

PROMPT = (3, 1, 4)
REPLIES = {m.Verify: "TargetReplied", m.Draft: "DraftReplied"}


def commands(world, kind):
    return [command for command in world.sent if isinstance(command, kind)]


def answer(world, kind):
    """Deliver the first waiting answer of the target or of the draft."""
    index = next(i for i, waiting in enumerate(world.waiting) if is_answer(waiting, kind))
    return world.deliver(index)


def pipelined(tokenizer, *, max_tokens=40, gamma=3, fanout=3, **changes):
    """A stream whose target verifies its prompt while the draft prepares a table for what comes after."""
    world = World(request(PROMPT, max_tokens, **changes), tokenizer, gamma=gamma, fanout=fanout).start()
    world.deliver()
    world.deliver()
    assert isinstance(world.sent[-1], m.Draft)
    assert world.sent[-1].request.is_table
    return world


def drive(world, order):
    """Grant leases at once, and answer in turn, the draft first or the target first."""
    while world.waiting:
        places = [i for i, waiting in enumerate(world.waiting) if not any(is_answer(waiting, kind) for kind in REPLIES)]
        if places:
            world.deliver(places[0])
            continue
        for kind in order:
            if any(is_answer(waiting, kind) for waiting in world.waiting):
                answer(world, kind)


def is_answer(waiting, kind):
    return REPLIES[kind] in waiting.__code__.co_names


@pytest.mark.parametrize("order", [(m.Draft, m.Verify), (m.Verify, m.Draft)])
@pytest.mark.parametrize("gamma", [1, 3, 7])
@pytest.mark.parametrize("fanout", [1, 2, 4])
def test_output_is_plain_decoding_whatever_is_prepared(tokenizer, order, gamma, fanout):
    world = pipelined(tokenizer, gamma=gamma, fanout=fanout)
    drive(world, order)
    assert world.tokens == plain(PROMPT, 40)
    stats = world.chunks[-1].stats
    assert stats.num_hits > 0
    assert stats.num_rounds + stats.num_accepted_tokens == 40


def test_a_hit_is_verified_before_its_verdict_is_shown_and_the_next_table_is_asked_for(tokenizer):
    world = pipelined(tokenizer)
    answer(world, m.Draft)
    num_sent = len(world.sent)
    answer(world, m.Verify)
    verify, prepare, emitted = world.sent[num_sent:]
    assert isinstance(emitted, m.Emit)
    assert verify.request.block.tokens[:2] == tuple(plain(PROMPT, 3)[1:]), "the third guess is the draft's ninth"
    assert len(verify.request.block) == 3
    assert prepare.request.is_table
    assert prepare.request.block == verify.request.block


def test_a_verdict_that_comes_before_its_table_waits_for_it(tokenizer):
    world = pipelined(tokenizer)
    answer(world, m.Verify)
    assert len(commands(world, m.Verify)) == 1
    answer(world, m.Draft)
    assert len(commands(world, m.Verify)) == 2
    assert len(commands(world, m.Verify)[-1].request.block) == 3


def test_a_miss_is_drafted_for_just_in_time_and_told_to_the_pilot(tokenizer):
    world = pipelined(tokenizer, fanout=1, gamma=1)
    drive(world, (m.Draft, m.Verify))
    stats = world.chunks[-1].stats
    rounds = [seen for seen in world.pilot.seen if isinstance(seen, RoundSeen)]
    assert stats.num_misses == [seen.found for seen in rounds].count(Found.MISS) > 0
    assert stats.num_hits == [seen.found for seen in rounds].count(Found.HIT) > 0
    assert all((seen.rank is not None) == (seen.found is Found.HIT) for seen in rounds)
    just_in_time = [c for c in commands(world, m.Draft) if not c.request.is_table and len(c.request.growth)]
    assert len(just_in_time) >= stats.num_misses - 1
    assert {seen.is_table for seen in world.pilot.seen if isinstance(seen, DraftSeen)} == {True, False}


def test_a_table_that_is_late_costs_its_round_a_guess_and_no_more(tokenizer):
    world = pipelined(tokenizer)
    late = commands(world, m.Draft)[-1].request.stamp
    answer(world, m.Verify)
    world.handle(m.DraftLate(late))
    assert commands(world, m.Verify)[-1].request.block == EMPTY_BLOCK
    assert world.pilot.num_late == 1
    num_asked = len(commands(world, m.Draft))
    answer(world, m.Verify)
    assert len(commands(world, m.Draft)) == num_asked, "a busy draft is not asked"
    answer(world, m.Draft)
    assert len(commands(world, m.Draft)) == num_asked + 1, "it prepares for the round that is running"
    assert world.run().tokens == plain(PROMPT, 40)


def test_a_table_that_is_late_but_comes_before_the_verdict_is_used(tokenizer):
    world = pipelined(tokenizer)
    world.handle(m.DraftLate(commands(world, m.Draft)[-1].request.stamp))
    answer(world, m.Draft)
    answer(world, m.Verify)
    assert len(commands(world, m.Verify)[-1].request.block) == 3
    assert world.session.stats.num_hits == 1
    assert world.session.stats.num_draft_failures == 0


def test_a_draft_that_is_late_three_rounds_in_a_row_is_given_back_and_leased_again_after_a_pause(tokenizer):
    world = pipelined(tokenizer)
    world.handle(m.DraftLate(commands(world, m.Draft)[-1].request.stamp))
    for num_rounds in (1, 2, 3):
        assert not commands(world, m.ReleaseDraft), num_rounds
        answer(world, m.Verify)
    assert commands(world, m.ReleaseDraft)
    assert commands(world, m.PlaceDraft)[-1].delay_s > 0
    assert world.session.stats.num_draft_failures == 3
    assert world.run().tokens == plain(PROMPT, 40)


def be_late(world, num_rounds):
    """The draft does not answer what it was asked last, for so many rounds."""
    world.handle(m.DraftLate(commands(world, m.Draft)[-1].request.stamp))
    for _ in range(num_rounds):
        answer(world, m.Verify)


def test_a_draft_that_is_late_now_and_then_is_kept_however_long_the_stream(tokenizer):
    """Two rounds late and then in time, over and over: three in a row would be too much."""
    world = pipelined(tokenizer, max_tokens=200)
    for _ in range(8):
        be_late(world, num_rounds=2)
        answer(world, m.Draft)
        while not commands(world, m.Draft)[-1].request.is_table:
            answer(world, m.Draft)
    assert not commands(world, m.ReleaseDraft)
    assert world.session.stats.num_draft_failures == 16
    assert world.run().tokens == plain(PROMPT, 200)


def test_a_new_draft_is_not_blamed_for_the_lateness_of_the_one_before(tokenizer):
    world = pipelined(tokenizer, max_tokens=60)
    be_late(world, num_rounds=2)
    world.draft = type(world.draft)(epoch=2)
    world.waiting = [waiting for waiting in world.waiting if not is_answer(waiting, m.Draft)]
    world.handle(m.DraftLost(1))
    while not (commands(world, m.Draft)[-1].request.stamp.epoch == 2 and commands(world, m.Draft)[-1].request.is_table):
        world.deliver()
    num_releases = len(commands(world, m.ReleaseDraft))
    be_late(world, num_rounds=2)
    assert len(commands(world, m.ReleaseDraft)) == num_releases
    answer(world, m.Verify)
    assert len(commands(world, m.ReleaseDraft)) == num_releases + 1


def test_the_answer_of_a_draft_that_was_given_back_is_stale(tokenizer):
    world = pipelined(tokenizer)
    request_ = commands(world, m.Draft)[-1].request
    world.handle(m.DraftLost(1))
    num_sent = len(world.sent)
    world.handle(m.DraftReplied(Drafted(request_.stamp, (NO_TOKEN,) * len(request_.growth), request_.num_committed)))
    assert len(world.sent) == num_sent
    assert world.session.stats.num_stale_replies == 1


def test_a_table_serves_the_block_and_the_prefix_that_it_was_made_for_alone(tokenizer):
    world = pipelined(tokenizer)
    drafting = world.session._drafting
    asked = drafting._asked = replace(drafting._asked, block=TokenTree.chain([7, 8]))
    guess = replace(world.session._guess, block=asked.block)
    assert drafting._is_for(guess, asked.num_committed)
    assert not drafting._is_for(guess.prefix(1), asked.num_committed)
    assert not drafting._is_for(guess, asked.num_committed + 1)


def test_a_target_that_dies_while_it_verifies_is_followed_by_one_that_verifies_the_same_block_and_the_table_serves(
    tokenizer,
):
    world = pipelined(tokenizer)
    answer(world, m.Draft)
    answer(world, m.Verify)
    answer(world, m.Draft)
    before = commands(world, m.Verify)[-1].request.block
    world.waiting.clear()
    world.target = type(world.target)(epoch=2)
    world.handle(m.TargetLost(1, "killed"))
    world.deliver()
    again = commands(world, m.Verify)[-1].request
    assert again.block == before
    assert again.base.num_tokens == 0
    num_hits = world.session.stats.num_hits
    answer(world, m.Verify)
    assert world.session.stats.num_hits == num_hits + 1
    assert world.run().tokens == plain(PROMPT, 40)


def test_the_table_of_an_earlier_round_is_not_taken_for_this_ones(tokenizer):
    """The target is lost while a table is awaited: the table comes when the text has moved on."""
    world = pipelined(tokenizer)
    answer(world, m.Verify)
    table = world.waiting.pop()
    world.target = type(world.target)(epoch=2)
    world.handle(m.TargetLost(1, "killed"))
    world.deliver()
    world.waiting.insert(0, table)
    world.deliver()
    answer(world, m.Verify)
    assert world.session.stats.num_hits == 0
    assert world.run().tokens == plain(PROMPT, 40)


def test_a_draft_that_rests_is_sent_nothing_and_catches_up_by_prefill_when_it_is_wanted_again(tokenizer):
    world = World(request(PROMPT, 120), tokenizer, gamma=3, fanout=2).start()
    world.pilot.wants_draft = False
    while len(world.tokens) < 50:
        world.deliver()
    assert commands(world, m.Draft) == []
    world.pilot.wants_draft = True
    world.deliver()
    asked = commands(world, m.Draft)[-1]
    assert asked.timeout_s is None, "nobody waits for a prefill"
    assert len(asked.request.growth) == 0
    assert len(asked.request.suffix) >= 50
    assert world.run().tokens == plain(PROMPT, 120)
    assert world.session.stats.num_hits > 0


def test_a_draft_that_forgets_costs_a_round_and_is_sent_everything_again(tokenizer):
    world = pipelined(tokenizer)
    answer(world, m.Draft)
    answer(world, m.Verify)
    world.draft.forget("s")
    assert isinstance(answer(world, m.Draft).reply, Missing)
    assert commands(world, m.Draft)[-1].request.spec is not None
    assert commands(world, m.Draft)[-1].request.is_table
    assert world.run().tokens == plain(PROMPT, 40)
    assert world.session.stats.num_draft_failures == 0


def test_no_block_is_deeper_than_what_is_left_to_generate(tokenizer):
    for max_tokens in range(1, 12):
        world = (
            pipelined(tokenizer, max_tokens=max_tokens, gamma=7)
            if max_tokens > 2
            else World(request(PROMPT, max_tokens), tokenizer, gamma=7, fanout=2).start()
        )
        drive(world, (m.Draft, m.Verify)) if max_tokens > 2 else world.run()
        assert world.tokens == plain(PROMPT, max_tokens)
        for command in commands(world, m.Verify):
            asked = command.request
            assert asked.num_committed + max(asked.block.depths, default=0) < len(PROMPT) + max_tokens


def test_only_as_much_as_the_pilot_says_is_verified_and_the_table_is_made_for_that(tokenizer):
    world = pipelined(tokenizer)
    world.pilot.num_to_verify = lambda shape: 1
    drive(world, (m.Draft, m.Verify))
    assert {len(command.request.block) for command in commands(world, m.Verify)} <= {0, 1}
    assert {len(c.request.block) for c in commands(world, m.Draft)} <= {0, 1}
    assert world.tokens == plain(PROMPT, 40)
    assert world.chunks[-1].stats.num_hits > 0


def test_without_a_draft_the_text_itself_is_asked_and_its_guesses_are_point_masses(tokenizer):
    job = request((1, 2, 3, 4, 1, 2, 3, 4, 1, 2), 6)
    world = World(job, tokenizer, with_draft=False, num_lookups=3).start()
    world.session._log.truncate(10)
    world.deliver()
    world.session._judged = None
    guess = world.session._look_up()
    assert guess.block.tokens == (3, 4, 1)
    assert [q.probs for q in guess.block.q] == [(1.0,)] * 3
    assert world.run().tokens == plain((1, 2, 3, 4, 1, 2, 3, 4, 1, 2), 6)


def test_each_call_is_reported_once_on_the_streams_own_clock_when_asked_for(tokenizer):
    for wanted in (True, False):
        world = World(request(PROMPT, 30, wants_trace=wanted), tokenizer, gamma=3, fanout=2).start().run()
        calls = [call for chunk in world.chunks for call in chunk.trace]
        assert bool(calls) == wanted
    world = World(request(PROMPT, 30, wants_trace=True), tokenizer, gamma=3, fanout=2).start().run()
    calls = [call for chunk in world.chunks for call in chunk.trace]
    stats = world.chunks[-1].stats
    verified = [call for call in calls if call.call is Call.VERIFY]
    assert len(verified) == stats.num_rounds
    assert sum(call.num_used for call in verified) == stats.num_accepted_tokens
    assert sum(call.num_guesses for call in verified) == stats.num_drafted_tokens
    assert len([call for call in calls if call.call is Call.TABLE and call.num_used]) == stats.num_hits


def test_no_guess_is_dropped_for_what_follows_it(tokenizer):
    """The pilot would keep all four guesses or none, by the last one's confidence: it must not have seen that."""
    world = World(request(PROMPT, 40), tokenizer, gamma=4).start()
    asked = []
    world.pilot.num_to_verify = lambda shape: asked.append(len(shape)) or (len(shape) if len(shape) < 3 else 0)
    kept = world.session._num_to_verify(Shape((-1, 0, 1, 2), (0,) * 4, (0.9, 0.9, 0.9, 0.1), (0.0,) * 4))
    assert (asked, kept) == ([1, 2, 3], 2)


def tables(world):
    return [command.request for command in commands(world, m.Draft) if command.request.is_table]


def test_a_table_that_comes_early_is_asked_for_once_a_round(tokenizer):
    world = pipelined(tokenizer)
    answer(world, m.Draft)
    assert not any(is_answer(waiting, m.Draft) for waiting in world.waiting)
    world.handle(m.DraftLate(commands(world, m.Draft)[-1].request.stamp))
    assert len(tables(world)) == 1
    drive(world, (m.Draft, m.Verify))
    assert len(tables(world)) <= len(commands(world, m.Verify))


def test_where_nothing_is_prepared_the_draft_is_sent_the_prompt_and_then_left_in_peace(tokenizer):
    world = World(request(PROMPT, 30), tokenizer, gamma=3, fanout=0).start().run()
    catching_up = [command for command in commands(world, m.Draft) if not len(command.request.growth)]
    assert [command.request.suffix for command in catching_up] == [PROMPT]
    assert len(commands(world, m.Draft)) > 5


def test_no_table_is_deeper_than_what_will_be_left_to_generate(tokenizer):
    """At least one token comes of the round that is running, and one of the next that needs no guess."""
    room = len(PROMPT) + 12
    world = pipelined(tokenizer, max_tokens=12, gamma=7)
    drive(world, (m.Draft, m.Verify))
    deepest = [
        asked.num_committed
        + max(depths((*asked.block.parents, *asked.growth.parents)))
        - max(asked.block.depths, default=0)
        for asked in tables(world)
    ]
    assert max(deepest) == room - 1


@pytest.mark.parametrize("bound", ["max_context_tokens", "kv_cache_tokens"])
def test_a_table_ends_where_the_drafts_room_does(tokenizer, bound):
    """Whatever part of the block is accepted, the block below it must still fit."""
    world = World(request(PROMPT, 60), tokenizer, gamma=4, fanout=2)
    drafting = world.session._drafting
    drafting._pair = replace(drafting._pair, draft=replace(drafting._pair.draft, **{bound: 20}))
    world.start()
    drive(world, (m.Draft, m.Verify))
    asked = [command.request for command in commands(world, m.Draft)]
    deepest = [
        each.num_committed + max(depths((*each.block.parents, *each.growth.parents)), default=0) for each in asked
    ]
    assert max(deepest) == 20
    assert max(each.num_committed for each in asked) <= 20
    assert world.tokens == plain(PROMPT, 60)


def test_a_draft_has_the_pilots_patience_unless_nobody_waits_for_it(tokenizer):
    world = World(request(PROMPT, 40), tokenizer, gamma=3, fanout=1)
    world.start().run()
    asked = commands(world, m.Draft)
    assert {command.request.is_table for command in asked} == {True, False}
    for command in asked:
        assert command.timeout_s == (world.pilot.patience_s if len(command.request.growth) else None)


def test_the_pilot_is_told_once_that_a_draft_is_late(tokenizer):
    world = pipelined(tokenizer)
    stamp = commands(world, m.Draft)[-1].request.stamp
    for _ in range(3):
        world.handle(m.DraftLate(stamp))
    world.handle(m.DraftLate(replace(stamp, round=stamp.round + 1)))
    assert world.pilot.num_late == 1


def test_the_pilot_is_told_how_long_each_answer_took_and_nothing_of_a_prefill(tokenizer):
    world = World(request(PROMPT, 12), tokenizer, gamma=3, fanout=0).start()
    timing = Timing(0.1, 0.2, 3, 4)
    num_blocks = 0
    while world.waiting:
        waiting = world.waiting.pop(0)
        event = waiting()
        if isinstance(event, m.DraftReplied):
            num_blocks += len(event.reply.tokens) > 0
            event = m.DraftReplied(replace(event.reply, timing=timing), 10.0, 10.5)
        world.handle(event)
    seen = [each for each in world.pilot.seen if isinstance(each, DraftSeen)]
    assert seen == [DraftSeen(is_table=False, elapsed_s=0.5, timing=timing)] * num_blocks
    assert world.chunks[-1].stats.draft_time_s == 0.5 * num_blocks > 0


def test_the_loss_of_a_draft_that_nobody_waits_for_is_no_failure(tokenizer):
    for is_answered in (True, False):
        world = pipelined(tokenizer)
        if is_answered:
            answer(world, m.Draft)
        world.handle(m.DraftLost(1))
        assert world.session.stats.num_draft_failures == (0 if is_answered else 1)
        assert [type(command) for command in world.sent[-2:]] == [m.ReleaseDraft, m.PlaceDraft]


def test_the_loss_of_a_draft_that_was_left_before_changes_nothing(tokenizer):
    world = pipelined(tokenizer)
    world.handle(m.DraftLost(1))
    num_sent = len(world.sent)
    world.handle(m.DraftLost(1))
    assert len(world.sent) == num_sent
    world.handle(m.DraftPlaced("another", 2))
    num_sent = len(world.sent)
    world.handle(m.DraftLost(1))
    assert len(world.sent) == num_sent


def test_sessions_that_lose_their_draft_together_do_not_come_back_together():
    pauses = set()
    for number in range(20):
        completion = Completion.begin(request(), pair(), f"r#{number}")
        pauses.add(Drafting(completion, FakePilot(), Statistics()).place_later().delay_s)
    assert len(pauses) == 20
    assert max(pauses) - min(pauses) > 0.3


def pair():
    return Pair(model_info(), model_info("draft"), SpeculationConfig(), Limits())


def test_each_table_is_reported_once_whatever_becomes_of_it(tokenizer):
    world = World(request(PROMPT, 60, wants_trace=True), tokenizer, gamma=1, fanout=1).start()
    drive(world, (m.Draft, m.Verify))
    stats = world.chunks[-1].stats
    reported = [call for chunk in world.chunks for call in chunk.trace if call.call is Call.TABLE]
    answered = [seen for seen in world.pilot.seen if isinstance(seen, DraftSeen) and seen.is_table]
    assert stats.num_hits > 0
    assert stats.num_misses > 0
    assert len(answered) - len(reported) in (0, 1), "the last one may still be on its way to the client"
    assert len([call for call in reported if call.num_used]) == stats.num_hits
    assert all(call.num_guesses > 0 for call in reported)


@pytest.mark.parametrize("num_behind", [DECODE_TOKENS, DECODE_TOKENS + 1])
def test_a_draft_that_is_far_behind_catches_up_before_it_is_asked_for_anything(tokenizer, num_behind):
    world = World(request(PROMPT, 200), tokenizer, gamma=3, fanout=1).start()
    world.deliver()
    place = world.waiting.pop(next(i for i, w in enumerate(world.waiting) if "DraftPlaced" in w.__code__.co_names))
    while len(world.session.tokens) < num_behind:
        answer(world, m.Verify)
    world.handle(place())
    asked = commands(world, m.Draft)[0]
    assert len(asked.request.suffix) == num_behind
    assert bool(len(asked.request.growth)) == (num_behind <= DECODE_TOKENS)
