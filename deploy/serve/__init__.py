"""The control plane: Ray Serve deployments, leases, routing and autoscaling."""

from deploy.serve.adapters import AdapterList
from deploy.serve.autoscaling import most_replicas, replicas
from deploy.serve.deployments import (
    HEALTH_TIMEOUT_S,
    DraftWorker,
    EngineWorker,
    LeaseGrant,
    Refusal,
    TargetWorker,
)
from deploy.serve.devices import check_devices
from deploy.serve.draining import replicas_now
from deploy.serve.leases import ServeLeases
from deploy.serve.routing import draft_router, target_router

__all__ = [
    "HEALTH_TIMEOUT_S",
    "AdapterList",
    "DraftWorker",
    "EngineWorker",
    "LeaseGrant",
    "Refusal",
    "ServeLeases",
    "TargetWorker",
    "check_devices",
    "draft_router",
    "most_replicas",
    "replicas",
    "replicas_now",
    "target_router",
]
