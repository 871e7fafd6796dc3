"""An outcome table is right: below each outcome stands what would be drafted if it had been committed.

Asked of a session that holds nothing else, in deterministic steps, where a row's bits are its own: equal means equal.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from driving import EPOCH, Driver, answer
from growths import below, fresh_reply, growths, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import EngineConfig
from core.records import Sampling, Verification
from core.trees import EMPTY_BLOCK, NO_Q, NO_TOKEN, ROOT, Growth, TokenTree, subtree
from tests.checkpoints import write
from workers.draft import DraftEngine
from workers.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.0, seed=3)
PENALISED = Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
WAYS = [
    (GREEDY, Verification.COUPLED),
    (GREEDY, Verification.BLOCK),
    (SAMPLED, Verification.COUPLED),
    (PENALISED, Verification.COUPLED),
    (SAMPLED, Verification.REJECTION),
    (PENALISED, Verification.BLOCK),
]


@pytest.fixture(scope="module")
def checkpoints_of(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = str(write(family, tmp_path_factory.mktemp(family)))
        return made[family]

    return of


@pytest.fixture(scope="module")
def load(checkpoints_of):
    def load(family="llama", **settings):
        config = EngineConfig(checkpoints_of(family), **{"block_tokens": 4, "deterministic": True} | settings)
        return DraftEngine.load(config, EPOCH, 8, lambda _: None)

    return load


@pytest.fixture(scope="module")
def engine(load):
    return load()


each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"T={way[0].temperature} {way[1]}")


def path_to(tree, node):
    return [] if node == ROOT else [*path_to(tree, tree.parents[node]), tree.tokens[node]]


def assert_blocks_below_outcomes_are_exact(engine, driver, block, growth):
    request = driver.draft_request(growth, block, is_table=True)
    reply = answer(engine, request)
    whole = TokenTree((*block.tokens, *reply.tokens), (*block.parents, *growth.parents))  # with NO_TOKEN in it
    num_outcomes = 0
    for index, parent in enumerate(growth.parents):
        outcome = len(block) + index
        if parent >= len(block) or reply.tokens[index] == NO_TOKEN:
            continue
        num_outcomes += 1
        part, nodes = below(growth, len(block), outcome)
        committed = [*driver.log.tokens, *path_to(whole, outcome)]
        asked = replace(request, growth=part, block=EMPTY_BLOCK, is_table=False)
        want = fresh_reply(engine, driver.spec, committed, asked)
        for name in ("tokens", "q", "confidence", "entropy"):
            got = getattr(reply, name)
            assert (tuple(got[n] for n in nodes) if got else ()) == getattr(want, name)
    return num_outcomes


FULL = Growth((ROOT, 0, 1, ROOT, 0, 1, 2, 3, 4, 5, 6, 7, 9, 4), (0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1))
"""Below the chain of two guesses: two outcomes at each place, and up to three guesses below them."""


@each_way
def test_below_each_outcome_stands_what_its_own_request_would_draft(engine, way):
    driver = Driver(engine, PROMPT, *way, session=f"{way}")
    block = driver.draft(2)
    assert assert_blocks_below_outcomes_are_exact(engine, driver, block, FULL) == 6


@each_way
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_below_any_outcome_of_any_table(engine, way, data):
    engine._store.drop("any")
    driver = Driver(engine, PROMPT, *way, session="any")
    block = data.draw(trees())
    growth = data.draw(growths(len(block), max_size=14))
    assert_blocks_below_outcomes_are_exact(engine, driver, block, growth)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_below_each_outcome_where_windows_slide(load, family):
    engine = load(family)
    driver = Driver(engine, [*range(40, 80)], SAMPLED)
    block = TokenTree((7, 8, 9, 10), (ROOT, ROOT, 1, 2))
    growth = Growth((0, 3, 2, 4, 5, 7, 8), (0, 0, 0, 0, 0, 0, 0))
    assert assert_blocks_below_outcomes_are_exact(engine, driver, block, growth) == 3


def test_only_what_is_drawn_below_an_outcome_carries_q(engine):
    driver = Driver(engine, PROMPT, SAMPLED, Verification.REJECTION, session="q")
    drafted, _ = driver.table(FULL, driver.draft(2))
    outcomes = [parent < 2 for parent in FULL.parents]
    assert [q == NO_Q for q in drafted.q] == [*outcomes[:-1], True], "the last asks for a second sample, which is none"
    assert [token == NO_TOKEN for token in drafted.tokens] == [False] * 13 + [True]
    assert all(sum(q.probs) == pytest.approx(1, abs=1e-5) for q in drafted.q if q != NO_Q)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED])
def test_with_the_targets_weights_every_verdict_is_a_walk_to_a_block_that_is_right(checkpoints_of, engine, sampling):
    """The first outcome below an accepted guess is the correction, at a temperature too, and what follows is right."""
    target = TargetEngine.load(EngineConfig(checkpoints_of("llama"), deterministic=True), EPOCH, lambda _: None)
    verifying = Driver(target, PROMPT, sampling)
    drafting = Driver(engine, PROMPT, sampling, session=f"pair {sampling}")
    verdict = verifying.verify()
    drafting.log.extend([verdict.next_token])
    right = drafting.draft(3)
    for wrong_from in (3, 1, 0, 2):
        tokens = [*right.tokens[:wrong_from], *(token ^ 1 for token in right.tokens[wrong_from:])]
        block = TokenTree.chain(tokens)
        growth = Growth((ROOT, 0, 1, 2, *(3, 4, 5, 6), *(7, 8, 9, 10)), (0,) * 12)
        _, table = drafting.table(growth, block)
        verdict = verifying.verify(block)
        assert verdict.path == tuple(range(wrong_from)), "the target accepts what is right and no more"
        outcome = table.child(verdict.path[-1] if verdict.path else ROOT, verdict.next_token)
        assert outcome is not None, "a hit"
        drafting.log.extend(verifying.log.since(len(drafting.log)))
        right = subtree(table, outcome)[0]
        assert len(right) == 2
        right = TokenTree.chain([*right.tokens, drafting.draft(3).tokens[2]])
        assert right == drafting.draft(3)
