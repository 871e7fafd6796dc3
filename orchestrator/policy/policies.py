"""The policies of one orchestrator's sessions: the choice for each session, shared estimates, and a report.

Knows settings and policies; must not know sessions or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from core.config import SpeculationConfig
from core.records import GenerationRequest
from orchestrator.policy.adaptive import AdaptivePolicy
from orchestrator.policy.named import ChainPolicy, StaticTreePolicy
from orchestrator.policy.policy import ControlReport
from orchestrator.policy.shared_estimates import SharedEstimates
from orchestrator.policy.tree_policy import TreePolicy


class Policies(Protocol):
    """Creates each session's policy, and keeps the shared estimates (costs, load, acceptance)."""

    def policy(self, request: GenerationRequest) -> TreePolicy: ...

    def report(self) -> ControlReport: ...


class Controller:
    """Creates the policy named by the request, or by the settings. Keeps what all policies learn."""

    def __init__(self, config: SpeculationConfig, target_times_s: Sequence[tuple[int, float]] = ()) -> None:
        """`target_times_s`: (rows, seconds) of the target's passes, measured when it started."""
        self._config = config
        self._known = SharedEstimates(target_times_s)

    def __repr__(self) -> str:
        return f"<Controller {self._config.policy} {self._known}>"

    def policy(self, request: GenerationRequest) -> TreePolicy:
        config, known = self._config_for(request), self._known
        policy = _class_of(config, request)(request, config, known)
        if policy.gamma or not known.reason:
            nodes = policy.max_nodes if policy.gamma else 0
            known.note(f"{policy.kind}: gamma {policy.gamma}, {policy.why}", policy.gamma, nodes, is_change=False)
        return policy

    def _config_for(self, request: GenerationRequest) -> SpeculationConfig:
        """Return the settings, overridden by the request's own values."""
        config, is_pipelined = self._config, request.pipelining
        pipelining = config.pipelining if is_pipelined is None else is_pipelined
        return replace(config, policy=request.policy or config.policy, pipelining=pipelining)

    def report(self) -> ControlReport:
        known = self._known
        return ControlReport(
            policy=self._config.policy,
            num_sessions=known.num_sessions,
            draft_tokens=known.depth,
            block_tokens=known.nodes,
            reason=known.reason,
            acceptance=(known.acceptance(),) * self._config.max_draft_tokens,
            hit_rate=known.hits.value,
            verify_s=known.verify.passes.points(),
            draft_s=known.draft.passes.points(),
            wire_s=known.verify.wire_s,
            branch_s=known.verify.passes.branch_s,
            num_changes=known.num_changes,
        )


def _class_of(config: SpeculationConfig, request: GenerationRequest) -> type[TreePolicy]:
    """Return the policy's class. Static trees become chains if the rule takes no trees."""
    if config.policy == "adaptive":
        return AdaptivePolicy
    return StaticTreePolicy if config.policy == "static_tree" and request.rule.takes_trees else ChainPolicy
