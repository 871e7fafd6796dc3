"""A cascade changes how many passes a tree takes, and nothing of the tree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice

import pytest

from core.config import EngineConfig
from core.records import DraftUpdate, Sampling, Verification
from core.speculation.growth import TreeSpec
from tests.workers.engine.driving import EPOCH, Driver, has_grown, wrong
from tests.workers.engine.growths import places_of
from workers.engine.draft import DraftEngine
from workers.text_index import TextIndex

PROMPT = [5, 17, 99, 4, 200, 31]
NUM_AHEAD = 4
GREEDY = Sampling(temperature=0.0)
COUPLED = Sampling(temperature=0.9, seed=3)
PENALISED = Sampling(temperature=1.1, seed=4, top_k=40, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
SAMPLINGS = pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, marks=pytest.mark.thorough),
        pytest.param(COUPLED, marks=pytest.mark.ci),
        PENALISED,
    ],
)
CERTAIN = Sampling(temperature=0.0, logit_bias=((7, 60.0),))
"""Says one token for ever: a text that repeats itself."""
GROWING = TreeSpec(2, 5, 0.0, (1.0, 1.0), (0.3, 0.1))
"""Continuous, and so small that all of it is fed."""


@pytest.fixture(scope="module")
def load(checkpoint):
    """Rows whose bits do not depend on their company: so equal means equal."""

    def load(cascade_tokens=NUM_AHEAD, **settings):
        config = EngineConfig(checkpoint, block_tokens=4, deterministic=True, cascade_tokens=cascade_tokens, **settings)
        return DraftEngine.load(config, EPOCH, 16, lambda _: None)

    return load


@pytest.fixture
def foresee(monkeypatch):
    """Has the lookup guess ahead what it is told: here, as a rule, what the draft really says. Notes each question."""

    def foresee(continuation):
        asked = []

        def lookup(self, text, path, most):
            asked.append(path)
            return list(islice(continuation([*text, *path]), most))

        monkeypatch.setattr(TextIndex, "lookup", lookup)
        return asked

    return foresee


def grown(engine, driver, growth):
    """All nodes of growth that continues until nothing is left to feed, and the number of passes."""
    before = engine.stats().num_steps
    updates = []
    engine.add(driver.draft_request(growth))
    while engine.has_work:
        updates += [reply for reply in engine.step() if isinstance(reply, DraftUpdate)]
        engine.check_integrity()
    driver.held = updates[-1].held
    assert updates[-1].is_over
    return updates, engine.stats().num_steps - before


def nodes_of(updates):
    """Rank, chance and confidence of each node by its text, whatever the order in which they were told."""
    texts, found = [], {}
    for update in updates:
        new = update.new_nodes
        columns = (new.parents, new.tokens, new.ranks, new.chances, new.confidences)
        for parent, token, *rest in zip(*(column.tolist() for column in columns), strict=True):
            texts.append((*(texts[parent] if parent >= 0 else ()), token))
            found[texts[-1]] = tuple(rest)
    return found


@pytest.fixture(scope="module")
def said_after(load):
    """The tokens that the draft says one after the other after a text. Each is asked for once: many chains share it."""
    engine = load(0)

    @cache
    def next_token(text, sampling):
        driver = Driver(engine, text, sampling, session="first")
        driver.spec = replace(driver.spec, prompt_len=len(PROMPT))
        token = driver.draft(1).tokens[0]
        engine._store.drop("first")
        return token

    def said_after(text, sampling):
        while True:
            token = next_token(tuple(text), sampling)
            yield token
            text = [*text, token]

    return said_after


@SAMPLINGS
@pytest.mark.parametrize("num_wrong", [0, 2, *(pytest.param(each, marks=pytest.mark.ci) for each in (1, 9))])
def test_the_same_nodes_grow_with_the_same_chances(load, said_after, foresee, sampling, num_wrong):
    """Whether the guesses are what the draft says, partly or not at all; after a verdict, too."""
    plain, cascade = load(0), load()

    def continuation(text):
        chain = enumerate(said_after(text, sampling))
        return (token if place < NUM_AHEAD - num_wrong else wrong(token) for place, token in chain)

    asked = foresee(continuation)
    drivers = Driver(plain, PROMPT, sampling), Driver(cascade, PROMPT, sampling)
    chain = list(islice(said_after(PROMPT, sampling), 3))
    for committed in ((), chain[:2], [wrong(chain[2])]):
        for driver in drivers:
            driver.log.extend(committed)
        anew = replace(GROWING, reports_all=True)
        expected, num_plain = grown(plain, drivers[0], anew)
        found, num_cascade = grown(cascade, drivers[1], anew)
        assert nodes_of(found) == nodes_of(expected)
        assert num_cascade <= num_plain
    assert asked
    if num_wrong == 0:
        assert cascade.stats().num_steps < plain.stats().num_steps, "several nodes in a row came of one pass"


@pytest.mark.parametrize("growth", [8, TreeSpec(1, 6, 0.0, (1.0, 1.0), (0.3, 0.1), num_passes=5, reports_all=True)])
@SAMPLINGS
def test_growth_that_ends_by_itself_ends_with_the_same_reply(load, said_after, foresee, sampling, growth):
    plain, cascade = load(0), load()
    foresee(lambda text: said_after(text, sampling))
    expected, found = (Driver(engine, PROMPT, sampling).ask(growth) for engine in (plain, cascade))
    assert has_grown(found)
    assert (found.new_nodes, found.held) == (expected.new_nodes, expected.held)
    assert cascade.stats().num_steps < plain.stats().num_steps


def test_a_text_that_repeats_itself_takes_a_pass_for_many_nodes(load):
    plain, cascade = load(0), load()
    drivers = [Driver(engine, [*PROMPT, 7, 7, 7, 7], CERTAIN) for engine in (plain, cascade)]
    chains = [driver.draft(15).tokens for driver in drivers]
    assert chains[0] == chains[1] == (7,) * 15
    assert (plain.stats().num_steps, cascade.stats().num_steps) == (15, 3), "each pass says one node and four ahead"


@pytest.mark.parametrize("rule", [Verification.REJECTION, Verification.BLOCK])
def test_a_draft_that_samples_is_not_hurried(load, rule):
    """Or blocks whose draws repeat the text would be late less often, which selects draws by their values."""
    sampling = replace(CERTAIN, temperature=0.5, seed=3)
    plain, cascade = load(0), load()
    replies = [Driver(engine, [*PROMPT, 7, 7, 7, 7], sampling, rule).ask(8) for engine in (plain, cascade)]
    assert replies[0].new_nodes == replies[1].new_nodes
    assert plain.stats().num_steps == cascade.stats().num_steps
    assert plain.stats().num_rows == cascade.stats().num_rows


def test_wide_growth_that_ends_by_itself_is_fed_pass_by_pass(load):
    growth = TreeSpec(3, 5, 0.0, (1.0, 1.0), (0.3, 0.1), num_passes=4, reports_all=True)
    plain, cascade = load(0), load()
    replies = [Driver(engine, [*PROMPT, 7, 7, 7, 7], CERTAIN).ask(growth) for engine in (plain, cascade)]
    assert places_of(replies[0].new_nodes) == places_of(replies[1].new_nodes)
    assert plain.stats().num_rows == cascade.stats().num_rows


def test_rows_ahead_take_no_room_that_others_need(load, foresee):
    """KV that is nearly full: nobody is preempted for a guess."""
    engine = load(kv_cache_tokens=32)
    foresee(lambda _: [7] * NUM_AHEAD)
    drivers = [Driver(engine, [number, *PROMPT, 7, 7], CERTAIN, session=f"s{number}") for number in range(2)]
    for _ in range(3):
        for driver in drivers:
            driver.log.extend(driver.ask(1).new_nodes.tokens.tolist())
            engine.check_integrity()
    assert engine.stats().num_preemptions == 0


def test_an_unsound_row_ahead_harms_nobody(load, monkeypatch):
    engine = load()
    says = engine._propose
    monkeypatch.setattr(
        engine,
        "_propose",
        lambda logits, places: [[each[0], *[None] * len(each[1:])] for each in says(logits, places)],
    )
    assert Driver(engine, [*PROMPT, 7, 7, 7, 7], CERTAIN).draft(6).tokens == (7,) * 6
    assert engine.stats().num_steps == 6


def test_rows_before_an_unsound_one_ahead_are_those_of_their_tokens(load, said_after, foresee, monkeypatch):
    """The first row ahead is sound and wrong; the last is not, and of what the draft says."""
    plain, engine = load(0), load()

    def continuation(text):
        first = next(said_after(text, GREEDY))
        return [wrong(first), first, first]

    foresee(continuation)
    says = engine._propose
    monkeypatch.setattr(
        engine,
        "_propose",
        lambda logits, places: [[*each[:2], *[None] * len(each[2:])] for each in says(logits, places)],
    )
    expected, found = (Driver(each, PROMPT, GREEDY).ask(8) for each in (plain, engine))
    assert found.new_nodes == expected.new_nodes
