"""The control plane: Ray Serve deployments, leases, routing and autoscaling."""

from deploy.serve.adapters import AdapterList
from deploy.serve.autoscaling import most_replicas, replicas
from deploy.serve.deployments import (
    HEALTH_TIMEOUT_S,
    REPLICA_CPUS,
    DraftWorker,
    EngineWorker,
    LeaseGrant,
    Refusal,
    TargetWorker,
    bundles,
)
from deploy.serve.devices import check_devices
from deploy.serve.draining import replicas_now
from deploy.serve.leases import ServeLeases
from deploy.serve.routing import draft_router, target_router

__all__ = [
    "HEALTH_TIMEOUT_S",
    "REPLICA_CPUS",
    "AdapterList",
    "DraftWorker",
    "EngineWorker",
    "LeaseGrant",
    "Refusal",
    "ServeLeases",
    "TargetWorker",
    "bundles",
    "check_devices",
    "draft_router",
    "most_replicas",
    "replicas",
    "replicas_now",
    "target_router",
]
