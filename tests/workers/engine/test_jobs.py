"""A job reports the time that it took."""

from __future__ import annotations

from core.records import Timing
from workers.engine import jobs
from workers.engine.jobs import Job


class FakeJob(Job):
    """Computes nothing."""

    num_tree_rows = 0

    def last_rows(self):
        raise AssertionError("nobody asks for rows")


def test_a_job_begins_with_its_first_step_and_counts_the_rows_of_all_and_the_sessions_of_the_last(monkeypatch):
    job = FakeJob(None, None, [], arrived_s=10.0)
    monkeypatch.setattr(jobs, "monotonic", lambda: 15.0)
    assert job.timing() == Timing(5.0, 0.0, 0, 0)
    job.record_step(11.0, 8, 2)
    job.record_step(13.0, 3, 1)
    assert job.timing() == Timing(1.0, 4.0, 2, 11, 1)
