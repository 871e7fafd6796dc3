"""The same load under three ways of decoding: plain, drafting and verifying in turn, and drafting behind verification.

"In turn" means the best fixed draft length: every length is tried, under each verification that applies, and the
fastest counts.
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
WORTH_GOING_ON = 0.92
"""Longer drafts are not tried once they have come down to this share of the best: tokens a round over its time have one
maximum in gamma."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way of decoding, and its results."""

    name: str
    gamma: int | None
    """Draft length, where it is fixed."""
    verification: Verification
    report: Report

    @property
    def rate(self) -> float:
        """The measure of the comparison: tokens a second of one stream."""
        return self.report.tokens_per_s_a_stream


@dataclass(frozen=True, slots=True)
class Comparison:
    """All ways under one load."""

    plain: Run
    sequential: tuple[Run, ...]
    """Every fixed draft length and verification that was tried."""
    pipelined: Run

    @property
    def best_sequential(self) -> Run:
        return max(self.sequential, key=lambda run: run.rate)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Plain, the best in turn, pipelined."""
        return self.plain, self.best_sequential, self.pipelined


def compare(scenario: Scenario, gammas: Sequence[int] = GAMMAS) -> Comparison:
    """Run them all; the pipelined one as the scenario's settings say."""
    return Comparison(
        plain=run("plain", plain(scenario), gamma=0),
        sequential=tuple(sweep(scenario, gammas)),
        pipelined=run("pipelined", scenario),
    )


def run(name: str, scenario: Scenario, gamma: int | None = None) -> Run:
    """One way."""
    return Run(name, gamma, scenario.verification, simulate(scenario))


def plain(scenario: Scenario) -> Scenario:
    """Without a draft."""
    return replace(scenario, num_drafts=0, speculation=replace(scenario.speculation, max_draft_tokens=0))


def sequential(scenario: Scenario, gamma: int) -> Scenario:
    """Chains of `gamma` guesses, each drafted after the verdict on the one before."""
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
    """In turn: each verification that applies, by rising draft length until that does not pay."""
    for verification in lossless(is_greedy=scenario.temperature == 0):
        if verification.rule.needs_q and verification.rule.takes_trees:
            continue  # with one draw a place, as in a chain, it is rejection
        best = 0.0
        for gamma in gammas:
            fixed = replace(sequential(scenario, gamma), verification=verification)
            yield (tried := run("sequential", fixed, gamma))
            best = max(best, tried.rate)
            if tried.rate < WORTH_GOING_ON * best:
                break
