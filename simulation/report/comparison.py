"""The same load decoded in three ways: plain, in turn, and pipelined.

"In turn" is the best fixed draft length: every length is tried under each verification that applies, and the fastest
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from core.config import SpeculationConfig
from core.records import Verification
from core.rules import lossless
from simulation.measure import Report
from simulation.scenario import Scenario, simulate

GAMMAS = (1, 2, 3, 4, 5, 6, 8)
STOP_SHARE = 0.92
"""The sweep stops when the rate has fallen to this share of the best: as a function of gamma it has one maximum."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way of decoding, and its results."""

    name: str
    gamma: int | None
    """Draft length, if it is fixed."""
    verification: Verification
    report: Report

    @property
    def rate(self) -> float:
        """Tokens per second of one stream, the measure of the comparison."""
        return self.report.tokens_per_s_a_stream


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of all ways under one load."""

    plain: Run
    sequential: tuple[Run, ...]
    """Every fixed draft length and verification tried."""
    pipelined: Run

    @property
    def best_sequential(self) -> Run:
        return max(self.sequential, key=lambda run: run.rate)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Plain, the best in turn, and pipelined."""
        return self.plain, self.best_sequential, self.pipelined


def compare(scenario: Scenario, gammas: Sequence[int] = GAMMAS) -> Comparison:
    """Run all ways. The pipelined run uses the scenario's own settings."""
    return Comparison(
        plain=run("plain", plain(scenario), gamma=0),
        sequential=tuple(sweep(scenario, gammas)),
        pipelined=run("pipelined", scenario),
    )


def run(name: str, scenario: Scenario, gamma: int | None = None) -> Run:
    return Run(name, gamma, scenario.verification, simulate(scenario))


def plain(scenario: Scenario) -> Scenario:
    """The scenario without a draft."""
    return replace(scenario, num_drafts=0, speculation=replace(scenario.speculation, max_draft_tokens=0))


def sequential(scenario: Scenario, gamma: int) -> Scenario:
    """The scenario with chains of `gamma` guesses, each drafted after the previous verdict."""
    fixed = SpeculationConfig(
        policy="static",
        pipelining=False,
        max_draft_tokens=gamma,
        max_block_tokens=gamma,
        guessers=("draft",),
        draft_timeout_s=scenario.speculation.draft_timeout_s,
    )
    return replace(scenario, speculation=fixed)


def sweep(scenario: Scenario, gammas: Sequence[int] = GAMMAS) -> Iterator[Run]:
    """Run all ways in turn: each verification that applies, with rising draft length until the rate falls."""
    for verification in lossless(is_greedy=scenario.temperature == 0):
        if verification.rule.needs_q and verification.rule.takes_trees:
            continue  # with one draw per place, as in a chain, the rule equals rejection
        best = 0.0
        for gamma in gammas:
            fixed = replace(sequential(scenario, gamma), verification=verification)
            yield (tried := run("sequential", fixed, gamma))
            best = max(best, tried.rate)
            if tried.rate < STOP_SHARE * best:
                break
