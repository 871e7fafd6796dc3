"""A target that goes on by itself: its tokens are plain decoding's, and whoever makes an offer is answered once."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from time import monotonic

import pytest

from core.config import EngineConfig
from core.continuations import UNUSED
from core.protocol import ENDED, OVERTAKEN
from core.records import Continuation, Refused, Sampling, Stamp, Verdict, Verification
from core.speculation.token_tree import EMPTY_BLOCK, TokenTree
from tests.checkpoints import VOCAB_SIZE
from tests.exchange import replies_of
from tests.workers.engine.driving import EPOCH, Driver, chain, wrong
from workers.engine.target import TargetEngine
from workers.engine.thread import EngineLoop

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
]


def load(checkpoint, **settings):
    config = EngineConfig(checkpoint, block_tokens=4, **{"kv_cache_tokens": 512, **settings})
    return TargetEngine.load(config, EPOCH, lambda _: None)


@pytest.fixture
def engine(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def plain(checkpoint):
    engine = load(checkpoint)
    return {s: Driver(engine, PROMPT, s, session=f"plain {i}").run(24) for i, s in enumerate(SAMPLINGS)}


class Offering(Driver):
    """A session that offers continuations; replies are named by its rounds."""

    def ask(self, block=EMPTY_BLOCK):
        """Have a block verified; nothing is computed yet."""
        request = self.verify_request(block)
        self.engine.add(request)
        return request.stamp.round

    def offer(self, after, tree, *, is_open=False, **changes):
        self.round += 1
        stamp = Stamp(self.session, changes.pop("epoch", EPOCH), self.round)
        self.engine.add(Continuation(stamp, after, tree, is_open))
        return self.round

    def commit(self, verdict, block):
        self.log.extend([*(block.tokens[node] for node in verdict.path), verdict.next_token])
        self.held = verdict.held

    @property
    def output(self):
        return list(self.log.tokens[len(PROMPT) :])


def steps(engine, num=1):
    """Replies in this number of steps, by round."""
    found = {}
    for _ in range(num):
        for reply in engine.step():
            assert reply.stamp.round not in found, "one answer each"
            found[reply.stamp.round] = reply
        engine.check_integrity()
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_it_goes_on_below_the_verdict_with_what_is_left_of_rejected_guesses_forgotten(engine, plain, sampling):
    text = plain[sampling]
    session = Offering(engine, PROMPT, sampling)
    session.verify()
    block = TokenTree((text[1], wrong(text[2]), wrong(text[1])), (-1, 0, -1))
    tree = TokenTree((*block.tokens, text[2], text[3], wrong(text[4]), text[4], 7), (*block.parents, 0, 3, 4, 4, 2))
    first = session.ask(block)
    second = session.offer(first, tree)
    verdict = steps(engine)[first]
    assert (verdict.path, verdict.next_token, verdict.continued) == ((0,), text[2], second)
    session.commit(verdict, block)
    following = TokenTree((text[3], wrong(text[4]), text[4]), (-1, 0, 0))
    third = session.offer(second, TokenTree((*following.tokens, text[5]), (*following.parents, 2)))
    verdict = steps(engine)[second]
    assert (verdict.path, verdict.next_token, verdict.continued) == ((0, 2), text[5], third)
    session.commit(verdict, following)
    verdict = steps(engine)[third]
    session.commit(verdict, EMPTY_BLOCK)
    assert verdict.continued == 0
    assert session.output == text[:7]
    assert session.run(4) == text[7:11], "nothing of what was rejected is left in the KV"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_steps_follow_one_another_where_offers_are_open(engine, plain, sampling):
    session = Offering(engine, PROMPT, sampling)
    asked = session.ask()
    for _ in range(10):
        offered = session.offer(asked, EMPTY_BLOCK, is_open=True)
        verdict = steps(engine)[asked]
        assert verdict.continued == offered
        session.commit(verdict, EMPTY_BLOCK)
        asked = offered
    session.commit(steps(engine)[asked], EMPTY_BLOCK)
    assert session.output == plain[sampling][:11]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_steps_that_were_offered_ahead_need_no_message_and_leave_nothing_behind(engine, plain, sampling):
    """Nor is there anything of the steps that were made in vain when the session goes on from where it is."""
    text = plain[sampling]
    session = Offering(engine, PROMPT, sampling)
    rounds = [session.ask()]
    for _ in range(5):
        rounds.append(session.offer(rounds[-1], EMPTY_BLOCK, is_open=True))
    verdicts = steps(engine, 6)
    assert [verdicts[round_].next_token for round_ in rounds] == text[:6]
    assert [verdicts[round_].continued for round_ in rounds] == [*rounds[1:], 0]
    for round_ in rounds[:3]:  # the session has heard of these alone
        session.commit(verdicts[round_], EMPTY_BLOCK)
    asked = session.ask(chain(text[3], wrong(text[4])))
    verdict = steps(engine)[asked]
    assert (verdict.path, verdict.next_token) == ((0,), text[4])
    session.commit(verdict, chain(text[3], wrong(text[4])))
    assert session.output == text[:5]
    assert session.run(4) == text[5:9]


def test_another_offer_for_a_verdict_takes_the_place_of_all_that_was_offered_from_there_on(engine, plain):
    text = plain[SAMPLINGS[0]]
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    first = session.ask()
    gone = session.offer(first, EMPTY_BLOCK, is_open=True)
    gone_too = session.offer(gone, EMPTY_BLOCK, is_open=True)
    second = session.offer(first, EMPTY_BLOCK, is_open=True)
    third = session.offer(second, EMPTY_BLOCK, is_open=True)
    fourth = session.offer(second, chain(text[1], text[2]))
    replies = steps(engine)
    for dropped in (gone, gone_too, third):
        assert replies[dropped] == Refused(Stamp("s", EPOCH, dropped), UNUSED)
    assert replies[first].continued == second
    replies = steps(engine)
    assert replies[second].continued == fourth
    fifth = session.offer(fourth, chain(text[2]), is_open=True)
    sixth = session.offer(first, EMPTY_BLOCK, is_open=True)
    replies = steps(engine)
    assert replies[sixth].reason == OVERTAKEN, "its verdict has been given"
    assert (replies[fourth].path, replies[fourth].continued) == ((0,), fifth)


def test_all_that_was_offered_ahead_is_answered_with_the_verdict_at_which_the_target_stops(engine, plain):
    """Nothing comes for it any more, and who has made one call of it would wait for ever."""
    text = plain[SAMPLINGS[0]]
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    rounds = [session.ask()]
    for _ in range(4):
        rounds.append(session.offer(rounds[-1], EMPTY_BLOCK, is_open=True))
    engine.info = replace(engine.info, eos_token_ids=(text[1],))
    assert text[0] != text[1]
    replies = steps(engine, 2)
    assert [replies[round_].continued for round_ in rounds[:2]] == [rounds[1], 0]
    assert [replies[round_].reason for round_ in rounds[2:]] == [UNUSED] * 3


def test_what_was_offered_behind_an_offer_that_came_too_late_is_answered_when_the_target_has_passed_it(engine):
    session = Offering(engine, PROMPT)
    first = session.ask()
    taken = session.offer(first, EMPTY_BLOCK, is_open=True)
    steps(engine)
    late = session.offer(first, EMPTY_BLOCK, is_open=True)
    next_one = session.offer(taken, EMPTY_BLOCK, is_open=True)
    behind = session.offer(late, EMPTY_BLOCK, is_open=True)
    last = session.offer(next_one, EMPTY_BLOCK, is_open=True)
    replies = steps(engine, 2)
    assert (replies[taken].continued, replies[next_one].continued) == (next_one, last)
    assert (replies[late].reason, replies[behind].reason) == (OVERTAKEN, UNUSED)


def test_an_offer_for_a_later_verdict_is_not_taken_for_the_next(engine, plain):
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    asked = session.ask()
    session.round += 1
    later = session.offer(session.round, EMPTY_BLOCK, is_open=True)
    replies = steps(engine, 2)
    assert (replies[asked].continued, replies[later].reason) == (0, UNUSED)
    session.commit(replies[asked], EMPTY_BLOCK)
    assert session.run(3) == plain[SAMPLINGS[0]][1:4]


def test_what_comes_to_nothing_is_refused_and_the_session_goes_on_as_ever(engine, plain):
    text = plain[SAMPLINGS[0]]
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    first = session.ask()
    offered = session.offer(first, chain(wrong(text[0]), 3))
    replies = steps(engine)
    assert replies[offered] == Refused(Stamp("s", EPOCH, offered), UNUSED)
    assert replies[first].continued == 0
    session.commit(replies[first], EMPTY_BLOCK)
    assert not engine.has_work
    assert session.run(3) == text[1:4]


def test_the_last_offer_counts_and_each_is_answered_once(engine, plain):
    text = plain[SAMPLINGS[0]]
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    first = session.ask()
    second, third = session.offer(first, chain(text[0])), session.offer(first, chain(text[0], text[1]))
    replies = steps(engine)
    assert replies[second] == Refused(Stamp("s", EPOCH, second), UNUSED)
    assert replies[first].continued == third
    assert steps(engine)[third].path == (0,)


def test_an_offer_may_come_before_the_message_that_it_follows(engine, plain):
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    session.verify()
    session.round = 2
    offered = session.offer(2, EMPTY_BLOCK, is_open=True)
    assert steps(engine) == {}
    session.round = 1
    asked = session.ask()
    assert steps(engine)[asked].continued == offered == 3
    assert steps(engine)[offered].next_token == plain[SAMPLINGS[0]][2]


@pytest.mark.parametrize(
    ("after", "changes", "reason"),
    [
        (1, {}, OVERTAKEN),
        (2, {"tree": chain(VOCAB_SIZE)}, "a guess is outside the vocabulary"),
        (2, {"tree": chain(-3)}, "a guess is outside the vocabulary"),
        (2, {"epoch": EPOCH + 1}, "another incarnation"),
        (9, {}, OVERTAKEN),
    ],
)
def test_offers_that_can_be_of_no_use_are_refused_at_once(engine, after, changes, reason):
    session = Offering(engine, PROMPT)
    session.verify()
    asked = session.ask()
    assert asked == 2
    offered = session.offer(after, changes.pop("tree", EMPTY_BLOCK), is_open=True, **changes)
    replies = steps(engine)
    assert reason in replies[offered].reason
    assert (replies[asked].continued, engine.has_work) == (0, False)


def test_an_offer_for_a_verdict_that_has_been_given_is_refused(engine):
    session = Offering(engine, PROMPT)
    session.verify()
    offered = session.offer(1, EMPTY_BLOCK, is_open=True)
    assert steps(engine)[offered].reason == OVERTAKEN


def test_an_offer_whose_tree_does_not_begin_with_the_block_is_none(engine, plain):
    text = plain[SAMPLINGS[0]]
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    session.verify()
    asked = session.ask(chain(text[1]))
    offered = session.offer(asked, chain(wrong(text[1]), text[2]), is_open=True)
    replies = steps(engine)
    assert (replies[asked].continued, replies[offered].reason) == (0, UNUSED)


def test_a_message_of_the_session_overtakes_its_offers(engine, plain):
    text = plain[SAMPLINGS[0]]
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    asked = session.ask()
    offered = session.offer(asked, EMPTY_BLOCK, is_open=True)
    again = session.ask()
    replies = steps(engine)
    assert (replies[asked].reason, replies[offered].reason) == (OVERTAKEN, UNUSED)
    assert (replies[again].next_token, replies[again].continued) == (text[0], 0)


def test_who_drafts_with_q_is_asked_for_each_block(engine):
    session = Offering(engine, PROMPT, Sampling(temperature=1.0, seed=3), Verification.REJECTION)
    asked = session.ask()
    offered = session.offer(asked, EMPTY_BLOCK, is_open=True)
    assert "where the draft samples" in steps(engine)[offered].reason


def test_the_end_of_a_session_answers_its_offers(engine):
    session = Offering(engine, PROMPT)
    asked = session.ask()
    offered = session.offer(asked, EMPTY_BLOCK, is_open=True)
    engine.release(["s"])
    assert steps(engine)[offered].reason == UNUSED
    late = session.offer(asked, EMPTY_BLOCK, is_open=True)
    assert steps(engine)[late].reason == ENDED


def test_an_offer_for_a_message_that_never_comes_ends_with_the_session(engine):
    session = Offering(engine, PROMPT)
    session.verify()
    session.round = 7
    offered = session.offer(3, EMPTY_BLOCK, is_open=True)
    assert steps(engine) == {}
    engine._store.find("s").last_used_s = monotonic() - 1e6
    assert engine.expire() == ["s"]
    assert steps(engine)[offered].reason == UNUSED


def test_what_does_not_fit_the_context_is_not_gone_on_with(checkpoint):
    engine = load(checkpoint, kv_cache_tokens=8)
    session = Offering(engine, PROMPT)
    asked = session.ask()
    offered = session.offer(asked, EMPTY_BLOCK, is_open=True)
    verdict = steps(engine)[asked]
    assert verdict.continued == offered
    session.commit(verdict, EMPTY_BLOCK)
    following = session.offer(offered, EMPTY_BLOCK, is_open=True)
    verdict = steps(engine)[offered]
    assert verdict.continued == following, "eight tokens"
    last = session.offer(following, EMPTY_BLOCK, is_open=True)
    replies = steps(engine)
    assert (replies[following].continued, replies[last].reason) == (0, UNUSED)


def test_nobody_goes_on_after_the_end_of_a_text(checkpoint, plain):
    engine = load(checkpoint)
    engine.info = replace(engine.info, eos_token_ids=(plain[SAMPLINGS[0]][0],))
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    asked = session.ask()
    offered = session.offer(asked, EMPTY_BLOCK, is_open=True)
    replies = steps(engine)
    assert (replies[asked].continued, replies[offered].reason) == (0, UNUSED)


def test_nobody_goes_on_after_a_block_in_which_a_text_ends(checkpoint, plain):
    text = plain[SAMPLINGS[0]]
    engine = load(checkpoint)
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    session.verify()
    engine.info = replace(engine.info, eos_token_ids=(text[1],))
    assert text[2] != text[1]
    asked = session.ask(chain(text[1]))
    offered = session.offer(asked, chain(text[1]), is_open=True)
    replies = steps(engine)
    assert replies[asked].path == (0,)
    assert (replies[asked].continued, replies[offered].reason) == (0, UNUSED)


def test_all_of_a_pass_go_on_together_or_nobody_does(engine, plain):
    text = plain[SAMPLINGS[0]]
    one, other = (Offering(engine, PROMPT, SAMPLINGS[0], session=name) for name in ("one", "other"))
    other.round = 100
    asked = one.ask(), other.ask()
    offered = one.offer(asked[0], EMPTY_BLOCK, is_open=True)
    replies = steps(engine)
    assert [replies[round_].continued for round_ in asked] == [0, 0], "the other one has offered nothing"
    assert replies[offered].reason == UNUSED
    for session, round_ in zip((one, other), asked, strict=True):
        session.commit(replies[round_], EMPTY_BLOCK)
    asked = one.ask(), other.ask(chain(text[1]))
    offered = one.offer(asked[0], EMPTY_BLOCK, is_open=True), other.offer(asked[1], chain(text[1], text[2], text[3]))
    replies = steps(engine)
    assert tuple(replies[round_].continued for round_ in asked) == offered
    one.commit(replies[asked[0]], EMPTY_BLOCK)
    other.commit(replies[asked[1]], chain(text[1]))
    replies = steps(engine)
    one.commit(replies[offered[0]], EMPTY_BLOCK)
    other.commit(replies[offered[1]], chain(text[3]))
    assert (one.output, other.output) == (text[:3], text[:5])
    assert all(isinstance(reply, Verdict) for reply in replies.values())


def held_up(engine):
    """Has each pass of the engine tell that it is computed, and wait until it may go on."""
    computed, may_go_on = threading.Event(), threading.Semaphore(0)
    forward = engine._runtime.forward

    def waits(batch):
        logits = forward(batch)
        computed.set()
        assert may_go_on.acquire(timeout=30)
        return logits

    engine._runtime.forward = waits
    return computed, may_go_on


async def test_what_is_offered_while_a_pass_is_computed_is_gone_on_with_at_its_verdict(engine, plain):
    """Through the loop that serves: each offer is made when the pass that it is for has begun."""
    computed, may_go_on = held_up(engine)
    loop = EngineLoop(engine)
    loop.start()
    session = Offering(engine, PROMPT, SAMPLINGS[0])
    replies = [asyncio.create_task(replies_of(loop, [session.verify_request()]))]
    for after in range(1, 6):
        assert await asyncio.to_thread(computed.wait, 30)
        computed.clear()
        session.round += 1
        offer = Continuation(Stamp(session.session, EPOCH, session.round), after, EMPTY_BLOCK, True)
        replies.append(asyncio.create_task(replies_of(loop, [offer])))
        await asyncio.sleep(0)  # it is posted
        may_go_on.release()
    may_go_on.release()
    verdicts = [reply for (reply,) in await asyncio.gather(*replies)]
    await loop.close()
    assert [verdict.continued for verdict in verdicts] == [2, 3, 4, 5, 6, 0]
    assert [verdict.next_token for verdict in verdicts] == list(plain[SAMPLINGS[0]][:6])


async def test_the_time_in_the_queue_counts_as_waiting_and_not_for_what_was_offered(engine):
    """Both come while a pass is computed: the message waits for its end, the offer has nothing to wait for yet."""
    computed, may_go_on = held_up(engine)
    loop = EngineLoop(engine)
    loop.start()
    session, other = Offering(engine, PROMPT), Driver(engine, PROMPT, session="other")
    replies = [asyncio.create_task(replies_of(loop, [session.verify_request()]))]
    assert await asyncio.to_thread(computed.wait, 30)
    offer = Continuation(Stamp(session.session, EPOCH, 2), 1, EMPTY_BLOCK, True)
    replies.append(asyncio.create_task(replies_of(loop, [other.verify_request(), offer])))
    await asyncio.sleep(0.3)
    may_go_on.release(3)
    (first,), (waited, offered) = await asyncio.gather(*replies)
    await loop.close()
    assert first.continued == offered.stamp.round
    assert waited.timing.waited_s >= 0.3 > offered.timing.waited_s
