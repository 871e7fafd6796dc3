"""A pod that is to stop leaves as soon as it is drained: Ray under the commands of KubeRay and of our manifest."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from bench.harness.nodes import REPOSITORY, free_port, wait_until
from deploy.launch import OBJECT_STORE_BYTES
from tests.k8s.pod_policies import AGENT_PORT

pytestmark = [pytest.mark.ray, pytest.mark.ci]

POD = "pod"
"""Resource of the node that stands for the pod's."""
LEAVES_S = 60.0
STAYS_S = 5.0


@dataclass(frozen=True, slots=True)
class Pod:
    """A container's process, and the hook that the kubelet runs before it stops it."""

    process: subprocess.Popen[bytes]
    hook: list[str]


def test_the_container_ends_when_its_node_is_drained_and_not_while_a_replica_works_there(tmp_path: Path) -> None:
    with pod(tmp_path) as drained:
        replica = Replica.remote()
        ray.get(replica.works.remote())
        with started(drained.hook, tmp_path) as hook:
            with pytest.raises(subprocess.TimeoutExpired):
                hook.wait(STAYS_S)
            assert (tmp_path / "is-to-stop").exists()
            ray.kill(replica)
            assert hook.wait(LEAVES_S) == 0
        drained.process.send_signal(signal.SIGTERM)  # as the kubelet does after the hook
        drained.process.wait(LEAVES_S)


@ray.remote(num_cpus=0, resources={POD: 1})
class Replica:
    def works(self) -> bool:
        return True


@contextmanager
def pod(directory: Path) -> Iterator[Pod]:
    """A node beside a head, started as KubeRay 1.7 starts a worker's container."""
    head = {"num_cpus": 0, "include_dashboard": False, "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": OBJECT_STORE_BYTES})
    agent_port = free_port()
    start = (
        f"ulimit -n $(ulimit -n); ray start --address={cluster.address} --block --num-cpus=1"
        f" --dashboard-agent-listen-port={agent_port} --object-store-memory={OBJECT_STORE_BYTES}"
        f" --resources='{{\"{POD}\": 1}}'"
    )
    try:
        with started(["/bin/bash", "-c", "--", start], directory) as process:
            ray.init(address=cluster.address, log_to_driver=False)
            wait_until(lambda: is_open(agent_port) and POD in ray.cluster_resources(), LEAVES_S)
            yield Pod(process, hook(cluster.address, agent_port))
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def started(command: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with those that it starts, none of which outlives it here."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OUTRIDER_STOP_FILE": str(directory / "is-to-stop")}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def hook(address: str, agent_port: int) -> list[str]:
    """The manifest's, with this node and its port: in a pod they are those that Ray finds by itself."""
    service = yaml.safe_load((REPOSITORY / "k8s" / "base" / "ray-service.yaml").read_text())
    (worker, *_) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    command: list[str] = worker["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    node_id = next(node["NodeID"] for node in ray.nodes() if POD in node["Resources"])
    here = command[-1].replace("drain-node", f"drain-node --address {address} --node-id {node_id}")
    return [*command[:-1], here.replace(str(AGENT_PORT), str(agent_port))]


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), 1.0).close()
    except OSError:
        return False
    return True
