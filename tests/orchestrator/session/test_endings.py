"""The end of a session, however it comes: what its policy is told, what stays counted, and what is let go of."""

from __future__ import annotations

import pytest

from core.errors import RequestCancelled, ServiceError, Unavailable
from core.records import FinishReason, Refused, VerifyRequest
from orchestrator.policy.policy import Found, RoundOutcome
from orchestrator.session import messages as m
from orchestrator.session.statistics import DraftWait
from tests.orchestrator.dispatch.test_runner import World as ServedWorld
from tests.orchestrator.dispatch.test_runner import settle, slowed
from tests.orchestrator.fakes import EOS, request
from tests.orchestrator.world import World


def rounds_seen(world):
    return [seen for seen in world.policy.seen if isinstance(seen, RoundOutcome)]


@pytest.mark.parametrize("max_tokens", [1, 2, 9, 30])
def test_the_policy_is_told_each_verdict_once_and_the_last_one_too(tokenizer, max_tokens):
    """The last round shows nothing about whether the next block was there."""
    world = World(request(max_tokens=max_tokens), tokenizer, gamma=3).start().run()
    seen, stats = rounds_seen(world), world.chunks[-1].stats
    assert len(seen) == stats.num_rounds
    assert sum(len(each.path) for each in seen) == stats.num_accepted_tokens
    assert sum(len(each.shape) for each in seen) == stats.num_drafted_tokens
    assert seen[-1].found is Found.NOT_ASKED


def finish(world):
    world.run()
    assert world.chunks[-1].finish_reason is FinishReason.LENGTH


def cancel(world):
    world.deliver()
    world.handle(m.Abandoned(RequestCancelled("gone")))
    assert isinstance(world.error, RequestCancelled)


def be_refused(world):
    world.deliver()
    stamp = next(command for command in world.sent if isinstance(command, VerifyRequest)).stamp
    world.handle(m.TargetReplied(Refused(stamp, "no room")))
    assert isinstance(world.error, ServiceError)


def lose_every_target(world):
    for epoch in range(1, 10):
        if not world.session.is_closed:
            world.handle(m.TargetLeased(f"target {epoch}", epoch))
            world.handle(m.TargetLost(epoch, "killed"))
    assert isinstance(world.error, Unavailable)


@pytest.mark.parametrize("end", [finish, cancel, be_refused, lose_every_target])
def test_whatever_ends_a_session_its_policy_and_both_leases_are_let_go_of(tokenizer, end):
    world = World(request(max_tokens=6), tokenizer).start()
    assert not world.policy.is_closed
    end(world)
    assert world.policy.is_closed
    assert [type(command) for command in world.sent[-2:]] == [m.ReleaseTarget, m.ReleaseDraft]
    num_sent, world.waiting = len(world.sent), []
    for event in (m.TargetLeased("late", 11), m.DraftLeased("late", 12), m.TargetLost(1, "killed"), m.DraftLost(1)):
        world.handle(event)
    assert len(world.sent) == num_sent, "nothing is asked any more"


def test_an_output_that_is_complete_when_it_is_resumed_lets_go_of_its_policy(tokenizer):
    world = World(request(max_tokens=3, resume_tokens=(7, 8, 9)), tokenizer).start()
    assert world.policy.is_closed


def test_an_output_that_was_ended_by_its_last_token_is_not_continued(tokenizer):
    world = World(request(max_tokens=9, resume_tokens=(7, EOS)), tokenizer).start()
    assert world.chunks[-1].finish_reason is FinishReason.STOP
    assert (world.chunks[-1].token_ids, world.chunks[-1].usage.completion_tokens) == ((), 2)


@pytest.fixture
async def world():
    """A service whose target takes a second for each call, and whose draft takes two."""
    world = ServedWorld()
    for port, takes_s in ((world.leases.target, 1.0), (world.leases.draft, 2.0)):
        port.exchange = slowed(world.clock, port.exchange, takes_s)
    return world


@pytest.mark.parametrize("end", ["finished", "cancelled"])
async def test_what_sessions_have_waited_for_drafts_stays_counted_when_they_end(world, end):
    """How many replicas of the draft there are depends on it: a sum that falls would be taken for less load."""
    assert world.service.draft_wait == DraftWait()
    stream = world.service.generate(request((1,), 20))
    while world.service.draft_wait.waited_s == 0:
        await anext(stream)
    before = world.service.draft_wait
    if end == "finished":
        stats = [chunk async for chunk in stream][-1].stats
        assert world.service.draft_wait.waited_s == stats.draft_time_s - stats.hidden_draft_time_s
    else:
        await stream.aclose()
        await settle()
        assert world.service.draft_wait == before
    assert world.service.num_sessions == 0
    assert world.service.draft_wait.round_s >= before.round_s > before.waited_s > 0


async def test_the_waits_of_all_sessions_are_added_up_ended_or_not(world):
    await world.tokens(request((1,), 20))
    first = world.service.draft_wait
    stream = world.service.generate(request((2,), 20))
    for _ in range(6):
        await anext(stream)
    both = world.service.draft_wait
    assert both.waited_s > first.waited_s
    assert both.round_s > first.round_s
    await stream.aclose()
    assert world.service.draft_wait == both
    await world.check_nothing_is_held()
