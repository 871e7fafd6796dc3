"""Where a tree ends: passes, room, confidence, nonsense; who goes first; and what a reply says that it cost."""

from __future__ import annotations

from time import monotonic

import pytest

from core.config import EngineConfig
from core.records import Refused, Sampling, Verification
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, has_grown, poisoned, run, step, tree_of
from tests.workers.engine.growths import places_of, wide
from workers.engine.draft import DraftEngine

PROMPT = [5, 17, 99, 4, 200, 31]
WIDE = wide()


@pytest.fixture
def load(checkpoint):
    def load(**settings):
        config = EngineConfig(
            checkpoint, **{"block_tokens": 4, "kv_cache_tokens": 512, "deterministic": True} | settings
        )
        return DraftEngine.load(config, EPOCH, 16, lambda _: None)

    return load


@pytest.fixture
def engine(load):
    return load()


WAYS = pytest.mark.parametrize(
    "way",
    [
        (Sampling(temperature=0.0),),
        (Sampling(temperature=0.9, seed=3),),
        (Sampling(temperature=0.9, seed=3), Verification.REJECTION),
        (Sampling(temperature=0.9, seed=3), Verification.BLOCK),
    ],
)


@WAYS
def test_where_the_context_ends_growth_ends_and_the_request_is_served(load, way):
    """A guess may stand on the position after the last: it is said there, but cannot be fed."""
    small = load(max_context_tokens=len(PROMPT) + 2)
    want = Driver(load(), PROMPT, *way).draft(5)
    assert tree_of(Driver(small, PROMPT, *way).ask(5)) == want.prefix(3)
    full = Driver(small, [*PROMPT, 1, 2], *way, session="full")
    assert len(full.ask(2).new_nodes) == 1
    assert isinstance(Driver(small, [*PROMPT, 1, 2, 3], *way, session="beyond").ask(1), Refused)


@WAYS
def test_where_the_kv_cache_ends_a_chain_ends_and_the_request_is_served(load, way):
    small = load(kv_cache_tokens=8)
    want = Driver(load(), PROMPT, *way).draft(5)
    assert tree_of(Driver(small, PROMPT, *way).ask(5)) == want.prefix(3), "two are fed, and the last one needs no row"
    assert isinstance(Driver(small, [7] * 9, *way, session="beyond").ask(1), Refused)
    assert has_grown(Driver(small, [7] * 8, *way, session="all of it").ask(1))


def test_where_the_kv_cache_ends_a_tree_ends(load):
    small, driver = load(kv_cache_tokens=16), Driver(load(), PROMPT)
    want, got = (places_of(each.ask(WIDE).new_nodes) for each in (driver, Driver(small, PROMPT)))
    assert len(small._store.find("s").tree) == len(got) - 1 == 10, "rows of ten guesses are free"
    assert got == {above: want[above] for above in got}, "those that come first"


@pytest.mark.parametrize("max_step_tokens", [1, 3, 7])
def test_a_pass_feeds_no_more_than_a_step_holds(load, max_step_tokens):
    narrow = load(max_step_tokens=max_step_tokens)
    forward = narrow._runtime.forward
    sizes = []

    def noting(batch):
        sizes.append(sum(rows.num_rows for rows in batch))
        return forward(batch)

    narrow._runtime.forward = noting
    driver = Driver(narrow, PROMPT)
    driver.draft(1)
    sizes.clear()
    places = places_of(driver.ask(WIDE).new_nodes)
    assert sizes == [max_step_tokens] * 3, "the root is known"
    assert len(places) == 1 + sum(sizes)
    assert Driver(narrow, PROMPT, session="chain").draft(5) == Driver(load(), PROMPT).draft(5)


def test_a_tree_below_a_long_prompt_is_what_it_is_where_the_prompt_is_one_step(load):
    prompt = PROMPT * 8
    assert Driver(load(max_step_tokens=16), prompt).draft(WIDE) == Driver(load(), prompt).draft(WIDE)


@pytest.mark.parametrize("bad_row", [0, 3])
def test_a_tree_that_leads_to_nan_is_refused_alone_and_leaves_nothing_behind(engine, bad_row):
    expected = Driver(engine, PROMPT, session="before").draft(WIDE)
    drivers = [Driver(engine, PROMPT, session=f"{n}") for n in range(2)]
    for driver in drivers:
        engine.add(driver.draft_request(WIDE))
    engine.step()
    with poisoned(engine, bad_row):
        replies = step(engine)
    engine.check_integrity()
    replies |= run(engine)
    assert isinstance(replies["0"], Refused)
    assert tree_of(replies["1"]) == expected
    drivers[0].held = len(PROMPT)
    assert drivers[0].draft(WIDE) == expected


def test_nan_is_reported_to_the_one_that_it_concerns(engine):
    with poisoned(engine, 0):
        assert "NaN" in Driver(engine, PROMPT).ask(WIDE).reason


def test_a_reply_says_what_it_cost(engine):
    driver = Driver(engine, PROMPT)
    request = driver.draft_request(WIDE)
    began_s = monotonic()
    engine.add(request)
    engine.add(Driver(engine, PROMPT * 2, session="company").draft_request(3))
    between_s = monotonic()
    replies = run(engine)
    ended_s = monotonic()
    timing = replies[driver.session].timing
    assert (timing.num_passes, timing.num_rows) == (3, (6 + 12) + (8 + 1) + (8 + 1))
    assert timing.num_sessions == 2
    assert 0 <= timing.waited_s <= ended_s - began_s - timing.computed_s
    assert 0 < timing.computed_s <= ended_s - between_s
    assert replies["company"].timing.num_rows == timing.num_rows


def test_growth_is_alike_alone_and_in_company(engine):
    """Chains, trees and draws below prompts of many lengths in the same steps."""
    requests, alone = [], []
    for n, growth in enumerate((4, WIDE, 1, wide(num_rows=3, num_passes=5))):
        for verification in (Verification.COUPLED, Verification.BLOCK):
            for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.8, seed=n)):
                prompt = (PROMPT * 20)[: 3 + 17 * n + len(alone)]
                names = [f"{place} {n} {verification} {sampling.temperature}" for place in ("alone", "together")]
                drivers = [Driver(engine, prompt, sampling, verification, session=name) for name in names]
                is_chosen = not (drivers[0].spec.needs_q and not isinstance(growth, int))
                first, second = (each.draft_request(growth if is_chosen else 5) for each in drivers)
                alone.append(answer(engine, first))
                engine.release(names[:1])
                requests.append(second)
    together = answer_all(engine, requests)
    assert [reply.new_nodes for reply in together] == [reply.new_nodes for reply in alone]
