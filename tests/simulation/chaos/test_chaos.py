"""The orchestrator under two thousand seeds of chaos; a seed that breaks an invariant is named with its replay."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest

from simulation.chaos.faults import GROWTH_FAULTS, CallFault, EngineFault
from simulation.chaos.lies import GROWTH_LIES, TARGET_LIES
from simulation.chaos.run import run_seed

SEEDS = range(2000)
NUM_PARTS = 20


@pytest.fixture(scope="session")
def counted(tmp_path_factory):
    """Where each part leaves its counts, whichever process has run it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "chaos"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, NUM_PARTS))])
def test_every_invariant_holds_and_nothing_that_can_happen_is_left_out(part, counted):
    broken, counts = [], Counter()
    for seed in SEEDS[part::NUM_PARTS]:
        story = run_seed(seed)
        counts.update(story.counts)
        if story.error is not None:
            broken.append(f"{story.command}: {story.error}")
    assert not broken, "\n".join(broken)
    (counted / f"{part}.new").write_text(json.dumps(counts))
    (counted / f"{part}.new").rename(counted / f"{part}.json")
    if len(parts := list(counted.glob("*.json"))) == NUM_PARTS:
        check_that_all_happened(sum((Counter(json.loads(each.read_text())) for each in parts), Counter()))


AT_LEAST = {
    500: ("num_hits", "num_misses", "next: hit", "next: miss", "next: not asked"),
    200: ("num_continued", "num_lookup_tokens", "tree verified", "num_draft_failures", "num_target_failures"),
    100: ("finished a resumed one", "finished with a slow reader", "cancelled", "echo"),
    50: ("shutdown", "failed Overloaded", "failed Unavailable", "failed DeadlinePassed"),
}


def check_that_all_happened(counts):
    """A chaos that no longer hits, fails over or lies would pass everything."""
    for number, kinds in AT_LEAST.items():
        for kind in kinds:
            assert counts[kind] >= number, kind
    for side in ("target", "draft"):
        for fault in CallFault:
            assert counts[f"{side} call {fault}"] > 10, f"{side} {fault}"
        for fault in EngineFault:
            assert counts[f"{side} engine {fault}"] > 100, f"{side} {fault}"
        for kind in ("lease refused", "lease granted late"):
            assert counts[f"{side} {kind}"] > 10, f"{side} {kind}"
    for lie in TARGET_LIES:
        assert counts[f"target says {lie}"] > 0, lie
    for fault in GROWTH_FAULTS:
        assert counts[f"draft growth {fault}"] > 10, fault
    for lie in ("lost", "told twice", *GROWTH_LIES):
        assert counts[f"draft's growth: {lie}"] > 10, lie


def test_the_same_seed_tells_the_same_story():
    first, second = run_seed(7), run_seed(7)
    assert first.lines == second.lines
    assert first.counts == second.counts
    assert first.lines, "a story without a single fault shows nothing"


def test_other_seeds_tell_other_stories():
    assert len({tuple(run_seed(seed).lines) for seed in range(10)}) > 8
