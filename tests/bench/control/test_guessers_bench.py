"""Every guesser of the table is measured, and chance finds nothing."""

from __future__ import annotations

import argparse

import pytest

from bench.control import guessers
from orchestrator.guessers import BY_TEXT


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(guessers, "NUM_ROUNDS", 3)

    def measure(only):
        results = guessers.measure(argparse.Namespace(only=only, nodes=16))
        return {result.name: result for result in results}

    return measure


def test_the_cost_of_each_guesser_is_held_against_the_goal(measured):
    results = measured("cost")
    for name in BY_TEXT:
        assert results[f"{name}: guessing"].goal == guessers.MAX_COST_US
        assert results[f"{name}: the first time, in a text of 8k"].value > 0
    assert results["suffix, full of recent outputs: guessing"].goal == guessers.MAX_COST_US


@pytest.mark.ci
def test_copies_are_found_and_chance_finds_nothing(measured):
    """Texts are files of this project, which change: what is asked is less than what there is."""
    worth = {name: result.value for name, result in measured("worth").items()}
    assert worth["edits: prompt_lookup"] > 3
    assert worth["edits: suffix"] > 3
    assert worth["log: ngram"] > 2
    assert worth["code: retrieval"] > 1.2
    for kind in ("the file, edited again", "the file unseen, written again", "records of one schema"):
        assert worth[f"{kind}: suffix with recent outputs"] > 1.1 * worth[f"{kind}: suffix"]
    assert worth["other parts of a text: suffix with recent outputs"] >= worth["other parts of a text: suffix"]
    assert worth["code: unigram"] < worth["code: bigram"] < worth["code: retrieval"]
    assert all(1 <= worth[f"{kind}: random"] < 1.05 for kind in ("code", "prose", "edits", "log"))
