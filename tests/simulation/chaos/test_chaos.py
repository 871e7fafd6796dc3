"""The orchestrator under two thousand seeds of chaos; a seed that breaks an invariant is named with its replay."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from core.errors import Unavailable
from orchestrator.guessers import BY_TEXT, CONTROLS, SOURCES
from simulation.chaos.corruptions import (
    DRAFT_CORRUPTIONS,
    FEATURE_CORRUPTIONS,
    GUESSER_CORRUPTIONS,
    TARGET_CORRUPTIONS,
    VERDICT_FEATURE_CORRUPTIONS,
)
from simulation.chaos.engine_faults import BREAKDOWNS, EngineFault
from simulation.chaos.faults import GROWTH_FAULTS, CallFault, EventLog
from simulation.chaos.invariants import InvariantChecker, Stream
from simulation.chaos.run import run_seed
from simulation.chaos.script import script_of
from simulation.clock import new_loop
from simulation.rig import Rig

NUM_PARTS, NUM_SEEDS = 40, 50
FIRST = {0, 1, 2, 6}
"""The parts of `make test`; the others are in continuous integration alone. Each planted fault of
test_mutations is caught by a seed among them (one of them by 306 alone), or by 250, which test_mutations runs with
nothing planted, too. And what can happen does: 100 seeds leave things out."""


def parts():
    return [part if part in FIRST else pytest.param(part, marks=pytest.mark.ci) for part in range(NUM_PARTS)]


@pytest.fixture(scope="session")
def counted(tmp_path_factory):
    """Where each part leaves its counts, whichever process has run it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "chaos"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("part", parts())
def test_every_invariant_holds_and_nothing_that_can_happen_is_left_out(part, counted):
    broken, counts = [], Counter()
    for seed in range(part * NUM_SEEDS, (part + 1) * NUM_SEEDS):
        report = run_seed(seed)
        counts.update(report.counts)
        if report.error is not None:
            broken.append(f"{report.command}: {report.error}")
    assert not broken, "\n".join(broken)
    (counted / f"{part}.new").write_text(json.dumps(counts))
    (counted / f"{part}.new").rename(counted / f"{part}.json")
    done = {int(each.stem): Counter(json.loads(each.read_text())) for each in counted.glob("*.json")}
    if done.keys() >= FIRST:
        check_that_all_happened(sum((done[each] for each in FIRST), Counter()), len(FIRST) / NUM_PARTS / 2)
    if len(done) == NUM_PARTS:
        check_that_all_happened(sum(done.values(), Counter()), 1)


AT_LEAST = {
    500: ("num_hits", "num_misses"),
    200: ("num_continued", "num_lookup_tokens", "tree verified", "num_draft_failures", "num_target_failures"),
    100: ("finished a resumed one", "finished with a slow reader", "cancelled", "echo", "num_relaxed_tokens"),
    50: ("three sources in one tree", "shutdown", "failed Overloaded", "failed Unavailable", "failed DeadlinePassed"),
}


def check_that_all_happened(counts, share):
    """Chaos that no longer hits, fails over or corrupts would pass everything. `share` is that of all seeds or less."""
    for number, kinds in AT_LEAST.items():
        for kind in kinds:
            assert counts[kind] >= number * share, kind
    for side in ("target", "draft"):
        for fault in CallFault:
            assert counts[f"{side} call {fault}"] > 10 * share, f"{side} {fault}"
        for fault in BREAKDOWNS:
            assert counts[f"{side} engine {fault}"] > 100 * share, f"{side} {fault}"
        for kind in ("lease refused", "lease granted late"):
            assert counts[f"{side} {kind}"] > 10 * share, f"{side} {kind}"
    for kind in TARGET_CORRUPTIONS:
        assert share < 1 or counts[f"target says {kind}"] > 0, kind
    for fault in GROWTH_FAULTS:
        assert counts[f"draft growth {fault}"] > 10 * share, fault
    for kind in ("lost", "sent twice", *DRAFT_CORRUPTIONS):
        assert counts[f"draft's growth: {kind}"] > 10 * share, kind
    for kind in GUESSER_CORRUPTIONS:
        assert counts[f"a guesser says {kind}"] > 10 * share, kind
    for source in BY_TEXT:  # no output here has a grammar
        assert source in CONTROLS or counts[f"failures of {source}"] > 0, source
    assert sum(counts[f"accepted of {source}"] for source in SOURCES[1:]) > 500 * share


HEAD_PARTS = 100
"""Parts of 20 seeds with heads among the drafts: the first in `make test`, all 2,000 seeds in `make test-all`."""


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, HEAD_PARTS))])
def test_every_invariant_holds_with_heads_and_their_faults_happen(part):
    num_seeds = 2000 // HEAD_PARTS
    reports = [run_seed(seed, has_heads=True) for seed in range(part * num_seeds, (part + 1) * num_seeds)]
    broken = [f"{report.command}: {report.error}" for report in reports if report.error is not None]
    assert not broken, "\n".join(broken)
    if part == 0:
        check_that_heads_met_faults(sum((report.counts for report in reports), Counter()))


def check_that_heads_met_faults(counts):
    for receiver, corruptions in (("a head", FEATURE_CORRUPTIONS), ("a session", VERDICT_FEATURE_CORRUPTIONS)):
        happened = [kind for kind in corruptions if counts[f"{receiver} is sent features: {kind}"]]
        assert len(happened) > len(corruptions) / 2, receiver
    for side in ("draft", "target"):  # as a target dies, another one has to bring the features
        assert sum(counts[f"{side} engine {fault}"] > 0 for fault in EngineFault) > 2, side
    for source in ("draft", "head"):
        assert counts[f"accepted of {source}"] > 0, source


def test_a_lease_that_is_granted_too_late_explains_the_end_of_its_own_stream_alone():
    script = script_of(549)
    events = EventLog(lambda: 0.0)
    checker = InvariantChecker(SimpleNamespace(blueprint=script.blueprint), None, events, ())
    first, second = (Stream(each) for each in script.streams[:2])
    first.error = second.error = Unavailable("no target granted a lease")
    events.note("draft lease granted too late", f"{first.name}#1")
    events.note("target lease granted too late", f"{first.name}1#1")
    with pytest.raises(AssertionError, match="which nothing explains"):
        checker.check_failure(first, 0)
    events.note("target lease granted too late", f"{first.name}#2")
    checker.check_failure(first, 0)
    with pytest.raises(AssertionError, match="which nothing explains"):
        checker.check_failure(second, 0)


@pytest.fixture
def loop():
    loop = new_loop()
    yield loop
    loop.close()


def watched(loop):
    """A pair of which each of two drafts has engines of its own."""
    blueprint = replace(script_of(549).blueprint, other_drafts=(script_of(549).blueprint.text,))
    rig = Rig(blueprint, loop, Random(0))
    return rig, InvariantChecker(rig, loop, EventLog(loop.time), ())


@pytest.mark.parametrize("draft", [0, 1])
def test_what_is_left_on_any_draft_is_found(loop, draft):
    rig, checker = watched(loop)
    lease = loop.run_until_complete(rig.cluster.take_draft("s", (), draft))
    with pytest.raises(AssertionError, match="leases are still held"):
        loop.run_until_complete(check_end(checker))
    lease.release()
    loop.run_until_complete(check_end(checker))


@pytest.mark.parametrize("number", range(3))
def test_a_breach_on_any_engine_is_found(loop, number):
    rig, checker = watched(loop)
    checker.check()
    rig.cluster.fleets[number].breaches.append(AssertionError("asked twice"))
    with pytest.raises(AssertionError, match="asked twice"):
        checker.check()


async def check_end(checker):
    checker.check_nothing_is_left()


@pytest.mark.parametrize("has_heads", [False, True])
def test_the_same_seed_tells_the_same_story(has_heads):
    first, second = (run_seed(7, has_heads=has_heads) for _ in range(2))
    assert first.lines == second.lines
    assert first.counts == second.counts
    assert first.lines, "a report without a single fault shows nothing"


def test_with_heads_streams_and_earlier_faults_are_the_same():
    plain, heads = script_of(7), script_of(7, has_heads=True)
    assert [stream.expected for stream in heads.streams] == [stream.expected for stream in plain.streams]
    assert heads.timed_faults[: len(plain.timed_faults)] == plain.timed_faults


def test_other_seeds_tell_other_stories():
    assert len({tuple(run_seed(seed).lines) for seed in range(10)}) > 8
