"""A Ray cluster of several nodes on this machine, deployed to as on Kubernetes: a Serve config over REST."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.context import _set_global_client

from deploy.app import APPLICATION
from deploy.launch import OBJECT_STORE_BYTES, prepare_environment

ROLE = "outrider.dev/role"
ROLES = ("orchestrator", "draft", "target")
REPOSITORY = Path(__file__).parents[2]
MANIFEST = REPOSITORY / "k8s" / "overlays" / "cpu-demo" / "serve.yaml"
IMAGE_ROOT = "/opt/outrider"
HEAD_ONLY = "HeadOnly"
START_TIMEOUT_S = 300.0
POLL_S = 0.2


def manifest() -> dict[str, Any]:
    """serveConfigV2 of k8s/overlays/cpu-demo, with the models' paths on this machine."""
    config: dict[str, Any] = yaml.safe_load(MANIFEST.read_text().replace(IMAGE_ROOT, str(REPOSITORY)))
    return config


@dataclass
class Nodes:
    """The head node, and worker nodes by role."""

    cluster: Cluster
    dashboard: str
    grpc_port: int
    http_port: int
    placed: Mapping[str, str]
    """Ray's options for the address of a node."""
    of_role: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"localhost:{self.grpc_port}"

    def add(self, role: str, **resources: Any) -> Any:
        """Add a node like those of the worker group `role`."""
        options: dict[str, Any] = {"num_cpus": 2, **self.placed, **resources}
        node = self.cluster.add_node(labels={ROLE: role}, include_dashboard=False, **options)
        self.of_role.setdefault(role, []).append(node)
        return node

    def kill(self, role: str) -> None:
        """Kill (SIGKILL) all processes of one node of `role` that runs a replica."""
        details = ServeSubmissionClient(self.dashboard).get_serve_details()
        replicas = details["applications"][APPLICATION]["deployments"][role]["replicas"]
        busy = {replica["node_id"] for replica in replicas if replica["state"] == "RUNNING"}
        victim = next(node for node in self.of_role[role] if node.node_id in busy)
        self.of_role[role].remove(victim)
        self.cluster.remove_node(victim, allow_graceful=False)

    def deploy(self, settings: Mapping[str, Any], proxies: str = HEAD_ONLY) -> None:
        """Deploy or update the application with these settings. Return when it runs."""
        ServeSubmissionClient(self.dashboard).deploy_applications(self.config(settings, proxies))
        wait_until(self.is_running, START_TIMEOUT_S)

    def config(self, settings: Mapping[str, Any], proxies: str) -> dict[str, Any]:
        """The manifest's config with other ports. Nodes that share an address share its ports, so they need one
        proxy."""
        carried = manifest()
        application = carried["applications"][0]
        return {
            **carried,
            "proxy_location": proxies,
            "http_options": {"host": "127.0.0.1", "port": self.http_port},
            "grpc_options": {**carried["grpc_options"], "port": self.grpc_port},
            "applications": [
                {**application, "name": APPLICATION, "route_prefix": f"/{APPLICATION}", "args": dict(settings)}
            ],
        }

    def is_running(self) -> bool:
        application = serve.status().applications.get(APPLICATION)
        if application is not None and application.status == "DEPLOY_FAILED":
            raise RuntimeError(application.message)
        return application is not None and application.status == "RUNNING"


@contextmanager
def nodes(roles: Sequence[str] = ROLES, ip: str | None = None, **head: Any) -> Iterator[Nodes]:
    """Start a head, and one node of each role, with the address `ip` or the machine's own.

    The head runs no models unless `head` gives it CPUs.
    """
    prepare_environment()
    placed = {} if ip is None else {"node_ip_address": ip}
    dashboard_port = free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": True,
            **placed,
            "dashboard_port": dashboard_port,
            "dashboard_agent_listen_port": free_port(),
            "object_store_memory": OBJECT_STORE_BYTES,
            **head,
        },
        shutdown_at_exit=True,
    )
    up = Nodes(cluster, f"http://127.0.0.1:{dashboard_port}", free_port(), free_port(), placed)
    try:
        for role in roles:
            up.add(role)
        ray.init(address=cluster.address, log_to_driver=False, namespace="outrider", _node_ip_address=ip)
        _set_global_client(None)  # otherwise Serve would ask the controller of an earlier cluster of this process
        yield up
    finally:
        ray.shutdown()
        cluster.shutdown()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return as soon as `condition` holds. Raises: TimeoutError."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end_s:
            raise TimeoutError(f"not within {timeout_s:g} s; the cluster: {serve.status().applications}")
        time.sleep(POLL_S)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Like `wait_until`, without blocking other tasks."""
    await asyncio.to_thread(wait_until, condition, timeout_s)


def num_running(role: str) -> int:
    """Number of replicas of `role` that serve."""
    count: int = serve.status().applications[APPLICATION].deployments[role].replica_states.get("RUNNING", 0)
    return count


def only_running(counts: Mapping[str, int]) -> bool:
    """Whether each role has exactly this number of serving replicas, and none that starts or stops."""
    deployments = serve.status().applications[APPLICATION].deployments
    states = {role: {name: n for name, n in deployments[role].replica_states.items() if n} for role in counts}
    return states == {role: {"RUNNING": count} if count else {} for role, count in counts.items()}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
