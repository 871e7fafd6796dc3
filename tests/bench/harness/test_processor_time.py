"""Processor time by process, of numbers made by hand; and whose it is."""

from __future__ import annotations

import subprocess

import pytest

from bench.harness.processor import busiest_s, cpu_s, processor_time, round_ms, threads_s


def test_processes_that_this_one_has_started_are_among_those_that_are_counted():
    before = cpu_s()
    with subprocess.Popen(["sleep", "600"]) as child:
        beside = cpu_s()
        child.kill()
    assert "sleep" in beside.keys() - before.keys()


def test_each_thread_of_a_process_is_counted_by_itself():
    with subprocess.Popen(["sleep", "600"]) as child:
        of_child = threads_s("sleep")
        child.kill()
    assert of_child.keys() == {child.pid}


def test_a_process_that_is_not_there_is_not_taken_for_an_idle_one():
    with pytest.raises(LookupError, match="called 'TargetActor'"):
        threads_s("TargetActor")


def test_the_busiest_thread_is_that_of_the_time_between():
    assert busiest_s({1: 9.0, 2: 1.0}, {1: 9.25, 2: 1.5, 3: 0.125}) == 0.5


def test_a_round_gets_its_share_of_what_was_spent_and_a_new_process_counts_from_its_start():
    before, after = {"proxy": 1.0, "engine": 2.0}, {"proxy": 1.1, "engine": 2.0, "client": 0.05}
    spent = {process: round(ms, 6) for process, ms in round_ms(before, after, 50).items()}
    assert spent == {"proxy": 2.0, "engine": 0.0, "client": 1.0}


def test_the_total_is_of_all_processes_and_those_that_take_the_most_are_named():
    """A process that is not in a sample has taken nothing there."""
    result = processor_time("a round", [{"proxy": 1.0, "idle": 0.04}, {"proxy": 3.0}, {"proxy": 2.0, "client": 6.0}])
    assert (result.value, result.unit) == (3.0, "ms")
    assert result.settings == {"min": 1.04, "max": 8.0, "num_runs": 3, "proxy": 2.0}
