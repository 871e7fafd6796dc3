"""Alerts and dashboard: they name metrics that are recorded, and alerts have a place in the runbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.metrics.instruments import CATALOGUE, MODEL_LABEL, PREFIX
from tests.k8s.manifests import Manifest, Objects, of_kind, ray_pods, selects

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXPORTED_PREFIX = f"ray_{PREFIX}"
SERIES = re.compile(r"(\bray_\w+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
RELEASE = "kube-prometheus-stack"
"""What its documentation calls the Helm release of that chart; its Prometheus looks at what is labelled with it."""
SEVERITIES = ("critical", "warning", "info")


def prometheus_finds_the_pods(objects: Objects) -> Iterator[str]:
    for monitor in of_kind(objects, "PodMonitor"):
        for pod in ray_pods(objects):
            if not selects(monitor["spec"]["selector"], pod.labels):
                yield f"{pod.where}: no PodMonitor selects it"
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                if endpoint["port"] not in pod.ports:
                    yield f"{pod.where}: has no port {endpoint['port']}"


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
        if f"`{rule['alert']}`" not in runbook:
            yield f"alert {rule['alert']}: docs/runbook.md does not say what it means"
        if names.count(rule["alert"]) > 1:
            yield f"alert {rule['alert']}: is there twice"
        kept = {label.strip() for group in GROUPING.findall(rule["expr"]) for label in group.split(",")}
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            if label not in kept:
                yield f"alert {rule['alert']}: its summary shows the label {label}, which the expression drops"


def dashboards_name_metrics_that_exist(objects: Objects) -> Iterator[str]:
    for title, expression in _panels(objects):
        yield from wrong_names(f"panel {title!r}", expression)


def dashboards_show_the_chosen_models(objects: Objects) -> Iterator[str]:
    """Engines' panels, too: their metrics have the name of the model that they serve."""
    for title, expression in _panels(objects):
        for name, matchers in SERIES.findall(expression):
            if f'{MODEL_LABEL}=~"$model"' not in matchers:
                yield f"panel {title!r}: shows {name} of all models, whichever is chosen"


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
    used = SERIES.findall(expression)
    if not used:
        yield f"{where}: asks for no metric of ours"
    for name, matchers in used:
        if name not in known:
            yield f"{where}: nothing records {name}"
            continue
        metric = known[name]
        if f"`{metric.name}`" not in documented:
            yield f"{where}: docs/metrics.md does not have {metric.name}"
        allowed = {MODEL_LABEL, metric.label, "le", "application", "deployment", "replica"}
        unknown = set(LABEL.findall(matchers)) - allowed
        if unknown:
            yield f"{where}: {name} has no label {', '.join(sorted(unknown))}"


def _series() -> dict[str, Any]:
    """What Prometheus finds, by its name there."""
    found = {}
    for metric in CATALOGUE:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found.update({f"{EXPORTED_PREFIX}{metric.name}{suffix}": metric for suffix in suffixes})
    return found


CHECKS = (
    prometheus_finds_the_pods,
    prometheus_looks_at_monitors_and_rules,
    alerts_name_metrics_that_exist,
    alerts_can_be_read,
    dashboards_name_metrics_that_exist,
    dashboards_show_the_chosen_models,
    dashboards_are_found,
)
