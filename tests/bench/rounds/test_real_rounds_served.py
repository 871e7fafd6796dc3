"""The benchmark of real rounds, at a size that says nothing of speed: it runs, and drafting changes no token."""

from __future__ import annotations

import argparse

import pytest

from bench.rounds.real import add_arguments, measure

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_figure_is_measured_and_no_completion_differs(tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    size = "--target-size 10M --prompts 2 --tokens 24 --repeats 1"
    results = {r.name: r for r in measure(parser.parse_args([*size.split(), "--cache", str(tmp_path)]))}
    for temperature in ("T = 0", "T = 1"):
        assert results[f"{temperature}: completions unlike plain decoding"].met
        assert results[f"{temperature}: pipelined over sequential"].value > 0
        assert results[f"{temperature}: hit rate"].settings["asked"] > 0
        assert 0 < results[f"{temperature}: draft time hidden on hits"].value <= 1
        assert results[f"{temperature}: cost ratio c, served"].value > 0
