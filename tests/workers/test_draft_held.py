"""What a draft keeps from one request to the next changes no reply: it only saves passes.

Every reply of a session with a past is compared with that of a session which begins with the same request. Both run in
deterministic steps, where a row's bits do not depend on its company: so equal means equal.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from driving import EPOCH, Driver, answer, wrong
from growths import TOKENS, assert_same_reply, fresh_reply, growths, trees
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.config import EngineConfig
from core.records import Drafted, Missing, Sampling, Verification
from core.trees import EMPTY_BLOCK, NO_TOKEN, ROOT, Growth, grown, subtree
from tests.checkpoints import write
from workers.draft import DraftEngine

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
]
NUM_KV_TOKENS = 160
PROMPT = [5, 17, 99, 4, 200, 31]
TABLE = Growth((ROOT, 0, 1, 2, *(3, 4, 5, 6), *(7, 8, 9, 10)), (0,) * 12)
"""Below a chain of three: one outcome wherever it may end, and two guesses below each."""


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

    def check(self, request, reply):
        assert isinstance(reply, Drafted)
        self.driver.held = reply.held
        committed = list(self.driver.log.tokens)
        assert_same_reply(reply, fresh_reply(reference(), self.driver.spec, committed, request))
        self.seen = grown(request.block, request.growth, reply.tokens)[0]

    def ask(self, *args, **kwargs):
        request = self.driver.draft_request(*args, **kwargs)
        reply = answer(self.engine, request)
        if isinstance(reply, Missing):
            self.driver.held = reply.held
            request = self.driver.draft_request(*args, **kwargs)
            reply = answer(self.engine, request)
        self.check(request, reply)

    @rule(growth=growths())
    def block(self, growth):
        self.ask(growth)

    @rule(data=st.data())
    def table(self, data):
        """Over what was seen last, or over a block of somebody else's."""
        block = data.draw(st.sampled_from([self.seen.prefix(8), data.draw(trees())]))
        self.ask(data.draw(growths(len(block))), block, is_table=True)

    @rule()
    def prefill(self):
        self.ask()

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

    @rule(data=st.data())
    def overtake(self, data):
        """A table in the making gives way to something else after a few steps."""
        growth = data.draw(growths(len(self.seen), max_size=20))
        first = self.driver.draft_request(growth, self.seen, is_table=True)
        self.engine.add(99, first)
        replies = {}
        for _ in range(data.draw(st.integers(0, 3))):
            replies.update(self.engine.step())
        self.engine.check_integrity()
        if 99 in replies:
            self.check(first, replies[99])
        self.ask(data.draw(growths()))

    @rule(num_tokens=st.integers(40, 150))
    def preempt(self, num_tokens):
        """A neighbour needs room, which may cost guesses, the session, or nothing."""
        self.num_others += 1
        session = f"other {self.num_others}"
        other = Driver(self.engine, [7] * num_tokens, session=session)
        assert isinstance(other.ask(Growth.chain(1)), Drafted)
        self.engine.release([session])

    @invariant()
    def agrees(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()


Past.TestCase.settings = settings(max_examples=15, stateful_step_count=10, deadline=None)
test_replies_do_not_depend_on_the_past = Past.TestCase


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


def test_a_table_feeds_of_its_block_only_what_was_not_fed_before(engine, driver):
    block = driver.draft(3)
    passes, rows, (drafted, _) = cost(engine, lambda: driver.table(TABLE, block))
    assert NO_TOKEN not in drafted.tokens
    assert (passes, rows) == (3, (1 + 3) + (3 + 1) + 1), (
        "the last guess goes along with three outcomes; its own comes after"
    )


def test_after_a_hit_neither_committed_tokens_nor_the_block_are_fed_again(engine, driver):
    """All were fed as nodes of the table, but for the last guesses of it, which wait for nothing and are fed now."""
    block = driver.draft(3)
    _, table = driver.table(TABLE, block)
    outcome = table.child(1, table.tokens[5])
    driver.log.extend([*block.tokens[:2], table.tokens[outcome]])
    after, _ = subtree(table, outcome)
    passes, rows, (drafted, _) = cost(engine, lambda: driver.table(Growth((ROOT, 0, 2, 3), (0, 0, 0, 0)), after))
    assert NO_TOKEN not in drafted.tokens
    assert (passes, rows) == (1, 2), "two outcomes; root and first guess are held, the second has nothing below it"
    passes, rows, _ = cost(engine, lambda: driver.table(Growth((ROOT, 0, 1), (0, 0, 0)), after))
    assert (passes, rows) == (1, 1), "the second guess"
    passes, rows, _ = cost(engine, lambda: driver.table(Growth((ROOT, 0, 1), (1, 1, 1)), after))
    assert (passes, rows) == (0, 0), "all that this asks is known"


def test_after_a_miss_only_the_correction_is_fed(engine, driver):
    block = driver.draft(3)
    driver.table(TABLE, block)
    driver.log.extend([*block.tokens[:2], wrong(block.tokens[2])])
    assert cost(engine, lambda: driver.draft(1))[:2] == (1, 1)


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
def test_a_sample_of_the_root_is_drawn_anew_and_a_table_needs_none(engine, verification):
    driver = Driver(engine, PROMPT, Sampling(temperature=0.9, seed=3), verification, session=verification)
    block = driver.draft(2)
    assert cost(engine, lambda: driver.draft(2))[:2] == (2, 2), "the last token again, and the first guess"
    assert cost(engine, lambda: driver.table(Growth((ROOT, 0), (0, 0)), block))[:2] == (0, 0)


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


def test_a_tree_in_the_making_begins_again_when_it_loses_its_room():
    """Two tables need more KV than there is: the older is done first, both are right, and nobody waits for ever."""
    small = load("llama", kv_cache_tokens=40, share_prefixes=False)
    drivers = [Driver(small, PROMPT, session=f"{n}") for n in range(3)]
    growth = Growth((*[ROOT] * 8, *range(8), *range(8, 16)), (*range(8), *[0] * 16))
    for ticket, driver in enumerate(drivers):
        small.add(ticket, driver.draft_request(growth, is_table=True))
    replies = {}
    for _ in range(200):
        replies.update(small.step())
        small.check_integrity()
    assert set(replies) == {0, 1, 2}
    want = Driver(reference(), PROMPT, session="room").ask(growth, is_table=True)
    assert {reply.tokens for reply in replies.values()} == {want.tokens}
    assert small.stats().num_preemptions > 0


def test_guesses_are_given_up_before_a_session_is():
    """The neighbour's room is found in the idle session's tree; so its next message needs no more than its suffix."""
    small = load("llama", kv_cache_tokens=40)
    first = Driver(small, PROMPT, session="first")
    first.ask(Growth((*[ROOT] * 8, *range(8), *range(8, 16)), (*range(8), *[0] * 16)), is_table=True)
    assert small.stats().num_free_blocks < 5
    assert isinstance(Driver(small, [7] * 20, session="second").ask(Growth.chain(1)), Drafted)
    assert small.stats().num_preemptions == 0
    first.log.extend([9])
    assert isinstance(answer(small, first.draft_request(1)), Drafted), "it is not Missing"
