"""Alerts and dashboard: they name metrics that are recorded, and alerts have a place in the runbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray.autoscaler._private.constants import AUTOSCALER_METRIC_PORT
from ray.autoscaler._private.prom_metrics import AutoscalerPrometheusMetrics

from deploy.metrics.instruments import CATALOGUE, MODEL_LABEL, PREFIX
from tests.k8s.manifests import Manifest, Objects, of_kind, ray_pods, selects

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXPORTED_PREFIX = f"ray_{PREFIX}"
SERIES = re.compile(rf"\b({EXPORTED_PREFIX}\w+)(?:\{{([^}}]*)\}})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
RELEASE = "kube-prometheus-stack"
"""The Helm release of that chart in its documentation; its Prometheus selects by this label."""
CHOICES = {"namespace": "namespace", "ray_cluster": "cluster", MODEL_LABEL: "model"}
"""Labels, and the dashboard's variables for them."""
TARGET_LABELS = {"namespace", "ray_cluster", "role", "endpoint", "job"}
"""Labels of a PodMonitor's targets: the Prometheus operator's, and those of our relabelings."""
VOLUME_METRICS = {"kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"}
FOREIGN = re.compile(r"\b(up|autoscaler_\w+|kubelet_\w+)\b")
SEVERITIES = ("critical", "warning", "info")


def prometheus_finds_the_pods(objects: Objects) -> Iterator[str]:
    for monitor in of_kind(objects, "PodMonitor"):
        ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        for pod in ray_pods(objects):
            if not selects(monitor["spec"]["selector"], pod.labels):
                yield f"{pod.where}: no PodMonitor selects it"
            for port in {"metrics", *(["as-metrics"] if pod.role == "head" else [])} - ports:
                yield f"{pod.where}: no PodMonitor asks its port {port}"
        for port in ports - {port for pod in ray_pods(objects) for port in pod.ports}:
            yield f"PodMonitor {monitor['metadata']['name']}: no pod has a port {port}"
        for pod in ray_pods(objects):
            if pod.role == "head" and pod.ports.get("as-metrics") != AUTOSCALER_METRIC_PORT:
                yield f"{pod.where}: as-metrics must be {AUTOSCALER_METRIC_PORT}, the autoscaler's"


def prometheus_looks_at_monitors_and_rules(objects: Objects) -> Iterator[str]:
    for kind in ("PodMonitor", "PrometheusRule"):
        for item in of_kind(objects, kind):
            if item["metadata"].get("labels", {}).get("release") != RELEASE:
                yield f"{kind} {item['metadata']['name']}: the label release must be {RELEASE}"


def alerts_name_metrics_that_exist(objects: Objects) -> Iterator[str]:
    for rule in rules(objects):
        yield from wrong_names(f"alert {rule['alert']}", rule["expr"])


def alerts_can_be_read(objects: Objects) -> Iterator[str]:
    """Severity, summary, and a section of the runbook; its labels are those that the expression keeps."""
    runbook = (DOCS / "runbook.md").read_text()
    names = [rule["alert"] for rule in rules(objects)]
    for rule in rules(objects):
        if rule["labels"].get("severity") not in SEVERITIES:
            yield f"alert {rule['alert']}: severity must be one of {', '.join(SEVERITIES)}"
        if f"\n### {rule['alert']}\n" not in runbook:
            yield f"alert {rule['alert']}: docs/runbook.md has no section of this name"
        if rule["annotations"].get("runbook_url", "").rpartition("/")[2] != f"runbook.md#{rule['alert'].lower()}":
            yield f"alert {rule['alert']}: runbook_url must lead to its section of the runbook"
        if not ({"namespace"} <= _kept(rule["expr"])):
            yield f"alert {rule['alert']}: must be by namespace, since there may be several installs"
        if names.count(rule["alert"]) > 1:
            yield f"alert {rule['alert']}: is there twice"
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            if label not in _kept(rule["expr"]):
                yield f"alert {rule['alert']}: its summary shows the label {label}, which the expression drops"


def _kept(expression: str) -> set[str]:
    return {label.strip() for group in GROUPING.findall(expression) for label in group.split(",")}


def dashboards_name_metrics_that_exist(objects: Objects) -> Iterator[str]:
    for title, expression in _panels(objects):
        yield from wrong_names(f"panel {title!r}", expression)


def dashboards_show_the_chosen_models(objects: Objects) -> Iterator[str]:
    """Engines' panels, too: their metrics have the name of the model that they serve."""
    for title, expression in _panels(objects):
        for name, matchers in SERIES.findall(expression):
            for label, variable in CHOICES.items():
                if f'{label}=~"${variable}"' not in matchers:
                    yield f"panel {title!r}: shows {name} whichever {variable} is chosen"


def dashboards_are_found(objects: Objects) -> Iterator[str]:
    """Grafana's sidecar looks for a label; monitoring without a dashboard is an accident."""
    if of_kind(objects, "PodMonitor") and not list(_panels(objects)):
        yield "there is no dashboard with the label grafana_dashboard"


def _panels(objects: Objects) -> Iterator[tuple[str, str]]:
    for config in of_kind(objects, "ConfigMap"):
        if config["metadata"].get("labels", {}).get("grafana_dashboard") != "1":
            continue
        for text in config["data"].values():
            for panel in json.loads(text)["panels"]:
                yield from ((panel["title"], target["expr"]) for target in panel["targets"])


def rules(objects: Objects) -> list[Manifest]:
    groups = [group for item in of_kind(objects, "PrometheusRule") for group in item["spec"]["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def wrong_names(where: str, expression: str) -> Iterator[str]:
    """Names and labels in `expression` that nothing records, or docs/metrics.md does not have."""
    known, documented = _series(), (DOCS / "metrics.md").read_text()
    used, foreign = SERIES.findall(expression), set(FOREIGN.findall(expression))
    for name in sorted(foreign - _foreign()):
        yield f"{where}: nobody records {name}"
    if not used and not foreign:
        yield f"{where}: asks for no metric of ours"
    for name, matchers in used:
        if name not in known:
            yield f"{where}: nothing records {name}"
            continue
        metric = known[name]
        if f"`{metric.name}`" not in documented:
            yield f"{where}: docs/metrics.md does not have {metric.name}"
        allowed = {MODEL_LABEL, metric.label, "le", "application", "deployment", "replica", *TARGET_LABELS}
        unknown = set(LABEL.findall(matchers)) - allowed
        if unknown:
            yield f"{where}: {name} has no label {', '.join(sorted(unknown))}"


def _series() -> dict[str, Any]:
    """Series that Prometheus finds, by name."""
    found = {}
    for metric in CATALOGUE:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found.update({f"{EXPORTED_PREFIX}{metric.name}{suffix}": metric for suffix in suffixes})
    return found


def _foreign() -> set[str]:
    """Prometheus' own, the kubelet's of volumes, and those of Ray's autoscaler."""
    metrics = AutoscalerPrometheusMetrics().registry.collect()
    return {"up", *VOLUME_METRICS, *(metric.name for metric in metrics)}


CHECKS = (
    prometheus_finds_the_pods,
    prometheus_looks_at_monitors_and_rules,
    alerts_name_metrics_that_exist,
    alerts_can_be_read,
    dashboards_name_metrics_that_exist,
    dashboards_show_the_chosen_models,
    dashboards_are_found,
)
