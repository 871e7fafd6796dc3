"""Rendered objects as the policies look at them: pods, containers, labels, and what RayService says in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from core.config import ServiceConfig
from deploy.engines import bundles
from deploy.settings import parse_config

Manifest = dict[str, Any]
Objects = Sequence[Manifest]
ROLE = "outrider.dev/role"
GPU = "nvidia.com/gpu"
SLICE = "nvidia.com/mig-"
"""Names of the parts of a GPU begin with it."""
PART_OF = {"app.kubernetes.io/part-of": "outrider"}
WORKER_ROLES = ("orchestrator", "draft", "target")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template, with what is said around it."""

    where: str
    template: Manifest
    is_job: bool = False
    group: Manifest | None = None
    """The Ray group that it belongs to, head included."""

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def role(self) -> str:
        return self.labels.get(ROLE, "")

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def ray(self) -> Manifest:
        """KubeRay takes the first container for Ray's."""
        container: Manifest = self.spec["containers"][0]
        return container

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.ray.get("ports", ())}


def of_kind(objects: Objects, kind: str) -> list[Manifest]:
    return [item for item in objects if item["kind"] == kind]


def named(objects: Objects, kind: str, name: str) -> Manifest:
    """The one object of this kind and name. Raises: LookupError."""
    for item in of_kind(objects, kind):
        if item["metadata"]["name"] == name:
            return item
    raise LookupError(f"there is no {kind} {name}")


def ray_service(objects: Objects) -> Manifest:
    """The spec of the RayService."""
    spec: Manifest = of_kind(objects, "RayService")[0]["spec"]
    return spec


def cluster(objects: Objects) -> Manifest:
    """The spec of the RayCluster in it."""
    spec: Manifest = ray_service(objects)["rayClusterConfig"]
    return spec


def ray_pods(objects: Objects) -> list[Pod]:
    """The head, then a pod of each worker group."""
    spec = cluster(objects)
    groups = [("head", spec["headGroupSpec"]), *((group["groupName"], group) for group in spec["workerGroupSpecs"])]
    return [Pod(f"RayService group {name}", group["template"], group=group) for name, group in groups]


def worker_pods(objects: Objects) -> list[Pod]:
    return ray_pods(objects)[1:]


def pods(objects: Objects) -> list[Pod]:
    """All pods that these objects lead to."""
    plain = [
        Pod(f"{item['kind']} {item['metadata']['name']}", item["spec"]["template"], is_job=item["kind"] == "Job")
        for item in objects
        if item["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job")
    ]
    return ray_pods(objects) + plain


def containers(objects: Objects) -> Iterator[tuple[str, Manifest]]:
    """Every container, with where it is; the autoscaler, which KubeRay adds to the head, as its options make it."""
    for pod in pods(objects):
        for container in pod.containers:
            yield f"{pod.where}, container {container['name']}", container
    yield "autoscalerOptions", cluster(objects).get("autoscalerOptions", {})


def serve_config(objects: Objects) -> Manifest:
    """serveConfigV2, parsed."""
    config: Manifest = yaml.safe_load(ray_service(objects)["serveConfigV2"])
    return config


def settings(objects: Objects) -> ServiceConfig:
    """The application's settings, as the code reads them. Raises: ConfigError."""
    return parse_config(serve_config(objects)["applications"][0]["args"])


def deployments(config: ServiceConfig) -> dict[str, Any]:
    """The settings of each deployment, by its role."""
    named_configs = (("orchestrator", config.orchestrator), ("target", config.target), ("draft", config.draft))
    return {role: settings for role, settings in named_configs if settings is not None}


def most_replicas(deployment: Any) -> int:
    count: int = deployment.autoscaling.max_replicas if deployment.autoscaling else deployment.num_replicas
    return count


def least_replicas(deployment: Any) -> int:
    count: int = deployment.autoscaling.min_replicas if deployment.autoscaling else deployment.num_replicas
    return count


def pods_of_replica(deployment: Any) -> int:
    """One for each stage of its engine."""
    return deployment.engine.pipeline_parallel if hasattr(deployment, "engine") else 1


def replica_resources(deployment: Any) -> Counter[str]:
    """Resources that Ray reserves for a replica in one pod, by name: for itself, and all ranks of a stage."""
    if not hasattr(deployment, "engine"):
        return Counter(CPU=deployment.num_cpus)
    total: Counter[str] = Counter()
    for bundle in bundles(deployment)[:2]:
        total.update(bundle)  # type: ignore[arg-type]  # shares count, too
    return total


def ray_resources(pod: Pod) -> dict[str, float]:
    """Resources of a pod that KubeRay reports to Ray: its own settings, or the limits of its container."""
    limits = pod.ray["resources"]["limits"]
    said = (pod.group or {}).get("rayStartParams", {}).get("num-gpus", limits.get(GPU, 0))
    return {"CPU": cpus(limits["cpu"]), "GPU": float(said)}


def num_devices(pod: Pod) -> float:
    """GPUs, or slices of one, that the node gives to the container."""
    limits = pod.ray["resources"]["limits"]
    return sum(float(amount) for name, amount in limits.items() if name == GPU or name.startswith(SLICE))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes selects these labels; an empty one selects everything."""
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _expression_holds(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def _expression_holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case unknown:
            raise ValueError(f"there is no operator {unknown}")


def cpus(quantity: str | float) -> float:
    """Kubernetes' quantity of CPUs as a number."""
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def gibibytes(quantity: str) -> float:
    """Kubernetes' quantity of memory as a number of GiB."""
    unit = {"Mi": 2**-10, "Gi": 1.0, "Ti": 2**10}[quantity[-2:]]
    return float(quantity[:-2]) * unit
