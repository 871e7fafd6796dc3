"""The papers' tables: what is compared with what, by hand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench.papers import batches, beams, cascades, merged, papers
from bench.papers.beams import Searched
from bench.results import Result
from core.records import Call, CallTrace, Timing


def by_name(results: Sequence[Result]) -> dict[str, Result]:
    return {each.name: each for each in results}


def test_one_part_may_be_asked_for() -> None:
    parser = argparse.ArgumentParser()
    papers.add_arguments(parser)
    assert parser.parse_args(["--only", "merged"]).only == "merged"
    assert parser.parse_args([]).only is None


def test_each_way_is_compared_with_plain_decoding_of_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCHES", {"8b+0.5b": (1,)})
    monkeypatch.setattr(batches, "NUM_TOKENS", 24)
    found = by_name(batches.measure(argparse.Namespace()))
    assert [name.split(": ")[1] for name in found] == [
        "chains of 4 in turn over plain",
        "adaptive, in turn over plain",
        "adaptive over plain",
    ]
    in_turn, _, adaptive = found.values()
    assert in_turn.settings["guesses_a_round"] == pytest.approx(4, abs=0.3), "the last round has less room"
    assert 1 < in_turn.value < adaptive.value


def test_merged_candidates_are_as_many_as_those_of_one_draft() -> None:
    ranks = [(0, 3), (1, 0), (2, 1), (5, 5)]
    text = tuple([SimpleNamespace(rank=each[draft]) for each in ranks] for draft in (0, 1))
    recorded: Any = SimpleNamespace(workload=SimpleNamespace(title="code"), agreements=[text])
    found = {name: each.value for name, each in by_name(list(merged._of_one_token(recorded))).items()}
    assert found == {
        "code: 1 candidates of the draft": 0.25,
        "code: 1 candidates of the second": 0.25,
        "code: 2 candidates of the draft": 0.5,
        "code: 2 candidates of the second": 0.5,
        "code: 2 candidates of both merged": 0.5,
        "code: 4 candidates of the draft": 0.75,
        "code: 4 candidates of the second": 0.75,
        "code: 4 candidates of both merged": 0.75,
    }


def test_a_cascade_gains_what_its_passes_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    async def counted(_: argparse.Namespace, num_ahead: int) -> tuple[float, float]:
        return (4.0, 5.0) if num_ahead else (4.0, 8.0)

    monkeypatch.setattr(cascades, "_counted", counted)
    found = by_name(list(cascades._of(0.0, argparse.Namespace(prompts=8, tokens=4))))
    assert found["T = 0, no cascade, passes of the draft a round"].value == 8.0
    assert found["T = 0, c = 0.5: cascade over none"].value == pytest.approx((4 / 3.5) / (4 / 5), abs=1e-3)


def searched(num_passes: int, num_draft_passes: int) -> Searched:
    timing = Timing(0.0, 0.1, 1, 2)
    calls = [CallTrace(Call.VERIFY, 0.0, 0.1, 0, timing=timing)] * num_passes
    return Searched(calls, num_passes if num_draft_passes else 0, num_draft_passes, [(1, 2)])


def test_a_search_takes_the_time_of_its_passes_and_messages() -> None:
    """The 70B's pass takes 25 ms, the 1B's 3, and each message 1 there and back."""
    found = by_name(list(beams._results("2 beams", {0: [searched(64, 0)], 4: [searched(16, 64)]})))
    each = found["2 beams, drafts 4 deep, 70b+1b: over plain"]
    assert each.value == pytest.approx(64 * 26 / (16 * (26 + 1) + 64 * 3), abs=1e-3)
    assert (each.settings["passes"], each.settings["draft_passes"], each.settings["unlike_plain"]) == (16, 64, 0)
