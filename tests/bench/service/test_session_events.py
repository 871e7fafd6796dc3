"""What is measured of a session's events, at a small size."""

from __future__ import annotations

import argparse

import pytest

from bench.service import session_events
from orchestrator.session import Session


@pytest.mark.ci
def test_every_round_of_each_load_is_timed_and_sessions_are_left_as_they_were():
    handle = Session.handle
    results = session_events.measure(argparse.Namespace(streams=1, tokens=12))
    assert Session.handle is handle
    names = [result.name for result in results]
    assert "8b+0.5b, T = 0: a verdict, median" in names
    assert all(result.value > 0 for result in results)
    rounds = [result.settings["rounds"] for result in results if "all events" in result.name]
    assert len(rounds) == 4
    assert all(1 <= num <= 12 for num in rounds)
