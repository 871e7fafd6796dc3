"""Serve gets the settings of autoscaling, and our policies decide by what it knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ray.serve import autoscaling_policy
from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from core.config import DraftScaling, OrchestratorScaling, TargetScaling
from deploy.serve import autoscaling


def context(
    num_replicas: int,
    num_requests: float,
    state: Any = None,
    now_s: float = 0.5,
    num_target: int | None = None,
    last_scale_up_s: float | None = None,
    config: Any = None,
    **metrics: list[float],
) -> AutoscalingContext:
    replicas: list[Any] = [f"replica-{number}" for number in range(num_replicas)]
    return AutoscalingContext(
        deployment_id=DeploymentID("target", "outrider"),
        deployment_name="target",
        app_name="outrider",
        current_num_replicas=num_replicas,
        target_num_replicas=num_replicas if num_target is None else num_target,
        running_replicas=replicas,
        total_num_requests=num_requests,
        total_queued_requests=0,
        aggregated_metrics={name: dict(zip(replicas, values, strict=False)) for name, values in metrics.items()},
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state=json.loads(json.dumps(state or {})),
        last_scale_up_time=last_scale_up_s,
        last_scale_down_time=None,
        current_time=now_s,
        config=config,
    )


def policy(settings: Any) -> Any:
    """Make the policy like Serve's controller: from a name and from arguments that have been JSON."""
    made = autoscaling.serve_config(settings).policy
    assert made is not None
    name = str(made.policy_function).partition(":")[2]
    return getattr(autoscaling, name)(**json.loads(json.dumps(made.policy_kwargs)))


def test_orchestrators_are_counted_by_requests():
    assert policy(OrchestratorScaling(max_replicas=8, sessions=4))(context(1, 9))[0] == 3


def test_targets_are_counted_by_sessions_and_kv():
    wanted = policy(TargetScaling(max_replicas=8, sessions=10, kv_use=0.5))
    assert wanted(context(2, 25, kv_use=[0.1, 0.3]))[0] == 3
    assert wanted(context(2, 5, kv_use=[0.9, 0.7]))[0] == 4


def test_drafts_are_counted_by_work_and_waits():
    wanted = policy(DraftScaling(max_replicas=8, busy=0.5, wait=0.1))
    assert wanted(context(2, 5, busy=[0.9, 0.7], waited_s=[0.0, 0.0], round_s=[1.0, 0.0]))[0] == 4
    assert wanted(context(2, 5, busy=[0.4, 0.4], waited_s=[0.3, 0.0], round_s=[0.5, 0.5]))[0] == 3


def test_a_replica_that_has_not_reported_yet_counts_for_nothing_but_itself():
    wanted = policy(DraftScaling(max_replicas=8, busy=0.5))
    assert wanted(context(2, 5, busy=[0.9]))[0] == 2  # work for 1.8
    assert wanted(context(1, 5))[0] == 1


def test_a_policy_remembers_in_the_state_that_serve_keeps_for_it():
    wanted = policy(OrchestratorScaling(max_replicas=8, sessions=4, downscale_delay_s=100.0))
    count, state = wanted(context(1, 9))
    assert count == 3
    assert wanted(context(3, 1, state, now_s=99.0))[0] == 3
    assert wanted(context(3, 1, state, now_s=101.0))[0] == 1


@pytest.mark.parametrize(
    "settings",
    [
        OrchestratorScaling(min_replicas=2, max_replicas=5),
        TargetScaling(min_replicas=0, max_replicas=5),
        DraftScaling(min_replicas=0, max_replicas=5, upscale_delay_s=1.0, downscale_delay_s=2.0, window_s=13.0),
    ],
)
def test_bounds_and_the_delay_of_more_are_left_to_serve(settings):
    config = autoscaling.serve_config(settings)
    assert (config.min_replicas, config.max_replicas) == (settings.min_replicas, settings.max_replicas)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (settings.upscale_delay_s, 0.0)
    assert config.look_back_period_s == settings.window_s


def serve_s(settings: Any) -> Callable[[AutoscalingContext], tuple[int, dict[str, Any]]]:
    """Our policy inside Serve's own wrapper, which adds the cold start, delays and bounds."""
    return _apply_autoscaling_config(policy(settings))


@pytest.mark.parametrize(
    "settings", [DraftScaling(min_replicas=0, max_replicas=3), TargetScaling(min_replicas=0, max_replicas=3)]
)
def test_the_first_from_none_is_not_stopped_while_it_loads(settings):
    decide, config = serve_s(settings), autoscaling.serve_config(settings)
    _, idle = decide(context(0, 0, now_s=0.0, config=config))
    count, state = decide(context(0, 1, idle, now_s=50.0, config=config))
    assert count == 1
    loading = {"num_target": 1, "last_scale_up_s": 50.0, "config": config}
    assert decide(context(0, 0, state, now_s=60.0, **loading))[0] == 1  # nobody asks for a moment
    assert decide(context(1, 0, state, now_s=700.0, **loading))[0] == 0


def test_a_moment_of_load_starts_nothing(monkeypatch):
    settings = OrchestratorScaling(max_replicas=4, sessions=64, upscale_delay_s=10)
    decide, config, state = serve_s(settings), autoscaling.serve_config(settings), {}
    counts = []
    for now_s, num_requests in enumerate([10, 70, *[10] * 20, *[70] * 20]):
        monkeypatch.setattr(autoscaling_policy.time, "time", lambda now_s=now_s: 1000.0 + now_s)
        count, state = decide(context(1, num_requests, state, now_s=1000.0 + now_s, config=config))
        counts.append(count)
    assert set(counts[:31]) == {1}
    assert 2 in counts[31:]


def test_a_fixed_count_stays_fixed():
    assert autoscaling.replicas(3, None) == {"num_replicas": 3}
    assert autoscaling.most_replicas(3, None) == 3
    assert autoscaling.most_replicas(1, TargetScaling(max_replicas=6)) == 6
