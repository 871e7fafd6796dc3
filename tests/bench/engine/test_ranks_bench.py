"""The benchmark of ranks, at a size that says nothing of speed: both sides run programs, each ratio has its goal."""

from __future__ import annotations

import argparse

import pytest

from bench.engine import ranks


@pytest.mark.slow
def test_both_sides_run_programs(tmp_path):
    parser = argparse.ArgumentParser()
    ranks.add_arguments(parser)
    size = ["--size=8M", "--repeats=2", f"--cache={tmp_path}"]
    results = ranks.measure(parser.parse_args(size))
    assert len(results) == len(ranks.BLOCKS)
    for result in results:
        assert result.goal is not None
        assert result.value > 0
        assert "ProgramBackend" in result.settings["alone"]
        assert "ProgramBackend" in result.settings["on ranks"]
