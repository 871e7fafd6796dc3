"""An inference gateway's pool and picker: they look where orchestrators say how they are."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from deploy.http.routes import METRICS
from deploy.metrics.load import PREFIX
from tests.k8s.manifests import Objects, named, of_kind, pods, ray_service, selects, worker_pods
from tests.k8s.network_policies import CLIENT_NAMESPACE, SOMEWHERE, egress, ingress

PICKER_PORT = 9002
ENGINE_LABEL = "llm-d.ai/engine-type"
"""By which pickers know whose names of metrics a pod has."""


def pools_lead_to_orchestrators(objects: Objects) -> Iterator[str]:
    """A proxy beside an engine has no orchestrator of its own, and would answer for one elsewhere."""
    ports = {port["name"]: port["port"] for port in ray_service(objects)["serveService"]["spec"]["ports"]}
    for pool in of_kind(objects, "InferencePool"):
        roles = [pod.role for pod in pods(objects) if selects(pool["spec"]["selector"], pod.labels)]
        if roles != ["orchestrator"]:
            yield f"InferencePool: must select the orchestrators' pods alone, selects those of {roles}"
        if [port["number"] for port in pool["spec"]["targetPorts"]] != [ports["serve"]]:
            yield f"InferencePool: targetPorts must be {ports['serve']}"
        reference = pool["spec"]["endpointPickerRef"]
        try:
            picker = named(objects, "Service", reference["name"])
        except LookupError as error:
            yield f"InferencePool: {error}"
            continue
        if reference["port"]["number"] not in [port["port"] for port in picker["spec"]["ports"]]:
            yield f"InferencePool: Service {reference['name']} has no port {reference['port']['number']}"


def pickers_read_what_is_served(objects: Objects) -> Iterator[str]:
    """The path and the names that deploy/metrics/load.py has, over a network that lets them."""
    for picker in (pod for pod in pods(objects) if pod.role == "picker"):
        plugins = yaml.safe_load(named(objects, "ConfigMap", "outrider-epp")["data"]["plugins.yaml"])["plugins"]
        (source,) = (plugin for plugin in plugins if plugin["type"] == "metrics-data-source")
        if source["parameters"] != {"scheme": "http", "path": METRICS}:
            yield f"picker: metrics-data-source must ask http {METRICS}"
        for pod in (pod for pod in worker_pods(objects) if pod.role == "orchestrator"):
            if f"{pod.labels.get(ENGINE_LABEL)}:" != PREFIX:
                yield f"{pod.where}: the label {ENGINE_LABEL} must be {PREFIX.rstrip(':')}"
            port = pod.ports["serve"]
            if not egress(objects, picker.labels, pod.labels, None, port):
                yield f"picker: is not let out to {pod.where}"
            if not ingress(objects, pod.labels, picker.labels, None, port):
                yield f"{pod.where}: does not let in the picker"
        if not egress(objects, picker.labels, SOMEWHERE, None, 443):
            yield "picker: cannot reach the API server"
        if not ingress(objects, picker.labels, {}, CLIENT_NAMESPACE, PICKER_PORT):
            yield "picker: gateways cannot reach it"


CHECKS = (pools_lead_to_orchestrators, pickers_read_what_is_served)
