"""The runtime benchmark measures every side, and its ratios are those of the times: on a small model, not compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.engine import runtime
from workers.runtime.backend import BackendUnavailable
from workers.runtime.backends import native_library


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BackendUnavailable("it takes a minute")

    monkeypatch.setattr(native_library, "build", refuse)
    for name, value in {"NUM_TOKENS": 6, "SHARED_TOKENS": 64, "LONG_TOKENS": 200, "READ_BYTES": 1 << 16}.items():
        monkeypatch.setattr(runtime, name, value)


@pytest.mark.ci
def test_every_ratio_is_measured_and_those_with_goals_are_judged(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = {"size": "8M", "dtypes": "float32", "threads": 1, "repeats": 2, "cache": tmp_path, "json": file}
    main(["runtime", *(f"--{name}={value}" for name, value in options.items())])
    results = {result["name"]: result for result in json.loads(file.read_text())}
    assert len(results) == 9
    judged = {name for name, result in results.items() if result["goal"] is not None}
    assert results.keys() - judged == {
        "plain decoding over the same without compiled code",
        "a prompt with 64 new tokens over known ones",
    }
    for result in results.values():
        assert 0 < result["settings"]["min"] <= result["value"] <= result["settings"]["max"]
        assert result["settings"]["num_runs"] == 2


def test_ratios_are_of_one_repeat_and_the_faster_dtype() -> None:
    """Result in bfloat16, whose plain step takes 20 ms; at 1 GB of weights and 25 GB/s the least would be 40."""
    sides = (
        "plain",
        "transformers",
        "eager",
        "verify",
        "streams",
        "deterministic",
        "prefix",
        "shared prefix",
        "company",
    )
    times = {f"{side} float32": [9.0, 9.0] for side in sides}
    times |= {f"{side} bfloat16": [0.03, 0.03] for side in sides} | {"plain bfloat16": [0.01, 0.03]}
    times |= {"draft": [0.001, 0.002], "draft of transformers": [0.003, 0.003], "read": [4e-11, 4e-11]}
    results = {result.name: result for result in runtime._results(times, 250_000_000, {})}
    plain = results["plain decoding over transformers' generate"]
    assert (plain.settings["min"], plain.settings["max"], plain.met) == (1.0, 3.0, False)
    share = results["weights read, of a plain read loop's bandwidth"]
    assert share.settings["dtype"] == "bfloat16"
    assert (share.settings["min"], share.settings["max"]) == (pytest.approx(0.667, abs=1e-3), 2.0)
    assert results["16 streams over 1"].value == pytest.approx((16 / 3 + 16) / 2, abs=0.01)
    assert results["deterministic over default, float32"].value == 1.0
    assert results["verifying 8 rows over decoding 1, bfloat16"].settings["max"] == 3.0
    draft = results["a draft step over transformers' forward"]
    assert (draft.settings["min"], draft.settings["max"], draft.met) == (1.5, 3.0, True)
