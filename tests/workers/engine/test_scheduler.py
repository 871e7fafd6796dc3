"""Decoding is whole and first, prefill fills the rest, and nobody starves."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from core.config import DECODE_TOKENS, MIN_CHUNK_TOKENS
from workers.engine.scheduler import plan


@dataclass(eq=False)
class FakeJob:
    num_pending: int
    num_tree_rows: int = 0
    is_urgent: bool = True
    has_begun: bool = False

    @property
    def max_chunk_tokens(self) -> int:
        return self.num_pending

    @property
    def pending(self) -> range:
        return range(self.num_pending)


MAX_ROWS, CHUNK_ROWS = 100, 40


def shares(*jobs):
    return [
        (jobs.index(share.job), share.num_tokens, share.is_last)
        for share in plan(jobs, MAX_ROWS, lambda num_decoding: CHUNK_ROWS)
    ]


def test_a_lone_prompt_takes_the_whole_step():
    assert shares(FakeJob(250)) == [(0, 100, False)]


def test_a_prompt_beside_decoding_takes_a_chunk():
    assert shares(FakeJob(250), FakeJob(1, 4), FakeJob(1)) == [(1, 1, True), (2, 1, True), (0, 40, False)]


def test_the_last_chunk_takes_the_block_along():
    assert shares(FakeJob(95, 5)) == [(0, 95, True)]
    assert shares(FakeJob(95, 6)) == [(0, 94, False)], "one token is left for the block to follow"


def test_decoding_beyond_the_step_waits_in_order():
    jobs = [FakeJob(1, 39) for _ in range(3)]
    assert shares(*jobs) == [(0, 1, True), (1, 1, True)]


def test_a_prompt_gets_on_however_many_decode():
    assert shares(FakeJob(250), *[FakeJob(1, 19) for _ in range(5)]) == [(place, 1, True) for place in range(1, 5)] + [
        (0, 20, False)
    ]
    assert shares(FakeJob(250), FakeJob(1, 199)) == [(1, 1, True)], "unless one alone is more than a step"


def test_what_is_urgent_goes_first_and_the_rest_by_age():
    tables, block = [FakeJob(0, 60, is_urgent=False) for _ in range(2)], FakeJob(1, 30)
    assert shares(tables[0], block, tables[1]) == [(1, 1, True), (0, 0, True)]
    assert shares(FakeJob(250, is_urgent=False), FakeJob(250)) == [(1, 100, False)]


def test_guesses_may_go_without_a_token():
    assert shares(FakeJob(0, 5), FakeJob(250)) == [(0, 0, True), (1, 40, False)]


def test_a_block_larger_than_a_step_is_still_served():
    assert shares(FakeJob(1, 300)) == [(0, 1, True)]


@given(st.lists(st.builds(FakeJob, st.integers(1, 400), st.integers(0, 64), st.booleans()), min_size=1, max_size=12))
def test_every_job_is_done_in_the_end(jobs):
    num_steps = 0
    while jobs:
        num_steps += 1
        assert num_steps < 2000
        chosen = plan(jobs, MAX_ROWS, lambda num_decoding: CHUNK_ROWS)
        assert chosen, "a step does something"
        rows = sum(share.num_rows for share in chosen)
        alone = chosen[0].job.num_pending + chosen[0].job.num_tree_rows
        assert rows <= max(MAX_ROWS, alone)
        for share in chosen:
            job = share.job
            assert share.is_last == (share.num_tokens == job.num_pending)
            assert 0 < share.num_tokens <= job.num_pending
            job.num_pending -= share.num_tokens
            job.has_begun = True
        jobs = [job for job in jobs if job.num_pending]


def test_what_counts_as_decoding():
    assert shares(FakeJob(DECODE_TOKENS), FakeJob(DECODE_TOKENS + 1))[0][0] == 0


def test_the_end_of_a_prompt_is_paced_like_the_rest_of_it():
    """Its last few tokens go whole, with the guesses after them."""
    jobs = [FakeJob(MIN_CHUNK_TOKENS + 1, 5, has_begun=True), FakeJob(1)]
    chosen = plan(jobs, MAX_ROWS, lambda num_decoding: MIN_CHUNK_TOKENS)
    assert [(share.job, share.num_tokens, share.is_last) for share in chosen] == [
        (jobs[1], 1, True),
        (jobs[0], 8, False),
    ]
    assert shares(FakeJob(MIN_CHUNK_TOKENS, 5, has_begun=True), FakeJob(1)) == [(0, 8, True), (1, 1, True)]


def test_how_large_a_chunk_is_depends_on_how_many_rows_decode():
    asked = []
    jobs = [FakeJob(250), FakeJob(1, 4), FakeJob(3)]
    chosen = plan(jobs, MAX_ROWS, lambda num_decoding: asked.append(num_decoding) or 7)
    assert asked == [8]
    assert chosen[-1].num_tokens == 7
