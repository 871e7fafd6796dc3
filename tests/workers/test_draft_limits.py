"""Where a tree ends: passes, room, sureness, nonsense; who goes first; and what a reply says that it cost."""

from __future__ import annotations

from time import monotonic

import pytest
import torch
from driving import EPOCH, Driver, answer

from core.config import EngineConfig
from core.records import Drafted, DraftRequest, Refused, Sampling, Verification
from core.trees import EMPTY_BLOCK, NO_TOKEN, ROOT, Growth, TokenTree
from tests.checkpoints import VOCAB_SIZE, write
from workers.draft import DraftEngine

PROMPT = [5, 17, 99, 4, 200, 31]
WIDE = Growth((*[ROOT] * 8, *range(8), *range(8, 16)), (*range(8), *[0] * 16))
"""Eight guesses, one below each, and one below each of those."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def load(checkpoint):
    def load(**settings):
        config = EngineConfig(checkpoint, **{"block_tokens": 4, "kv_cache_tokens": 512} | settings)
        return DraftEngine.load(config, EPOCH, 16, lambda _: None)

    return load


@pytest.fixture
def engine(load):
    return load()


def run(engine):
    """Replies in the order in which they come."""
    replies = {}
    while engine.has_work:
        replies.update(engine.step())
        engine.check_integrity()
    return replies


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)])
def test_where_the_context_ends_the_tree_ends_and_the_request_is_served(load, sampling):
    """A guess may stand on the position after the last: it is drawn there, but cannot be fed."""
    small = load(max_context_tokens=len(PROMPT) + 2)
    want = Driver(load(), PROMPT, sampling).draft(5).tokens
    assert Driver(small, PROMPT, sampling).draft(5).tokens == (*want[:3], NO_TOKEN, NO_TOKEN)
    full = Driver(small, [*PROMPT, 1, 2], sampling, session="full")
    assert full.ask(2).tokens[1] == NO_TOKEN
    assert isinstance(Driver(small, [*PROMPT, 1, 2, 3], session="beyond").ask(1), Refused)


def test_where_the_kv_cache_ends_the_tree_ends_and_the_request_is_served(load):
    small = load(kv_cache_tokens=16)
    want = Driver(load(), PROMPT).ask(WIDE)
    got = Driver(small, PROMPT).ask(WIDE)
    assert got.tokens[:16] == want.tokens[:16], "ten rows are free: the eight guesses, and two of the second row"
    assert got.tokens[16:18] == want.tokens[16:18]
    assert set(got.tokens[18:]) == {NO_TOKEN}
    assert isinstance(Driver(small, [7] * 17, session="beyond").ask(1), Refused)
    assert isinstance(Driver(small, [7] * 16, session="all of it").ask(1), Drafted)


@pytest.mark.parametrize("max_step_tokens", [1, 3, 7])
def test_a_frontier_larger_than_a_step_is_fed_in_parts(load, max_step_tokens):
    want = Driver(load(), PROMPT).ask(WIDE)
    narrow = load(max_step_tokens=max_step_tokens)
    forward = narrow._runtime.forward
    sizes = []

    def noting(batch):
        sizes.append(sum(rows.num_rows for rows in batch))
        return forward(batch)

    narrow._runtime.forward = noting
    driver = Driver(narrow, [*PROMPT, 1])
    driver.log.truncate(len(PROMPT))
    driver.ask()
    sizes.clear()
    assert driver.ask(WIDE).tokens == want.tokens
    assert max(sizes) <= max_step_tokens
    assert sum(sizes) == 1 + 16


def test_a_long_prompt_and_its_tree_share_the_last_step(load):
    engine = load(max_step_tokens=16)
    prompt = PROMPT * 8
    want = Driver(load(), prompt).ask(WIDE, TokenTree.chain([4, 5]), is_table=True)
    got = Driver(engine, prompt).ask(WIDE, TokenTree.chain([4, 5]), is_table=True)
    assert got.tokens == want.tokens


@pytest.mark.parametrize(
    ("growth", "block", "is_table", "problem"),
    [
        (Growth((0,), (0,)), EMPTY_BLOCK, False, "come before it"),
        (Growth((ROOT, 2), (0, 0)), EMPTY_BLOCK, False, "come before it"),
        (Growth((-2,), (0,)), EMPTY_BLOCK, False, "come before it"),
        (Growth((1,), (0,)), TokenTree.chain([3]), True, "come before it"),
        (Growth((ROOT,), (0,)), TokenTree.chain([3]), False, "only a table"),
        (Growth((ROOT,), (0,)), TokenTree.chain([VOCAB_SIZE]), True, "vocabulary"),
        (Growth((ROOT,), (0,)), TokenTree.chain([-1]), True, "vocabulary"),
        (Growth((ROOT,), (0,)), TokenTree((3, 3), (ROOT, ROOT)), True, "twice"),
    ],
)
def test_a_malformed_growth_is_refused_and_harms_nobody(engine, growth, block, is_table, problem):
    expected = Driver(engine, PROMPT, session="before").draft(3)
    driver = Driver(engine, PROMPT)
    driver.draft(3)
    reply = driver.ask(growth, block, is_table=is_table)
    assert isinstance(reply, Refused)
    assert problem in reply.reason
    assert driver.draft(3) == expected


@pytest.mark.parametrize("bad_row", [0, 3])
def test_a_tree_that_leads_to_nan_is_refused_alone_and_leaves_nothing_behind(engine, bad_row):
    expected = Driver(engine, PROMPT, session="before").ask(WIDE).tokens
    forward = engine._runtime.forward
    drivers = [Driver(engine, PROMPT, session=f"{n}") for n in range(2)]
    for ticket, driver in enumerate(drivers):
        engine.add(ticket, driver.draft_request(WIDE))
    engine.step()

    def poisoned(batch):
        logits = forward(batch).clone()
        logits[bad_row] = torch.nan
        return logits

    engine._runtime.forward = poisoned
    engine.step()
    engine.check_integrity()
    engine._runtime.forward = forward
    replies = run(engine)
    assert replies[1].tokens == expected
    drivers[0].held = len(PROMPT)
    assert drivers[0].ask(WIDE).tokens == expected


def test_nan_is_reported_to_the_one_that_it_concerns(engine):
    forward = engine._runtime.forward

    def poisoned(batch):
        logits = forward(batch).clone()
        logits[0] = torch.nan
        return logits

    engine._runtime.forward = poisoned
    assert "NaN" in Driver(engine, PROMPT).ask(WIDE).reason


def test_what_a_round_waits_for_goes_before_tables(load):
    """A step has room for one of them: the block, though it came last."""
    engine = load(max_step_tokens=12)
    drivers = [Driver(engine, PROMPT, session=f"{n}") for n in range(3)]
    for driver in drivers:
        driver.ask()
        driver.log.extend([1])
    for ticket, is_table in enumerate((True, True, False)):
        engine.add(ticket, drivers[ticket].draft_request(WIDE, is_table=is_table))
    assert list(run(engine)) == [2, 0, 1]


def test_a_reply_says_what_it_cost(engine):
    driver = Driver(engine, PROMPT)
    request = driver.draft_request(WIDE)
    began_s = monotonic()
    engine.add(1, request)
    engine.add(2, Driver(engine, PROMPT * 2, session="company").draft_request(3))
    between_s = monotonic()
    replies = run(engine)
    ended_s = monotonic()
    timing = replies[1].timing
    assert (timing.num_passes, timing.num_rows) == (3, 6 + 12 + 8 + 1 + 8 + 1)
    assert 0 <= timing.waited_s <= ended_s - began_s - timing.computed_s
    assert 0 < timing.computed_s <= ended_s - between_s
    assert replies[2].timing.num_rows == timing.num_rows


def test_what_is_answered_without_a_pass_cost_none(engine):
    driver = Driver(engine, PROMPT)
    block = driver.draft(2)
    timing = driver.table(Growth((ROOT, 0), (0, 0)), block)[0].timing
    assert (timing.num_passes, timing.num_rows) == (0, 0)
    assert timing.computed_s == pytest.approx(0, abs=0.05)


def test_a_block_is_drafted_alike_alone_and_in_company(engine):
    """Blocks, tables and a prefill of many lengths in the same steps."""
    requests, alone = [], []
    for n, (growth, block, is_table) in enumerate(
        [
            (4, EMPTY_BLOCK, False),
            (WIDE, TokenTree.chain([4, 5]), True),
            (0, EMPTY_BLOCK, False),
            (WIDE, EMPTY_BLOCK, False),
        ]
    ):
        for verification in (Verification.COUPLED, Verification.BLOCK):
            for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.8, seed=n)):
                prompt = (PROMPT * 20)[: 3 + 17 * n + len(alone)]
                names = [f"{place} {n} {verification} {sampling.temperature}" for place in ("alone", "together")]
                for name in names:
                    driver = Driver(engine, prompt, sampling, verification, session=name)
                    request = driver.draft_request(growth, block, is_table=is_table)
                    if name == names[0]:
                        alone.append(answer(engine, request))
                        engine.release([name])
                    else:
                        requests.append(request)
    for ticket, request in enumerate(requests):
        assert isinstance(request, DraftRequest)
        engine.add(ticket, request)
    replies = run(engine)
    assert [replies[ticket].tokens for ticket in range(len(alone))] == [reply.tokens for reply in alone]
