"""The step benchmark measures every side in turn, and judges what has a goal: a few steps, not compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.engine import step
from bench.engine.step import Cost, Times


@pytest.mark.ci
def test_every_side_is_measured_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "NUM_STEPS": 2,
        "NUM_STREAMS": 2,
        "MAX_STEP_MS": {1: 0.3, 2: 1.0},
        "DRAFT_ROWS": (1, 8),
        "LARGE_VOCAB": 5000,
    }.items():
        monkeypatch.setattr(step, name, value)
    file = tmp_path / "results.json"
    main(["step", "--repeats=1", "--no-compile", f"--json={file}"])
    results = {result["name"]: result for result in json.loads(file.read_text())}
    assert len(results) == 2 * 8 + 2 + 3
    assert results["a draw from 5,000 tokens, T = 1"]["value"] > 0
    assert results["tree of 32, 1 stream, deterministic: outside the model"]["goal"] == 0.3
    assert results["plain step, 2 streams: outside the model"]["goal"] == 1.0
    assert results["draft's uncompiled pass, 8 rows over transformers' step"]["goal"] == 1.2
    for name, result in results.items():
        assert result["goal"] is None or result["met"] == (result["value"] <= result["goal"])
        if "step_ms" in result["settings"]:
            assert 0 < result["value"] < result["settings"]["step_ms"], name


def test_a_pass_is_compared_with_the_step_of_the_same_turn() -> None:
    ours = Times(whole=[Cost(1.0, 0.5), Cost(6.0, 1.0), Cost(2.0, 0.6)])
    theirs = Times(whole=[Cost(2.0, 1.0), Cost(3.0, 1.0), Cost(4.0, 1.0)])
    times = {"compiled pass, 1 row": ours, "transformers pass, 1 row": theirs}
    times |= {f"transformers pass, {rows} rows": theirs for rows in (8, 64)}
    [result] = step._pass_results(times)
    assert (result.value, result.goal, result.met) == (0.5, 0.5, True)
    assert (result.settings["min"], result.settings["max"]) == (0.5, 2.0)
    assert (result.settings["ours_ms"], result.settings["transformers_cpu_ms"]) == (2.0, 1.0)
