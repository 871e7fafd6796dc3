"""Autoscaling of each deployment by its own signal: what replicas report, and the policies that Serve asks.

Knows Serve's autoscaling; the decisions themselves are pure functions in `core.scaling`. The policies run in Serve's
controller, so this module imports neither engines nor torch. Serve adds bounds and the delay of scaling up.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from core import scaling
from core.config import Autoscaling, DraftScaling, OrchestratorScaling, TargetScaling
from core.scaling import DraftLoad, TargetLoad

KV_USE = "kv_use"
BUSY = "busy"
WAITED_S = "waited_s"
ROUND_S = "round_s"
"""Reported values: share of KV in use, share of time spent computing, and seconds of waiting and of rounds since
the last report."""

RECOMMENDATIONS = "recommendations"
"""Key of the recent recommendations in a policy's state."""

Settings = TypeVar("Settings", bound=Autoscaling)


class Policy(ABC, Generic[Settings]):
    """Recommends the number of replicas for the present load, or the largest one within `downscale_delay_s`."""

    kind: type[Settings]

    def __init__(self, **settings: Any) -> None:
        """Serve passes the fields of the settings."""
        self._scaling = TypeAdapter(self.kind).validate_python(settings)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now_s = context.current_time or time.time()
        recommendations, wanted = scaling.with_downscale_delay(
            self._remembered(context, now_s),
            now_s,
            self.wanted(context),
            context.target_num_replicas,
            self._scaling.downscale_delay_s,
        )
        return wanted, {RECOMMENDATIONS: recommendations}

    def _remembered(self, context: AutoscalingContext, now_s: float) -> list[scaling.Recommendation]:
        """Recent recommendations, and the number of replicas that Serve started by itself, as it does from 0."""
        recommendations: list[scaling.Recommendation] = list(context.policy_state.get(RECOMMENDATIONS, ()))
        started_s = context.last_scale_up_time
        if recommendations and started_s is not None and now_s - started_s < self._scaling.downscale_delay_s:
            recommendations.append((started_s, context.target_num_replicas))
        return recommendations

    @abstractmethod
    def wanted(self, context: AutoscalingContext) -> int:
        """The number of replicas for the present load."""


class OrchestratorPolicy(Policy[OrchestratorScaling]):
    """Scales orchestrators by requests in progress."""

    kind = OrchestratorScaling

    def wanted(self, context: AutoscalingContext) -> int:
        num_replicas = len(context.running_replicas)
        return scaling.orchestrators_wanted(num_replicas, context.total_num_requests, self._scaling)


class TargetPolicy(Policy[TargetScaling]):
    """Scales targets by sessions and by KV in use."""

    kind = TargetScaling

    def wanted(self, context: AutoscalingContext) -> int:
        load = TargetLoad(
            num_replicas=len(context.running_replicas),
            num_sessions=context.total_num_requests,
            kv_use=_share(reported(context, KV_USE), context),
        )
        return scaling.targets_wanted(load, self._scaling)


class DraftPolicy(Policy[DraftScaling]):
    """Scales drafts by utilisation and by the time that verification waits for them."""

    kind = DraftScaling

    def wanted(self, context: AutoscalingContext) -> int:
        round_s = sum(reported(context, ROUND_S))
        load = DraftLoad(
            num_replicas=len(context.running_replicas),
            num_sessions=context.total_num_requests,
            busy=_share(reported(context, BUSY), context),
            wait=sum(reported(context, WAITED_S)) / round_s if round_s > 0 else 0.0,
        )
        return scaling.drafts_wanted(load, self._scaling)


POLICIES: Mapping[type[Autoscaling], type[Policy[Any]]] = {
    OrchestratorScaling: OrchestratorPolicy,
    TargetScaling: TargetPolicy,
    DraftScaling: DraftPolicy,
}


def replicas(num_replicas: int, settings: Autoscaling | None) -> dict[str, Any]:
    """Serve's options for the number of replicas."""
    if settings is None:
        return {"num_replicas": num_replicas}
    return {"autoscaling_config": serve_config(settings)}


def serve_config(settings: Autoscaling) -> AutoscalingConfig:
    """The settings as Serve's configuration, with the policy by name."""
    policy = POLICIES[type(settings)]
    dumped = TypeAdapter(type(settings)).dump_python(settings, mode="json")
    return AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=0.0,  # the policy has its own, with the largest recommendation; Serve takes the last
        look_back_period_s=settings.window_s,
        policy=AutoscalingPolicy(policy_function=f"{__name__}:{policy.__name__}", policy_kwargs=dumped),
    )


def most_replicas(num_replicas: int, settings: Autoscaling | None) -> int:
    """Largest number of replicas, for the sum of an application's demand."""
    return num_replicas if settings is None else settings.max_replicas


def _share(shares: list[float], context: AutoscalingContext) -> float:
    """The mean over the running replicas; one without a report counts as idle."""
    return sum(shares) / max(1, len(context.running_replicas))


def reported(context: AutoscalingContext, name: str) -> list[float]:
    """The last reports of the running replicas under `name`; a new replica has none."""
    return list(((context.aggregated_metrics or {}).get(name) or {}).values())
