"""A step for which there is no memory: nothing of it counts, smaller ones follow, and outputs are what they were."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from unittest.mock import patch

import pytest
import torch

from core.config import EngineConfig
from core.records import Refused, Verdict
from core.speculation.growth import TreeSpec
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, chain, has_grown, run, step
from tests.workers.engine.growths import wide
from workers.engine.draft import DraftEngine
from workers.engine.scheduler import RECOVERY_S, RowLimit
from workers.engine.target import TargetEngine

PROMPTS = [[5, 17, 99, 4, 200, 31], [7, 7, 8], [(7 * index) % 250 for index in range(90)]]
NAMES = count()
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def config(checkpoint):
    settings = {"block_tokens": 4, "max_step_tokens": 64, "deterministic": True, "share_prefixes": False}
    return EngineConfig(checkpoint, kv_cache_tokens=2000, **settings)


@pytest.fixture
def target(config):
    return TargetEngine.load(config, EPOCH, lambda _: None)


@pytest.fixture
def draft(config):
    return DraftEngine.load(config, EPOCH, 16, lambda _: None)


@contextmanager
def failing(engine, place, fails):
    """Meanwhile a step raises at this place where `fails` says so of its number of rows; yields their numbers.

    While room is made the numbers are those of blocks.
    """
    forward, erase, seen = engine._runtime.forward, engine._runtime.cache.erase, []
    methods = {
        name: getattr(engine, name) for name in ("_finish", "_store_scores", "_roll_back") if hasattr(engine, name)
    }
    num_rolled_back = 0

    def fail_at(here):
        if place == here and fails(seen[-1]):
            raise NO_MEMORY

    def failing_forward(batch):
        nonlocal num_rolled_back
        if place != "while room is made":
            seen.append(sum(rows.num_rows for rows in batch))
        num_rolled_back = 0
        fail_at("before the pass")
        return forward(batch)

    def failing_finish(jobs, logits):
        fail_at("in sampling")
        return methods["_finish"](jobs, logits)

    def failing_scores(*arguments):
        logits = methods["_store_scores"](*arguments)
        fail_at("after scores")
        return logits

    def failing_roll_back(*arguments):
        nonlocal num_rolled_back
        num_rolled_back += 1
        if num_rolled_back == 2:
            fail_at("after one was rolled back")
        methods["_roll_back"](*arguments)

    def failing_erase(blocks):
        if place == "while room is made":
            seen.append(len(blocks))
        fail_at("while room is made")
        erase(blocks)

    replaced = {"_finish": failing_finish, "_store_scores": failing_scores, "_roll_back": failing_roll_back}
    with (
        patch.object(engine._runtime, "forward", failing_forward),
        patch.object(engine._runtime.cache, "erase", failing_erase),
        patch.multiple(engine, **{name: replaced[name] for name in methods}),
    ):
        yield seen


def once_in(numbers):
    """Fails the steps with these numbers, whatever they have."""
    steps = count()
    return lambda _num_rows: next(steps) in numbers


def said(engine, with_blocks):
    """Replies to three sessions in three rounds: a prompt, and then a block that is right at first."""
    found = []
    drivers = [Driver(engine, prompt, session=f"{next(NAMES)}", num_logprobs=1) for prompt in PROMPTS]
    guesses = [[] for _ in drivers]
    for _ in range(3):
        requests = [driver.verify_request(chain(*each)) for driver, each in zip(drivers, guesses, strict=True)]
        for place, (driver, verdict) in enumerate(zip(drivers, answer_all(engine, requests), strict=True)):
            driver.log.extend([*(guesses[place][node] for node in verdict.path), verdict.next_token])
            driver.held = verdict.held
            found.append((verdict.path, verdict.next_token, verdict.held, verdict.logprobs))
            guesses[place] = [verdict.next_token, 3, 4] if with_blocks else []
    for driver in drivers:
        engine.release([driver.session])
    return found


@pytest.mark.parametrize("place", ["before the pass", "in sampling", "after scores", "after one was rolled back"])
@pytest.mark.parametrize("with_blocks", [True, False])
def test_a_step_without_memory_changes_no_output(target, place, with_blocks):
    expected = said(target, with_blocks)
    with failing(target, place, once_in({0, 2, 4, 7, 9})) as seen:
        assert said(target, with_blocks) == expected
    assert len(seen) > 5
    target.check_integrity()
    assert target.stats().num_free_blocks == target.stats().num_blocks


def test_the_blocks_of_a_step_that_was_undone_are_erased_before_they_are_used_again(target):
    """Nobody has looked at what was computed there, which may be NaN."""
    driver = Driver(target, PROMPTS[0], session=f"{next(NAMES)}")
    target.add(driver.verify_request(chain()))
    with failing(target, "in sampling", once_in({0})):
        target.step()
        assert target._store.find(driver.session).kv.may_hold_nan
    run(target)
    target.release([driver.session])


@pytest.mark.parametrize("with_blocks", [True, False])
def test_a_step_without_memory_for_its_room_changes_no_output(target, with_blocks):
    """Where a session begins, and where guesses take new blocks."""
    expected = said(target, with_blocks)
    with failing(target, "while room is made", once_in({0, 2, 4, 6})) as seen:
        assert said(target, with_blocks) == expected
    assert len(seen) > 4
    target.check_integrity()
    assert target.stats().num_free_blocks == target.stats().num_blocks


def test_a_session_without_memory_to_begin_gives_back_what_it_had_adopted_and_begins_later(config):
    """With blocks it would count as begun, and no room be kept for the rest of its text."""
    target = TargetEngine.load(replace(config, share_prefixes=True), EPOCH, lambda _: None)
    other, late = (Driver(target, PROMPTS[index], session=name) for index, name in ((0, "other"), (2, "late")))
    expected = Driver(target, PROMPTS[2], session="alone").verify().next_token
    other.log.extend([other.verify().next_token])
    target.add(other.verify_request())
    target.add(late.verify_request())
    with failing(target, "while room is made", once_in({0})):
        assert list(step(target)) == ["other"]
        assert target.stats().num_adopted_tokens > 0
        assert target._store.find("late").kv.blocks == []
    assert run(target)["late"].next_token == expected
    target.check_integrity()


def test_a_prefill_that_was_preempted_for_nothing_begins_with_its_first_token(config):
    """The room that its KV has left cannot be made: what was pending before the step is not all that is now."""
    target = TargetEngine.load(replace(config, kv_cache_tokens=60, max_step_tokens=24), EPOCH, lambda _: None)
    prompt = PROMPTS[2][:40]
    expected = Driver(target, prompt, session="alone").verify().next_token
    target.release(["alone"])
    older, newer = Driver(target, PROMPTS[0], session="older"), Driver(target, prompt, session="newer")
    older.log.extend([older.verify().next_token])
    target.add(newer.verify_request())
    assert target.step() == []
    target.add(older.verify_request(chain(*range(18))))
    with failing(target, "while room is made", lambda _num_blocks: target.stats().num_preemptions == 1) as seen:
        assert target.step() == []
    assert len(seen) == 1
    assert isinstance(run(target)["older"], Verdict)
    target.release(["older"])
    assert run(target)["newer"].next_token == expected


@pytest.mark.parametrize("place", ["before the pass", "while room is made"])
def test_an_engine_without_memory_for_anything_ends(target, place):
    for number, prompt in enumerate(PROMPTS):
        target.add(Driver(target, prompt, session=f"{number}").verify_request())
    with failing(target, place, lambda _number: True), pytest.raises(MemoryError, match="CUDA out of"):
        run(target)


def test_steps_become_as_small_as_there_is_memory_for(target):
    expected = said(target, with_blocks=True)
    target._limit = RowLimit(64)
    with failing(target, "before the pass", lambda num_rows: num_rows > 12) as seen:
        assert said(target, with_blocks=True) == expected
    failed = [num_rows for num_rows in seen if num_rows > 12]
    assert failed
    assert all(after <= before // 2 for before, after in pairwise(failed)), (
        "each has half of the rows of the one before"
    )


def test_scores_of_a_prompt_are_taken_once(target):
    def scored():
        driver = Driver(target, PROMPTS[2], session=f"{next(NAMES)}")
        driver.spec = replace(driver.spec, num_prompt_logprobs=2)
        verdict = answer(target, driver.verify_request())
        target.release([driver.session])
        return verdict.prompt_logprobs

    expected = scored()
    assert len(expected) == len(PROMPTS[2]) - 1
    with failing(target, "after scores", once_in({1, 2})):
        assert scored() == expected


def test_who_needs_more_than_there_is_is_refused_and_others_go_on(target):
    others = [Driver(target, prompt, session=f"{number}") for number, prompt in enumerate(PROMPTS)]
    wide_one = Driver(target, PROMPTS[0], session="wide")
    with failing(target, "before the pass", lambda num_rows: num_rows > 20):
        requests = [*(driver.verify_request() for driver in others), wide_one.verify_request(chain(*range(30)))]
        *verdicts, refused = answer_all(target, requests)
        assert isinstance(refused, Refused)
        assert "rows of this sequence in a step need more memory than this engine has" in refused.reason
        assert not refused.is_final
        assert all(isinstance(verdict, Verdict) for verdict in verdicts)
        assert isinstance(wide_one.verify(), Verdict), "it may go on with less"


def test_where_other_ranks_are_within_the_step_the_engine_ends(target):
    target._config = replace(target._config, tensor_parallel=2)
    target.add(Driver(target, PROMPTS[0]).verify_request())
    with failing(target, "before the pass", once_in({0})), pytest.raises(torch.OutOfMemoryError):
        run(target)


@pytest.mark.parametrize("place", ["before the pass", "in sampling"])
def test_a_draft_grows_the_same_tree(draft, place):
    def grown(session):
        driver = Driver(draft, PROMPTS[0], session=session)
        first = driver.draft(wide(num_rows=4, num_passes=5))
        driver.log.extend([first.tokens[0]])
        return first, driver.draft(3)

    expected = grown("a")
    with failing(draft, place, once_in({0, 2, 4, 6})) as seen:
        assert grown("b") == expected
    assert len(seen) > 6
    draft.check_integrity()


def test_growth_for_which_there_is_no_memory_ends(draft):
    growing = Driver(draft, PROMPTS[1])
    draft.add(growing.draft_request(TreeSpec(rows_per_pass=4, max_depth=4)))
    with failing(draft, "before the pass", lambda _num_rows: True):
        replies = run(draft)
    assert isinstance(replies[growing.session], Refused)
    assert draft.stats().num_jobs == 0
    assert has_grown(growing.ask(2)), "it may ask again"


def test_a_step_is_halved_until_it_is_one_job_that_cannot_be_split():
    limit = RowLimit(512)
    assert limit.shrink(num_jobs=3, num_rows=300, now_s=1000.0)
    assert limit.rows == 150
    assert limit.shrink(num_jobs=1, num_rows=150, now_s=1000.0), "a part of a prompt"
    assert limit.rows == 75
    assert not limit.shrink(num_jobs=1, num_rows=80, now_s=1000.0), "more than allowed: it has no parts"
    assert limit.rows == 512, "who is to blame is gone"


def test_more_is_tried_after_a_while():
    limit = RowLimit(512)
    limit.shrink(num_jobs=3, num_rows=300, now_s=1000.0)
    allowed = []
    for now_s in (1000.0 + RECOVERY_S - 1, 1000.0 + RECOVERY_S, 1000.0 + 2 * RECOVERY_S, 1000.0 + 3 * RECOVERY_S):
        limit.recover(now_s)
        allowed.append(limit.rows)
    assert allowed == [150, 300, 512, 512]
