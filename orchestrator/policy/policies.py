"""The pilots of one orchestrator's sessions: which policy, what they share, and a report for people.

Knows settings and pilots; must not know sessions or engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from core.config import SpeculationConfig
from core.records import GenerationRequest, Policy
from orchestrator.policy.adaptive import MarginalPilot
from orchestrator.policy.learning import kind_of
from orchestrator.policy.named import ChainPilot, StaticTreePilot
from orchestrator.policy.policy import ControlReport
from orchestrator.policy.shared_estimates import Knowledge, Later, at_once
from orchestrator.policy.tree_policy import TreePilot

REFLECTION_S = 0.002
"""After a verdict the next block is sent first; what to do from then on is decided while the target works."""


def after_calls(act: Callable[[], None]) -> None:
    """`act` when the calls that are due are on their way."""
    asyncio.get_running_loop().call_later(REFLECTION_S, act)


def _pilot_of(
    policy: Policy, *, is_sampled: bool
) -> Callable[[GenerationRequest, SpeculationConfig, Knowledge], TreePilot]:
    """Where the draft samples, trees are chains."""
    if policy == "adaptive":
        return MarginalPilot
    return StaticTreePilot if policy == "static_tree" and not is_sampled else ChainPilot


class Pilots(Protocol):
    """Gives each session its pilot; what is common to them (costs, load, what drafts are worth) is kept here."""

    def pilot(self, request: GenerationRequest) -> TreePilot: ...

    def report(self) -> ControlReport: ...


class Controls:
    """Gives each session its pilot, by the policy of its request or of the settings; keeps what all of them learn."""

    def __init__(
        self, config: SpeculationConfig, num_targets: float = 1.0, num_drafts: float = 1.0, later: Later = at_once
    ) -> None:
        """`num_targets` and `num_drafts`: engines over orchestrators, among which the sessions spread evenly."""
        self._config = config
        self._known = Knowledge(config.max_draft_tokens, num_targets, num_drafts, later)

    def __repr__(self) -> str:
        return f"<Controls {self._config.policy} {self._known}>"

    def pilot(self, request: GenerationRequest) -> TreePilot:
        config = self._config_for(request)
        is_sampled = kind_of(request) == "rejection"
        return _pilot_of(config.policy, is_sampled=is_sampled)(request, config, self._known)

    def _config_for(self, request: GenerationRequest) -> SpeculationConfig:
        """The settings, but for what the request says itself."""
        config, is_pipelined = self._config, request.pipelining
        pipelining = config.pipelining if is_pipelined is None else is_pipelined
        return replace(config, policy=request.policy or config.policy, pipelining=pipelining)

    def report(self) -> ControlReport:
        known, doing = self._known, self._known.doing
        accepted = known.most_accepted()
        return ControlReport(
            policy=self._config.policy,
            num_sessions=known.num_sessions,
            draft_tokens=doing.draft_tokens,
            block_tokens=doing.block_tokens,
            reason=known.reason,
            acceptance=tuple(accepted.chances(len(accepted.rates))) if accepted else (),
            hit_rate=known.hits.mean(),
            verify_s=known.verify.passes.points(),
            draft_s=known.draft.passes.points(),
            wire_s=known.verify.wire_s,
            branch_s=known.verify.passes.branch_s,
            num_changes=known.num_changes,
        )
