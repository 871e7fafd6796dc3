"""A session's output is the target's own, whatever the draft says and whatever is lost, late or repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest, RequestCancelled, ServiceError, Unavailable, UnsoundScores
from core.records import (
    DraftRequest,
    DraftUpdate,
    FinishReason,
    Missing,
    Refused,
    Timing,
    TokenLogprobs,
    Usage,
    Verdict,
    VerifyRequest,
)
from core.speculation.growth import NewNodes
from core.speculation.guesser import DRAFT, Guesses
from core.speculation.token_tree import EMPTY_BLOCK, ROOT, TokenTree
from orchestrator.policy.growth import CATCH_UP
from orchestrator.policy.policy import Shape
from orchestrator.session import messages as m
from orchestrator.session.sourced_block import SourcedBlock
from tests.orchestrator.fakes import EOS, FakeTokenizer, next_token, plain, request
from tests.orchestrator.world import FaultyWorld, World, unlimited

ONES = NewNodes(0, (ROOT, 0, 1, 2), (1,) * 4, (0,) * 4, (0.5,) * 4, (0.5,) * 4)


def commands(world, kind):
    return [command for command in world.sent if isinstance(command, kind)]


def turns(world):
    """Requests to draft for the next block: others only have the draft take in the text."""
    return [c for c in commands(world, DraftRequest) if replace(c.growth, reports_all=False) != CATCH_UP]


def sourced(*tokens):
    """A chain, as if a draft had told of it."""
    block, num = TokenTree.chain(tokens), len(tokens)
    return SourcedBlock(block, Shape(block.parents, (0,) * num, (1.0,) * num), (DRAFT,) * num)


@pytest.mark.parametrize("gamma", range(9))
def test_output_is_plain_decoding_for_every_draft_length(tokenizer, gamma):
    world = World(request(max_tokens=20), tokenizer, gamma=gamma).start().run()
    assert world.tokens == plain((3, 1, 4), 20)
    assert world.chunks[-1].finish_reason is FinishReason.LENGTH
    assert (world.session.stats.num_accepted_tokens > 0) == (gamma > 0)


def test_every_pass_of_the_target_gives_one_token_more_than_it_accepts(tokenizer):
    world = World(request(max_tokens=20), tokenizer).start().run()
    stats = world.chunks[-1].stats
    assert stats.num_rounds + stats.num_accepted_tokens == 20
    assert stats.num_rounds == len(commands(world, VerifyRequest))
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert [guess for chunk in world.chunks for guess in chunk.is_guess].count(True) == stats.num_accepted_tokens


def test_no_guess_is_asked_for_that_could_not_be_used(tokenizer):
    world = World(request(max_tokens=6), tokenizer, gamma=8).start().run()
    for command in commands(world, DraftRequest):
        assert command.num_committed + command.growth.max_depth < 3 + 6


def test_a_draft_with_a_short_context_is_asked_only_while_it_has_room(tokenizer):
    world = World(request(max_tokens=30), tokenizer)
    drafting = world.session._drafts._first
    drafting._model = replace(drafting._model, max_context_tokens=12)
    world.start().run()
    assert world.tokens == plain((3, 1, 4), 30)
    assert max(c.num_committed + c.growth.max_depth for c in commands(world, DraftRequest)) == 12


def test_a_repeated_verdict_commits_nothing_twice(tokenizer):
    world = World(request(max_tokens=10), tokenizer, with_draft=False).start()
    world.deliver()
    verdict = world.deliver()
    before = list(world.tokens)
    world.handle(verdict)
    assert world.tokens == before
    assert world.session.stats.num_stale_replies == 1
    assert world.run().tokens == plain((3, 1, 4), 10)


def test_a_verdict_of_a_lost_target_is_not_taken_for_its_successors(tokenizer):
    world = World(request(max_tokens=10), tokenizer, with_draft=False).start()
    world.deliver()
    old = world.waiting.pop()()
    world.handle(m.TargetLost(1, "killed"))
    world.target.epoch = 2
    world.target.forget("s")
    world.handle(old)
    assert world.tokens == []
    assert world.run().tokens == plain((3, 1, 4), 10)


def test_an_engine_that_has_forgotten_is_sent_the_whole_prefix_and_the_spec(tokenizer):
    world = World(request(max_tokens=10), tokenizer, with_draft=False).start()
    world.deliver()
    world.deliver()
    world.target.forget("s")
    assert isinstance(world.deliver().reply, Missing)
    again = commands(world, VerifyRequest)[-1]
    assert (again.base.num_tokens, len(again.suffix)) == (0, 4)
    assert again.spec.prompt_len == 3
    assert world.run().tokens == plain((3, 1, 4), 10)


def test_the_wait_of_a_session_that_was_preempted_is_not_taken_for_a_rounds_duration(tokenizer, monkeypatch):
    world, seen = World(request(max_tokens=10), tokenizer, with_draft=False).start(), []
    monkeypatch.setattr(world.session._drafts, "observe_interval", lambda round_: seen.append(round_.num_tokens))
    for _ in range(3):
        world.deliver()
    assert seen == [1], "from the first verdict to the second"
    world.target.forget("s")
    assert isinstance(world.deliver().reply, Missing)
    world.deliver()
    assert seen == [1]
    world.deliver()
    assert seen == [1, 1]


def test_an_engine_that_never_remembers_is_given_up(tokenizer):
    world = World(request(), tokenizer, with_draft=False).start()
    world.deliver()
    for number in range(4):
        assert len(commands(world, VerifyRequest)) == 1 + number, "it is sent everything again, three times"
        world.waiting.clear()
        world.handle(m.TargetReplied(Missing(commands(world, VerifyRequest)[-1].stamp, 0)))
    assert isinstance(world.sent[-1], m.LeaseTarget)
    assert world.session.stats.num_target_failures == 1


def test_leaving_targets_that_are_to_stop_is_no_failure_however_often(tokenizer):
    world = World(request(), tokenizer, with_draft=False).start()
    world.deliver()
    for _ in range(world.session._pair.limits.max_target_retries + 3):
        epoch = world.session._target._view.epoch
        world.handle(m.TargetLost(epoch, "it is to stop", is_planned=True))
        assert isinstance(world.sent[-1], m.LeaseTarget)
        world.handle(m.TargetLeased(f"another than {epoch}", epoch + 1))
    assert world.session.stats.num_target_failures == 0
    assert not world.session.is_closed


def test_a_late_draft_does_not_hold_up_the_round_and_is_asked_again_once_it_has_answered(tokenizer):
    world = World(request(max_tokens=12), tokenizer, gamma=3).start()
    while not (asked := turns(world)):
        world.deliver()
    late = world.waiting.pop()
    world.handle(m.DraftLate(asked[0].stamp))
    assert commands(world, VerifyRequest)[-1].block == EMPTY_BLOCK
    world.deliver()
    assert commands(world, DraftRequest) == asked[:0] + commands(world, DraftRequest)[:2], "a busy draft is not asked"
    world.handle(late())
    assert world.run().tokens == plain((3, 1, 4), 12)
    assert len(commands(world, DraftRequest)) > 2, "it has answered, so it is asked again"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": (50, 1, 1, 1)},
        {"tokens": (-2, 1, 1, 1)},
        {"tokens": (1, 2**40, 1, 1)},
        {"first": 9},
        {"held": 10**6},
        {"held": -9},
    ],
)
def test_a_corrupt_block_never_reaches_the_target(tokenizer, changes):
    world = World(request(max_tokens=12), tokenizer, gamma=4).start()
    while not (asked := turns(world)):
        world.deliver()
    world.waiting.pop()
    answer = DraftUpdate(asked[0].stamp, ONES, asked[0].num_committed, is_over=True)
    columns = {name: value for name, value in changes.items() if name != "held"}
    held = changes.get("held", answer.held)
    world.handle(m.DraftReplied(replace(answer, new_nodes=replace(ONES, **columns), held=held)))
    assert commands(world, VerifyRequest)[-1].block == EMPTY_BLOCK
    assert world.session.stats.num_draft_failures == 1
    assert world.run().tokens == plain((3, 1, 4), 12)


def verdict(world, **changes):
    stamp = commands(world, VerifyRequest)[-1].stamp
    return Verdict(**{"stamp": stamp, "path": (), "next_token": 5, "held": 3, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"path": (0,)}, {"path": (-1,)}, {"next_token": 50}, {"next_token": -1}, {"held": 4}, {"held": -1}],
)
def test_a_verdict_that_cannot_be_right_costs_the_target_its_lease_and_commits_nothing(tokenizer, changes):
    world = World(request(), tokenizer, with_draft=False).start()
    world.deliver()
    world.waiting.clear()
    world.handle(m.TargetReplied(verdict(world, **changes)))
    assert world.tokens == []
    assert [type(command) for command in world.sent[-2:]] == [m.ReleaseTarget, m.LeaseTarget]


@pytest.mark.parametrize("path", [(1,), (0, 2), (0, 0), (0, 1, 3), (0, 1, -1), (0, 3), (2, 1)])
def test_an_accepted_path_that_is_none_of_the_block_is_not_taken(tokenizer, path):
    """Verdict on a tree: 0 and 2 hang below the root, 1 below 0, 3 below 2."""
    for accepted, is_path in ((path, False), ((0, 1), True), ((2, 3), True), ((2,), True), ((), True)):
        world = World(request(), tokenizer, with_draft=False).start()
        world.deliver()
        world.waiting.clear()
        world.session._target.block = replace(sourced(7, 8, 9, 10), tree=TokenTree((7, 8, 9, 10), (-1, 0, -1, 2)))
        world.handle(m.TargetReplied(verdict(world, path=accepted, held=3)))
        assert bool(world.tokens) == is_path


def test_a_verdict_may_say_that_all_of_its_path_is_held_and_no_more(tokenizer):
    for held, is_possible in ((3, True), (5, True), (6, False)):
        world = World(request(), tokenizer, with_draft=False).start()
        world.deliver()
        world.waiting.clear()
        world.session._target.block = sourced(7, 8)
        world.handle(m.TargetReplied(verdict(world, path=(0, 1), held=held)))
        assert bool(world.tokens) == is_possible


def test_the_loss_of_a_target_that_was_left_before_changes_nothing(tokenizer):
    world = World(request(max_tokens=6), tokenizer, with_draft=False).start()
    world.deliver()
    world.waiting.clear()
    world.handle(m.TargetLost(1, "killed"))
    world.target = type(world.target)(epoch=2)
    world.deliver()
    num_sent = len(world.sent)
    world.handle(m.TargetLost(1, "killed, says somebody late"))
    assert len(world.sent) == num_sent
    assert world.run().tokens == plain((3, 1, 4), 6)
    assert world.chunks[-1].stats.num_target_failures == 1


def test_a_lost_target_is_given_back_before_another_is_asked_for(tokenizer):
    world = World(request(), tokenizer, with_draft=False).start()
    world.deliver()
    world.handle(m.TargetLost(1, "killed"))
    assert [type(command) for command in world.sent[-2:]] == [m.ReleaseTarget, m.LeaseTarget]


def test_the_policy_is_told_how_long_a_round_took_and_what_the_target_says_of_it(tokenizer):
    world = World(request(), tokenizer, with_draft=False).start()
    world.deliver()
    timing = Timing(0.1, 0.2, 1, 3)
    for number in range(2):
        sent = commands(world, VerifyRequest)[-1]
        reply = replace(world.target.verify(sent), timing=replace(timing, num_passes=number))
        world.handle(m.TargetReplied(reply, 10.0 + number, 12.5 + 2 * number))
    assert [seen.elapsed_s for seen in world.policy.seen] == [2.5, 3.5]
    assert [seen.timing for seen in world.policy.seen] == [replace(timing, num_passes=number) for number in range(2)]
    assert world.session.stats.verify_time_s == 2.5 + 3.5


def test_what_was_looked_up_is_counted_apart(tokenizer):
    """A prompt whose first token of output repeats what followed its last one before."""
    prompt = next((5, a, b, 5) for a in range(1, 50) for b in range(50) if next_token((5, a, b, 5)) == a)
    world = World(request(prompt, 8), tokenizer, with_draft=False, gamma=2, guessers=("prompt_lookup",)).start().run()
    assert commands(world, VerifyRequest)[1].block.tokens == (prompt[2], 5)
    stats = world.chunks[-1].stats
    assert stats.num_lookup_tokens == stats.num_drafted_tokens >= 2
    drafted = World(request(prompt, 8), tokenizer).start().run().chunks[-1].stats
    assert drafted.num_drafted_tokens > drafted.num_lookup_tokens == 0


def test_a_request_that_leaves_the_draft_out_takes_no_place_at_one(tokenizer):
    prompt = next((5, a, b, 5) for a in range(1, 50) for b in range(50) if next_token((5, a, b, 5)) == a)
    job = request(prompt, 8, guessers=("prompt_lookup",))
    world = World(job, tokenizer, gamma=2, guessers=("draft",)).start().run()
    assert not commands(world, m.LeaseDraft)
    assert not commands(world, DraftRequest)
    assert world.tokens == plain(prompt, 8)
    (stats,) = world.chunks[-1].stats.sources
    assert (stats.name, stats.num_drafted_tokens > 0) == ("prompt_lookup", True)


class Broken:
    """Raises, or says what no sound guesser says."""

    def __init__(self, answer):
        self.answer = answer

    def propose(self, text):
        if self.answer is None:
            raise RuntimeError("the guesser is broken")
        return self.answer


@pytest.mark.parametrize("answer", [None, Guesses.chain([10_000], [0.9]), Guesses((7,), (1,), (0.9,))], ids=repr)
def test_a_broken_guesser_changes_no_token_and_is_left_out(tokenizer, answer):
    world = World(request((5, 7), 12), tokenizer, guessers=("draft", "prompt_lookup"))
    world.session._panel._guessers["prompt_lookup"] = Broken(answer)
    world.start().run()
    assert world.tokens == plain((5, 7), 12)
    by_name = {each.name: each for each in world.chunks[-1].stats.sources}
    assert by_name["prompt_lookup"].num_failures == 1
    assert by_name["draft"].num_accepted_tokens > 0


@pytest.mark.parametrize(("asked", "served"), [(0, 4), (None, 0), (4, 0)])
def test_no_draft_is_asked_for_where_request_or_service_want_none(tokenizer, asked, served):
    world = World(request(max_draft_tokens=asked), tokenizer, gamma=served).start()
    assert commands(world, m.LeaseDraft) == []
    assert commands(World(request(max_draft_tokens=1), tokenizer, gamma=1).start(), m.LeaseDraft) != []
    assert commands(World(request(), tokenizer, with_draft=False).start(), m.LeaseDraft) == []


def test_a_lost_target_is_replaced_and_gets_prompt_and_committed_tokens(tokenizer):
    world = World(request(max_tokens=12), tokenizer).start()
    while len(world.tokens) < 5:
        world.deliver()
    world.target = type(world.target)(epoch=2)
    world.waiting.clear()
    world.handle(m.TargetLost(1, "killed"))
    assert world.run().tokens == plain((3, 1, 4), 12)
    assert world.chunks[-1].stats.num_target_failures == 1


@pytest.mark.parametrize("first", [0, 2])
def test_what_was_cached_is_what_the_first_verdict_says_whoever_goes_on(tokenizer, first):
    """Later verdicts come from targets that have cached other amounts, resumed tokens among them."""
    world = World(request(max_tokens=12, resume_tokens=plain((3, 1, 4), 2)), tokenizer, with_draft=False).start()
    world.target.num_cached = first
    while len(world.tokens) < 2:
        world.deliver()
    world.target = type(world.target)(epoch=2)
    world.target.num_cached = 1
    world.waiting.clear()
    world.handle(m.TargetLost(1, "killed"))
    world.run()
    assert {chunk.usage.cached_tokens for chunk in world.chunks} == {first}


def test_resumed_tokens_are_none_of_the_prompt_s_that_were_cached(tokenizer):
    world = World(request(resume_tokens=plain((3, 1, 4), 4)), tokenizer, with_draft=False).start()
    world.target.num_cached = 6
    assert world.run().chunks[-1].usage == Usage(3, 12, 3)


def test_a_target_that_is_lost_again_and_again_ends_the_stream_with_unavailable(tokenizer):
    world = World(request(), tokenizer, with_draft=False).start()
    for _ in range(10):
        if world.is_over:
            break
        world.deliver()
        world.waiting.clear()
        world.handle(m.TargetLost(1, "killed"))
    assert isinstance(world.error, Unavailable)
    assert isinstance(world.sent[-1], m.ReleaseDraft)


def test_only_losses_of_targets_in_a_row_count_against_a_stream(tokenizer):
    """Losses up to the limit, a token, and again: a long stream outlives any number of targets."""
    world = World(request(max_tokens=8), tokenizer, with_draft=False).start()
    most = world.session._pair.limits.max_target_retries
    world.deliver()
    while not world.is_over:
        pauses_s = []
        for _ in range(most):
            world.target.forget("s")
            world.waiting.clear()
            world.handle(m.TargetLost(1, "killed"))
            pauses_s.append(world.sent[-1].delay_s)
            world.deliver()
        assert pauses_s == [0.05 * 2**number for number in range(1, most + 1)]
        world.deliver()
    assert world.tokens == plain((3, 1, 4), 8)
    assert world.chunks[-1].stats.num_target_failures == 8 * most


def test_a_lost_draft_is_leased_again_after_pauses_that_grow(tokenizer):
    world = World(request(max_tokens=40), tokenizer).start()
    pauses = []
    for _ in range(9):
        world.handle(m.DraftNotLeased())
        pauses.append(commands(world, m.LeaseDraft)[-1].delay_s)
    for pause_s, longest_s in zip(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=True):
        assert longest_s / 2 <= pause_s <= longest_s
    shares = {pause_s / longest_s for pause_s, longest_s in zip(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=True)}
    assert len(shares) == len(pauses), "jittered, so that many sessions do not come back as one"


@pytest.mark.parametrize(
    ("is_final", "field", "error", "status"),
    [
        (False, None, ServiceError, "UNAVAILABLE"),
        (True, None, UnsoundScores, "FAILED_PRECONDITION"),
        (True, "structured_output", InvalidRequest, "INVALID_ARGUMENT"),
    ],
)
def test_a_refusal_by_the_target_ends_the_stream_and_a_refusal_by_the_draft_does_not(
    tokenizer, is_final, field, error, status
):
    world = World(request(), tokenizer, gamma=2).start()
    world.deliver()
    world.deliver()
    draft_stamp = commands(world, DraftRequest)[-1].stamp
    world.handle(m.DraftReplied(Refused(draft_stamp, "no room")))
    assert world.error is None
    world.handle(m.TargetReplied(Refused(commands(world, VerifyRequest)[-1].stamp, "no room", is_final, field)))
    assert type(world.error) is error
    assert world.error.status == status, "which says whether a client may try again"
    assert str(world.error) == ("no room" if field is None else f"{field}: no room")


@pytest.mark.parametrize("field", ["structured_output", None])
def test_an_output_that_has_begun_is_cut_short_where_its_constraints_leave_no_token(tokenizer, field):
    world = World(request(), tokenizer, with_draft=False).start()
    while not world.chunks:
        world.deliver()
    stamp = commands(world, VerifyRequest)[-1].stamp
    world.handle(m.TargetReplied(Refused(stamp, "cannot be followed", is_final=True, field=field)))
    assert world.session.is_closed
    if field is None:
        assert isinstance(world.error, UnsoundScores)
        return
    last = world.chunks[-1]
    assert world.error is None
    assert (last.finish_reason, last.token_ids) == (FinishReason.LENGTH, ())
    assert str(last.problem) == "structured_output: cannot be followed"
    assert last.usage.completion_tokens == len(world.tokens)
    assert last.stats is not None
    assert world.policy.is_closed


@pytest.mark.parametrize("resumed", [(), (1, 2)])
def test_an_output_that_has_not_begun_here_is_refused(tokenizer, resumed):
    world = World(request(resume_tokens=resumed), tokenizer, with_draft=False).start()
    world.deliver()
    stamp = commands(world, VerifyRequest)[-1].stamp
    world.handle(m.TargetReplied(Refused(stamp, "cannot be followed", is_final=True, field="structured_output")))
    assert isinstance(world.error, InvalidRequest)


def test_a_cancelled_session_releases_both_sides_and_says_nothing_more(tokenizer):
    world = World(request(), tokenizer).start()
    world.deliver()
    world.deliver()
    world.handle(m.Abandoned(RequestCancelled("gone")))
    assert [type(command) for command in world.sent[-3:]] == [m.Fail, m.ReleaseTarget, m.ReleaseDraft]
    num_sent = len(world.sent)
    world.run()
    assert len(world.sent) == num_sent


def test_an_end_inside_an_accepted_block_cuts_it_there(tokenizer):
    prompt, expected = (3, 1, 4), plain((3, 1, 4), 12)
    stop_at = next(i for i in range(4, 12) if expected[i] not in expected[:i])
    ending = replace(request(max_tokens=12), stop_token_ids=frozenset({expected[stop_at]}))
    world = World(ending, tokenizer, gamma=8).start().run()
    assert world.tokens == expected[: stop_at + 1]
    assert world.chunks[-1].finish_reason is FinishReason.STOP
    assert world.chunks[-1].matched_stop == expected[stop_at]
    assert world.chunks[-1].usage.completion_tokens == stop_at + 1
    assert world.text == tokenizer.decode(expected[:stop_at])
    assert len(prompt) == world.chunks[-1].usage.prompt_tokens


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_cuts_text_and_ids_together(tokenizer, include_stop):
    expected = plain((3, 1, 4), 12)
    text = tokenizer.decode(expected)
    stop = text[6:8]
    world = World(request(max_tokens=12, stop=(stop,), include_stop=include_stop), tokenizer, gamma=8).start().run()
    end = text.index(stop)
    assert world.text == text[: end + 2 * include_stop]
    assert world.tokens == expected[: end + 2]
    assert world.chunks[-1].matched_stop == stop


@pytest.mark.parametrize("num_resumed", [1, 5, 11])
def test_a_resumed_stream_continues_as_if_it_had_never_stopped(tokenizer, num_resumed):
    expected = plain((3, 1, 4), 12)
    world = World(request(max_tokens=12, resume_tokens=tuple(expected[:num_resumed])), tokenizer).start().run()
    assert world.tokens == expected[num_resumed:]
    assert world.text == tokenizer.decode(expected[num_resumed:])
    assert world.chunks[-1].usage.completion_tokens == 12


def test_output_that_is_resumed_is_no_part_of_the_prompt(tokenizer):
    """Presence and frequency penalties, and min_tokens, count output alone."""
    world = World(request((1, 2, 3), max_tokens=12, resume_tokens=(7, 8)), tokenizer).start().run()
    assert world.session._target._view._spec.prompt_len == 3


def test_an_output_that_is_complete_needs_no_model_to_be_resumed(tokenizer):
    world = World(request(max_tokens=3, resume_tokens=(7, 8, 9)), tokenizer).start()
    assert world.chunks[-1].finish_reason is FinishReason.LENGTH
    assert world.tokens == []
    assert not world.waiting


def test_end_of_sequence_ends_the_stream_unless_it_is_to_be_ignored(tokenizer):
    for ignore_eos in (False, True):
        world = World(request(max_tokens=3, ignore_eos=ignore_eos), tokenizer, with_draft=False).start()
        world.deliver()
        world.waiting.clear()
        world.handle(m.TargetReplied(verdict(world, next_token=EOS)))
        assert world.is_over == (not ignore_eos)
        assert world.text == ""


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    gamma=st.integers(0, 8),
    max_tokens=st.integers(1, 40),
    guessers=st.sampled_from([("draft",), ("draft", "prompt_lookup"), ("prompt_lookup",)]),
)
def test_no_order_of_faults_changes_a_token(seed, gamma, max_tokens, guessers):
    """Late, lost, repeated, reordered, corrupt, restarted: the client sees plain decoding, once, and one end."""
    prompt = (1 + seed % 40, 7)
    job, settings = request(prompt, max_tokens), {"gamma": gamma, "guessers": guessers}
    world = FaultyWorld(seed, job, FakeTokenizer(), limits=unlimited(), **settings).start().run()
    assert world.error is None
    assert world.tokens == plain(prompt, max_tokens)
    assert [chunk.finish_reason is not None for chunk in world.chunks].count(True) == 1
    assert world.num_target_leases == world.num_draft_leases == 0


def awaiting_block(tokenizer, **changes):
    """A world whose target waits for a block; the draft's request is the last that an engine was sent."""
    world = World(request(**changes), tokenizer, gamma=4).start()
    while not (turns(world) and world.last_to_an_engine is turns(world)[-1]):
        world.deliver()
    return world


def test_a_stale_reply_of_the_draft_changes_nothing(tokenizer):
    world = awaiting_block(tokenizer, max_tokens=20)
    stamp = world.last_to_an_engine.stamp
    stale = DraftUpdate(replace(stamp, round=stamp.round - 1), ONES, 4, is_over=True)
    num_sent = len(world.sent)
    world.handle(m.DraftReplied(stale))
    assert [type(command) for command in world.sent[num_sent:]] == [m.Await], "it waits on"
    assert world.session.stats.num_stale_replies == 1


def test_the_lateness_of_an_earlier_request_does_not_end_the_wait_for_this_one(tokenizer):
    world = awaiting_block(tokenizer, max_tokens=20)
    stamp = world.last_to_an_engine.stamp
    num_sent = len(world.sent)
    world.handle(m.DraftLate(replace(stamp, round=stamp.round - 1)))
    assert [type(command) for command in world.sent[num_sent:]] == [m.Await], "it waits on"


@pytest.mark.parametrize("held", [-9, 10**6])
def test_a_draft_that_claims_nonsense_is_dropped_and_the_stream_goes_on(tokenizer, held):
    world = awaiting_block(tokenizer, max_tokens=20)
    world.waiting.pop()
    world.handle(m.DraftReplied(Missing(world.last_to_an_engine.stamp, held)))
    assert any(isinstance(command, m.ReleaseDraft) for command in world.sent)
    assert world.run().tokens == plain((3, 1, 4), 20)


def test_forgetting_now_and_then_is_forgiven_each_time(tokenizer):
    """Four times Missing in a row is too much; four times in a stream is not."""
    world = World(request(max_tokens=20), tokenizer, with_draft=False).start()
    world.deliver()
    for _ in range(10):
        world.deliver()
        world.target.forget("s")
        world.deliver()
    assert world.run().tokens == plain((3, 1, 4), 20)
    assert world.session.stats.num_target_failures == 0


def test_after_the_draft_has_been_of_use_its_next_loss_pauses_as_briefly_as_the_first(tokenizer):
    world = World(request(max_tokens=60), tokenizer).start()
    for _ in range(2):
        world.waiting.pop()
        world.handle(m.DraftNotLeased())
    assert commands(world, m.LeaseDraft)[-1].delay_s >= 1.0
    while world.session.stats.num_draft_rounds == 0:
        world.deliver()
    world.handle(m.DraftLost(1))
    assert commands(world, m.LeaseDraft)[-1].delay_s <= 1.0


def test_a_request_can_lower_the_services_draft_length_but_not_raise_it(tokenizer):
    for asked, expected in ((2, 2), (30, 4)):
        world = awaiting_block(tokenizer, max_tokens=40, max_draft_tokens=asked)
        assert world.last_to_an_engine.growth.max_depth == expected
    off = World(request(max_draft_tokens=0), tokenizer).start().run()
    assert commands(off, m.LeaseDraft) == []


def test_everything_is_cut_at_the_same_token(tokenizer):
    """A stop string inside an accepted block, before a stop token of the same block: the string was first."""
    expected = plain((3, 1, 4), 12)
    text = tokenizer.decode(expected)
    entry = [TokenLogprobs(-float(n)) for n in range(12)]
    world = World(
        request(max_tokens=12, stop=(text[2],), stop_token_ids=frozenset({expected[4]}), num_logprobs=0), tokenizer
    ).start()
    world.deliver()
    world.waiting.clear()
    world.session._target.block = sourced(*expected[:6])
    world.handle(
        m.TargetReplied(verdict(world, path=tuple(range(6)), next_token=expected[6], held=9, logprobs=tuple(entry[:7])))
    )
    chunk = world.chunks[-1]
    assert chunk.matched_stop == text[2]
    end = text.index(text[2]) + 1
    assert chunk.token_ids == tuple(expected[:end])
    assert len(chunk.logprobs) == len(chunk.is_guess) == end == chunk.usage.completion_tokens


def test_the_fake_target_would_notice_a_lost_token():
    """The check above can fail: drop one token of the prefix and the next is another."""
    assert next_token([3, 1, 4, 1]) != next_token([3, 1, 4])
