from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import replace

import pytest

from core.errors import DeadlinePassed, InvalidRequest, RequestCancelled
from core.records import Chunk, FinishReason, SourceStats, SpeculationStats, Usage
from core.records.statistics import EngineStats
from deploy.link.address import LinkTroubles
from deploy.metrics.meters import EngineMeter, Meters, code_of, without_figures
from tests.deploy.grpc.rpc import REPORT, Recorded


class Watch:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def record():
    return Recorded()


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def meters(record, watch):
    return Meters(record, watch)


def chunk(num_tokens: int, **fields: object) -> Chunk:
    return Chunk("x", (5,) * num_tokens, (False,) * num_tokens, Usage(7, num_tokens, 4), **fields)


def run(meters: Meters, watch: Watch, *pieces: tuple[float, Chunk]) -> None:
    """A request that is sent each piece at its time."""
    with meters.request() as meter:
        for time_s, piece in pieces:
            watch.now_s = time_s
            assert meter.observe(piece) is piece


def test_times_are_taken_from_arrival_between_chunks_and_per_token(meters, record, watch):
    last = chunk(3, finish_reason=FinishReason.LENGTH)
    run(meters, watch, (100.5, chunk(2)), (100.75, chunk(1)), (101.5, last))
    times_s = {name: values for name, values in record.observed.items() if name.endswith("_seconds")}
    assert times_s == {
        "time_to_first_token_seconds": [0.5],
        "inter_token_latency_seconds": [0.25, 0.75],
        "request_time_per_output_token_seconds": [0.25],
        "e2e_request_latency_seconds": [1.5],
    }
    assert record["generation_tokens_total"] == 6
    assert record["prompt_tokens_total"] == 7
    assert record["prompt_tokens_cached_total"] == 4
    assert record.by_label("request_success_total") == {"length": 1}


def test_outputs_of_a_search_that_come_at_once_have_no_time_between_tokens(meters, record, watch):
    last = chunk(3, finish_reason=FinishReason.LENGTH)
    run(meters, watch, (100.5, last), (100.5, replace(last, output=1)))
    assert record["generation_tokens_total"] == 6
    assert "inter_token_latency_seconds" not in record.observed
    assert "request_time_per_output_token_seconds" not in record.observed


def test_a_chunk_without_tokens_is_no_token(meters, record, watch):
    run(meters, watch, (100.5, chunk(0)), (100.6, chunk(1)), (100.9, chunk(0, finish_reason=FinishReason.STOP)))
    assert record.observed["time_to_first_token_seconds"] == [pytest.approx(0.6)]
    assert "inter_token_latency_seconds" not in record.observed
    assert "request_time_per_output_token_seconds" not in record.observed


def test_speculation_is_added_up_over_requests(meters, record, watch):
    stats = SpeculationStats(
        num_rounds=5, num_drafted_tokens=16, num_accepted_tokens=9, num_draft_rounds=4, accepted_per_position=(4, 3, 2),
        num_draft_failures=1, num_target_failures=2, num_lookup_tokens=3, num_hits=6, num_misses=2, draft_time_s=1.5,
        hidden_draft_time_s=1.25, num_continued=5,
        sources=(SourceStats("draft", 13, 8), SourceStats("prompt_lookup", 3, 1, 2)),
    )  # fmt: skip
    for _ in range(2):
        run(meters, watch, (100.1, chunk(1, finish_reason=FinishReason.STOP, stats=stats)))
    assert record.by_label("spec_decode_num_accepted_tokens_per_pos_total") == {"0": 8, "1": 6, "2": 4}
    assert record.by_label("source_tokens_total") == {"draft": 26, "prompt_lookup": 6}
    assert record.by_label("source_accepted_tokens_total") == {"draft": 16, "prompt_lookup": 2}
    assert record.by_label("source_failures_total") == {"draft": 0, "prompt_lookup": 4}
    totals = {
        "target_passes": 10, "spec_decode_num_drafts": 8, "spec_decode_num_draft_tokens": 32,
        "spec_decode_num_accepted_tokens": 18, "lookup_tokens": 6, "draft_hits": 12, "draft_misses": 4,
        "continued_passes": 10,
        "draft_seconds": 3, "draft_hidden_seconds": 2.5, "draft_failures": 2, "target_failures": 4,
    }  # fmt: skip
    assert {name: record[f"{name}_total"] for name in totals} == totals


def test_what_goes_wrong_after_the_last_chunk_is_no_failure(meters, record):
    def drop() -> None:
        with meters.request() as meter:
            meter.observe(chunk(1, finish_reason=FinishReason.STOP))
            raise GeneratorExit

    with pytest.raises(GeneratorExit):
        drop()
    assert record.by_label("request_success_total") == {"stop": 1}
    assert not record.by_label("request_failure_total")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("f", "p"), "INVALID_ARGUMENT"),
        (DeadlinePassed("late"), "DEADLINE_EXCEEDED"),
        (RequestCancelled("gone"), "CANCELLED"),
        (asyncio.CancelledError(), "CANCELLED"),
        (GeneratorExit(), "CANCELLED"),
        (ZeroDivisionError(), "INTERNAL"),
    ],
)
def test_a_failure_has_the_code_that_its_client_sees(error, code):
    assert code_of(error) == code


def test_control_shows_what_is_decided_and_by_what(meters, record):
    meters.observe_control(REPORT)
    shown = {name: record[name] for name in ("gamma", "block_tokens", "draft_resting")}
    assert shown == {"gamma": 5, "block_tokens": 12, "draft_resting": 0}
    assert record["estimated_hit_rate"] == 0.9
    assert record["estimated_wire_seconds"] == 0.001
    assert record["estimated_branch_seconds"] == 0.0004
    assert record.by_label("estimated_acceptance") == {"0": 0.8, "1": 0.7}
    assert record.by_label("estimated_verify_seconds") == {"1": 0.01, "8": 0.0125}
    assert record.by_label("estimated_draft_seconds") == {"1": 0.002}


def test_running_are_requests_that_were_admitted(meters, record):
    """vLLM counts in the same way: requests in the queue are waiting."""
    with meters.request():
        assert record["num_requests_running"] == 0
        meters.observe_control(replace(REPORT, num_sessions=3))
        assert record["num_requests_running"] == 3


def test_the_draft_is_shown_with_those_who_have_a_place_at_it(meters, record):
    meters.observe_draft(is_ready=False, num_drafted=0)
    assert (record["draft_ready"], record["num_requests_drafted"]) == (0, 0)
    meters.observe_draft(is_ready=True, num_drafted=3)
    assert (record["draft_ready"], record["num_requests_drafted"]) == (1, 3)


def test_troubles_with_links_are_counted_once(meters, record):
    for troubles in (LinkTroubles(), LinkTroubles(2, 1), LinkTroubles(2, 1), LinkTroubles(3, 1)):
        meters.observe_links(troubles)
    assert (record["links_unopened_total"], record["links_lost_total"]) == (3, 1)


def test_changes_of_control_are_counted_once_under_a_reason_without_figures(meters, record):
    meters.observe_control(REPORT)
    meters.observe_control(REPORT)
    meters.observe_control(replace(REPORT, num_changes=4, draft_tokens=0, reason="rests: 0.97 of plain, was 1.2e-3"))
    assert record.by_label("control_changes_total") == {
        "draft length # -> #: # > # tokens/s": 3,
        "rests: # of plain, was #": 1,
    }
    assert record["draft_resting"] == 1


@pytest.mark.parametrize(("reason", "label"), [("", ""), ("a 1.5, b -2e-05.", "a #, b -#."), ("gamma", "gamma")])
def test_figures_are_taken_out_of_a_label(reason, label):
    assert without_figures(reason) == label


def test_counters_of_an_engine_count_on_from_what_it_said_before(record):
    meter = EngineMeter(record)
    meter.observe(
        stats_of_engine(
            num_free_blocks=30, num_steps=5, num_rows=50, num_preemptions=1, num_eager_steps=2, step_time_s=0.5
        )
    )
    assert record["kv_cache_usage_perc"] == 0.25
    meter.observe(
        stats_of_engine(
            num_free_blocks=10,
            num_steps=7,
            num_rows=80,
            num_preemptions=1,
            num_eager_steps=4,
            step_time_s=2.0,
            num_sessions=5,
            num_waiting=2,
        )
    )
    assert record["kv_cache_usage_perc"] == 0.75
    assert (record["engine_sessions"], record["engine_sessions_waiting"]) == (5, 2)
    totals = {
        "engine_steps_total": 7,
        "engine_rows_total": 80,
        "num_preemptions_total": 1,
        "engine_eager_steps_total": 4,
    }
    assert {name: record[name] for name in totals} == totals
    assert record["engine_busy_seconds_total"] == 2.0


def test_an_engine_that_takes_the_place_of_a_dead_one_counts_from_the_beginning(record):
    meter = EngineMeter(record)
    meter.observe(stats_of_engine(num_steps=10))
    meter.observe_death()
    meter.observe_moved(2)
    meter.observe_moved(1)
    for num_steps in (4, 6):
        meter.observe(stats_of_engine(num_steps=num_steps))
    assert record["engine_steps_total"] == 16
    assert (record["engine_deaths_total"], record["sessions_moved_total"]) == (1, 3)


def stats_of_engine(**values: float) -> EngineStats:
    nothing = {field.name: 0 for field in dataclasses.fields(EngineStats)}
    return EngineStats(**nothing | {"num_blocks": 40} | values)
