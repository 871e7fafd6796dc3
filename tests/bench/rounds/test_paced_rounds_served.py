"""The benchmark of paced rounds, at a size that says nothing of speed: it runs, passes last, no token changes."""

from __future__ import annotations

import argparse

import pytest

from bench.rounds import paced, real

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def test_passes_last_as_long_as_they_should_and_no_completion_differs(tmp_path):
    parser = argparse.ArgumentParser()
    real.add_arguments(parser)
    paced.add_arguments(parser)
    size = "--paced 8b+0.5b --paced-temperatures 0 --prompts 2 --tokens 24 --repeats 1"
    measured = paced.measure(parser.parse_args([*size.split(), "--cache", str(tmp_path)]))
    results = {each.name.partition(": ")[2]: each for each in measured}
    assert results["completions unlike plain decoding"].met
    assert 0 < results["plain over 1/t_v"].value <= 1
    assert results["hit rate"].settings["asked"] > 0
    assert results["a round beside its target pass, plain"].settings["target pass, ms"] == 5.0
    assert results["processor time of a round, pipelined"].settings["orchestrator"] > 0
