"""Candidates that a draft keeps from one request to the next change no reply: they only save passes.

Every reply of a session with a past is compared with what a session says that begins with the same text. Both run in
deterministic steps, where a row's bits do not depend on its company: so equal means equal.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.config import EngineConfig
from core.records import Missing, Sampling, Verification
from core.speculation.growth import TreeSpec
from core.speculation.token_tree import EMPTY_BLOCK, ROOT, subtree
from tests.checkpoints import write
from tests.workers.engine.driving import EPOCH, Driver, answer, has_grown, step, tree_of, wrong
from tests.workers.engine.growths import TOKENS, allowed, fresh_candidates, fresh_reply, growths, places_of, wide
from workers.engine.draft import DraftEngine

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
]
EACH_WAY = (Verification.COUPLED, Verification.REJECTION, Verification.RECURSIVE_REJECTION)
"""With shared noise, by draws for a chain, and by draws for a tree."""
NUM_KV_TOKENS = 160
PROMPT = [5, 17, 99, 4, 200, 31]


@cache
def checkpoint(family):
    return str(write(family, Path(mkdtemp())))


@cache
def reference():
    """An engine with room for all, on which nothing but fresh sessions runs."""
    return load("llama", kv_cache_tokens=4096)


def load(family, **settings):
    config = EngineConfig(checkpoint(family), block_tokens=4, deterministic=True, **settings)
    return DraftEngine.load(config, EPOCH, 8, lambda _: None)


class Past(RuleBasedStateMachine):
    """One session that is asked for this and that, commits what was guessed or something else, and is disturbed."""

    @initialize(sampling=st.sampled_from(SAMPLINGS), verification=st.sampled_from(Verification))
    def begin(self, sampling, verification):
        self.engine = load("llama", kv_cache_tokens=NUM_KV_TOKENS)
        self.driver = Driver(self.engine, PROMPT, sampling, verification)
        self.seen = EMPTY_BLOCK
        self.num_others = 0

    def check(self, growth, reply):
        assert has_grown(reply)
        self.driver.held = reply.held
        spec, text = self.driver.spec, list(self.driver.log.tokens)
        self.seen = tree_of(reply)
        if spec.needs_q:
            assert reply.new_nodes == fresh_reply(reference(), spec, text, growth).new_nodes
            return
        for above, (by_rank, margin) in places_of(reply.new_nodes, text).items():
            tokens, margin_there = fresh_candidates(reference(), spec, above, growth)
            assert by_rank == dict(enumerate(tokens[: len(by_rank)]))
            assert margin == margin_there

    @rule(growth=growths)
    def ask(self, growth):
        growth = allowed(growth, self.driver.spec)
        reply = answer(self.engine, self.driver.draft_request(growth))
        if isinstance(reply, Missing):
            self.driver.held = reply.held
            reply = answer(self.engine, self.driver.draft_request(growth))
        self.check(growth, reply)

    @rule(data=st.data())
    def commit(self, data):
        """Down what was seen, and mostly a token that was not."""
        node, tokens = ROOT, []
        for _ in range(data.draw(st.integers(0, 4))):
            children = [n for n in range(len(self.seen)) if self.seen.parents[n] == node]
            if not children:
                break
            node = data.draw(st.sampled_from(children))
            tokens.append(self.seen.tokens[node])
        self.seen = subtree(self.seen, node)[0]
        if data.draw(st.integers(0, 2)):
            tokens.append(data.draw(TOKENS))
            child = self.seen.child(ROOT, tokens[-1])
            self.seen = EMPTY_BLOCK if child is None else subtree(self.seen, child)[0]
        if len(self.driver.log) + len(tokens) <= 60:
            self.driver.log.extend(tokens)

    @rule()
    def forget(self):
        """The session's messages begin with nothing, as after a change of mind about what the engine holds."""
        self.driver.held = 0

    @rule(first=growths, num_steps=st.integers(0, 3), second=growths)
    def overtake(self, first, num_steps, second):
        """A tree in the making gives way to another after a few steps."""
        first = allowed(first, self.driver.spec)
        self.engine.add(self.driver.draft_request(first))
        replies = {}
        for _ in range(num_steps):
            replies.update(step(self.engine))
        self.engine.check_integrity()
        reply = replies.get(self.driver.session)
        if has_grown(reply):
            self.check(first, reply)
        self.ask(second)

    @rule(num_tokens=st.integers(40, 150))
    def preempt(self, num_tokens):
        """A neighbour needs room, which may cost guesses, the session, or nothing."""
        self.num_others += 1
        session = f"other {self.num_others}"
        other = Driver(self.engine, [7] * num_tokens, session=session)
        assert has_grown(other.ask(1))
        self.engine.release([session])

    @invariant()
    def agrees(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()


Past.TestCase.settings = settings(max_examples=15, stateful_step_count=10, deadline=None)
test_replies_do_not_depend_on_the_past = pytest.mark.thorough(Past.TestCase)


@pytest.fixture(scope="module")
def engine():
    return load("llama", kv_cache_tokens=2048)


@pytest.fixture
def driver(engine, request):
    return Driver(engine, PROMPT, Sampling(temperature=0.9, seed=3), session=request.node.name)


def cost(engine, action):
    """Passes and rows of the model that `action` took; and what it answered."""
    before = engine.stats()
    answered = action()
    after = engine.stats()
    return after.num_steps - before.num_steps, after.num_rows - before.num_rows, answered


def test_what_was_accepted_is_not_fed_again(driver, engine):
    block = driver.draft(4)
    driver.log.extend([*block.tokens[:2], wrong(block.tokens[2])])
    assert cost(engine, lambda: driver.draft(1))[:2] == (1, 1), "the correction alone"
    block = driver.draft(3)
    driver.log.extend(block.tokens[:2])
    assert cost(engine, lambda: driver.draft(1))[:2] == (0, 0), "the text ends at what was fed"


DRAWN = pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])


@DRAWN
def test_where_a_draft_samples_it_draws_anew_and_feeds_again_no_more_than_the_last_token(engine, verification):
    driver = Driver(engine, PROMPT, Sampling(temperature=0.9, seed=3), verification, session=verification)
    block = driver.draft(4)
    assert cost(engine, lambda: driver.draft(2))[:2] == (2, 2), "the last token again, and the first guess"
    driver.draft(4)
    driver.log.extend([*block.tokens[:2], wrong(block.tokens[2])])
    assert cost(engine, lambda: driver.draft(2))[:2] == (2, 2), "the correction, and the first guess"
    block = driver.draft(4)
    driver.log.extend(block.tokens[:3])
    assert cost(engine, lambda: driver.draft(1))[:2] == (1, 1), "the last token of what was fed"


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_tree_is_right_where_windows_slide(family):
    engine, driver = load(family), Driver(load(family), range(40, 80), Sampling(temperature=0.9, seed=3))
    growth = wide(num_rows=4, num_passes=5)
    places = places_of(driver.ask(growth).new_nodes, driver.log.tokens)
    assert len(places) == 1 + 4 * 4
    for above, (by_rank, margin) in places.items():
        tokens, margin_there = fresh_candidates(engine, driver.spec, above, growth)
        assert (by_rank, margin) == (dict(enumerate(tokens[: len(by_rank)])), margin_there)


def test_a_shorter_or_another_prefix_keeps_nothing_below_it(engine, driver):
    block = driver.draft(4)
    held = engine._store.find(driver.session)
    assert len(held.tree) == 3
    driver.log.truncate(len(PROMPT) - 1)
    driver.held = 0
    driver.log.extend([wrong(PROMPT[-1])])
    driver.draft(1)
    assert (len(held.tree), list(held.log.tokens)) == (0, [*PROMPT[:-1], wrong(PROMPT[-1])])
    driver.log.truncate(3)
    driver.held = 0
    assert cost(engine, lambda: driver.draft(1))[:2] == (1, 1), "its last token, for what follows it"
    assert list(held.log.tokens) == PROMPT[:3]
    assert len(block) == 4


def test_other_sampling_parameters_make_other_guesses(engine, driver):
    """The same tokens under a new seed: what was said under the old one must not be taken for it."""
    before = driver.draft(3)
    driver.spec = Driver(engine, PROMPT, Sampling(temperature=0.9, seed=4)).spec
    driver.held = 0
    after = driver.draft(3)
    assert after == Driver(engine, PROMPT, driver.spec.sampling, session="of its own").draft(3)
    assert after != before


@pytest.mark.parametrize(
    "verification",
    [each if each in EACH_WAY else pytest.param(each, marks=pytest.mark.thorough) for each in Verification],
)
def test_a_tree_in_the_making_begins_again_when_it_loses_its_room(verification):
    """Three need more KV than there is: the oldest is done first, all are right, and nobody waits for ever."""
    small = load("llama", kv_cache_tokens=40, share_prefixes=False)
    spec = Sampling(temperature=0.9, seed=3), verification
    growth = wide() if verification is Verification.COUPLED else TreeSpec.chain(20)
    for name in "abc":
        small.add(Driver(small, PROMPT, *spec, session=name).draft_request(growth))
    replies = {}
    for _ in range(200):
        replies.update(step(small))
        small.check_integrity()
    assert set(replies) == {*"abc"}
    want = Driver(reference(), PROMPT, *spec, session=f"room {verification}").ask(growth)
    for reply in replies.values():
        assert (reply.new_nodes.first, reply.new_nodes.root) == (0, ROOT)
        assert reply.new_nodes == want.new_nodes
    assert small.stats().num_preemptions > 0


def test_guesses_are_given_up_before_a_session_is():
    """The neighbour's room is found in the idle session's tree; so its next message needs no more than its suffix."""
    small = load("llama", kv_cache_tokens=40)
    first = Driver(small, PROMPT, session="first")
    first.ask(wide())
    assert small.stats().num_free_blocks < 5
    assert has_grown(Driver(small, [7] * 20, session="second").ask(1))
    assert small.stats().num_preemptions == 0
    first.log.extend([9])
    assert has_grown(answer(small, first.draft_request(1))), "it is not Missing"
