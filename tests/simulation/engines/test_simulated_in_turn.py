"""Drafting in turn, simulated: no pass of the draft is made between a block's sending and its verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from core.config import SpeculationConfig
from core.records import Policy
from simulation.engines.base import SimEngine
from simulation.engines.draft import SimDraft
from simulation.engines.hardware import PRESETS
from simulation.engines.target import SimTarget
from simulation.engines.texts import SteadyLaw
from simulation.scenario import Closed, Scenario, simulate

TEXT = SteadyLaw((0.75, 0.12, 0.05, 0.03))


@pytest.fixture
def passes(monkeypatch):
    """When each pass began and ended, by engine, and its rows."""
    found, step = {SimDraft: [], SimTarget: []}, SimEngine._step

    async def noted(self):
        rows = self.num_rows
        began_s, ended_s = await step(self)
        found[type(self)].append((began_s, ended_s, self.num_rows - rows))
        return began_s, ended_s

    monkeypatch.setattr(SimEngine, "_step", noted)
    return found


def scenario(policy, *, pipelining, num_streams=1):
    speculation = SpeculationConfig(policy=policy, pipelining=pipelining, max_draft_tokens=4, guessers=("draft",))
    return Scenario(
        hardware=PRESETS["70b+1b"], law=TEXT, load=Closed(1, num_streams), max_tokens=60, speculation=speculation
    )


def overlapping(passes):
    """Passes of the draft during passes of the target, prompts apart."""
    verified = [(began_s, ended_s) for began_s, ended_s, rows in passes[SimTarget] if rows <= 64]
    drafted = [(began_s, ended_s) for began_s, ended_s, rows in passes[SimDraft] if rows <= 64]
    assert verified
    assert drafted
    return sum(began < ended_s and began_s < ended for began, ended in drafted for began_s, ended_s in verified)


@pytest.mark.parametrize("policy", get_args(Policy))
def test_no_pass_is_made_while_the_target_works(policy, passes):
    assert simulate(scenario(policy, pipelining=False)).num_failed == 0
    assert overlapping(passes) == 0


@pytest.mark.parametrize("policy", get_args(Policy))
def test_behind_verification_passes_are_made(policy, passes):
    simulate(scenario(policy, pipelining=True))
    assert overlapping(passes) > 0


def test_a_chain_in_turn_costs_as_many_passes_as_guesses(passes):
    report = simulate(scenario("static", pipelining=False))
    num_drafted = sum(rows <= 64 for _, _, rows in passes[SimDraft])
    rounds = len(passes[SimTarget]) - 1
    assert 4 * (rounds - 4) < num_drafted <= 4 * rounds, "but for the last few, which have fewer tokens left"
    assert report.time_hidden == 0.0


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("pipelining", [True, False])
def test_growth_ends_by_itself_in_turn_and_where_the_draft_samples(policy, pipelining, monkeypatch):
    asked, begin = [], SimDraft._begin

    def noted(self, request, held, *rest):
        asked.append((held.spec.needs_q, request.growth.num_passes > 0))
        return begin(self, request, held, *rest)

    monkeypatch.setattr(SimDraft, "_begin", noted)
    for temperature, verification in ((0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection"), (1.0, "block")):
        played = replace(scenario(policy, pipelining=pipelining), max_tokens=16)
        report = simulate(
            replace(played, temperature=temperature, verification=type(played.verification)(verification))
        )
        assert report.num_failed == 0
    assert set(asked) == {(True, True), (False, not pipelining)}
    assert len(set(asked)) == 2
