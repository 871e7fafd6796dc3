"""Disruption budgets, services and routes: what they select and lead to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from deploy.app import DRAIN_TIMEOUT_S
from tests.k8s.manifests import Objects, cluster, named, of_kind, pods, ray_pods, ray_service, selects

PROTO = Path(__file__).resolve().parents[2] / "protos" / "outrider" / "v1" / "generation.proto"
OPTIONAL_ROLES = ("draft",)
"""Whose pods may all go at once: streams go on without."""
ENVOY_TIMEOUT = "15s"
"""What Envoy gives a response, the longest stream included, where nothing else is said."""
UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def budgets_select_pods(objects: Objects) -> Iterator[str]:
    for budget in of_kind(objects, "PodDisruptionBudget"):
        if not any(selects(budget["spec"]["selector"], pod.labels) for pod in pods(objects)):
            yield f"PodDisruptionBudget {budget['metadata']['name']} selects no pod"


def budgets_are_counts_of_pods_to_keep(objects: Objects) -> Iterator[str]:
    """All that Kubernetes can work with when a controller has no scale subresource, as RayCluster has none."""
    for budget in of_kind(objects, "PodDisruptionBudget"):
        spec = budget["spec"]
        if not isinstance(spec.get("minAvailable"), int) or "maxUnavailable" in spec:
            yield f"PodDisruptionBudget {budget['metadata']['name']} must have a whole number as minAvailable"


def budgets_leave_room(objects: Objects) -> Iterator[str]:
    """Or nodes could never be emptied; but for the head without a Redis, which is meant to stay."""
    for budget in of_kind(objects, "PodDisruptionBudget"):
        for pod in ray_pods(objects):
            if not selects(budget["spec"]["selector"], pod.labels):
                continue
            count = (pod.group or {}).get("minReplicas", 1)
            is_meant = pod.role == "head" and "gcsFaultToleranceOptions" not in cluster(objects)
            if budget["spec"].get("minAvailable", 0) >= count and not is_meant:
                yield f"PodDisruptionBudget {budget['metadata']['name']} never lets one of {count} pods go"


def several_pods_have_a_budget(objects: Objects) -> Iterator[str]:
    budgets = of_kind(objects, "PodDisruptionBudget")
    for pod in ray_pods(objects)[1:]:
        is_covered = any(selects(budget["spec"]["selector"], pod.labels) for budget in budgets)
        if (pod.group or {})["minReplicas"] > 1 and pod.role not in OPTIONAL_ROLES and not is_covered:
            yield f"{pod.where}: has no PodDisruptionBudget"


def pods_are_spread(objects: Objects) -> Iterator[str]:
    for pod in ray_pods(objects)[1:]:
        constraints = pod.spec.get("topologySpreadConstraints", ())
        if not any(selects(constraint["labelSelector"], pod.labels) for constraint in constraints):
            yield f"{pod.where}: nothing spreads its pods over nodes"


def services_lead_to_pods(objects: Objects) -> Iterator[str]:
    for service in of_kind(objects, "Service"):
        name = service["metadata"]["name"]
        fitting = [pod for pod in pods(objects) if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        if not fitting:
            yield f"Service {name} selects no pod"
        for pod in fitting:
            for port in service["spec"]["ports"]:
                if port["targetPort"] not in {*pod.ports, *pod.ports.values()}:
                    yield f"Service {name}: {pod.where} has no port {port['targetPort']}"


def gcs_finds_its_redis(objects: Objects) -> Iterator[str]:
    options = cluster(objects).get("gcsFaultToleranceOptions")
    if options is None:
        return
    name, _, port = options["redisAddress"].partition(":")
    try:
        service = named(objects, "Service", name)
    except LookupError as error:
        yield f"gcsFaultToleranceOptions: {error}"
        return
    if int(port) not in [item["port"] for item in service["spec"]["ports"]]:
        yield f"gcsFaultToleranceOptions: Service {name} has no port {port}"
    secret = options.get("redisPassword", {}).get("valueFrom", {}).get("secretKeyRef")
    served = [
        variable["valueFrom"]["secretKeyRef"]
        for pod in pods(objects)
        for variable in pod.ray.get("env", ())
        if pod.role == "redis" and "valueFrom" in variable
    ]
    if served != [secret]:
        yield "gcsFaultToleranceOptions: redisPassword is not the one that Redis asks for"


def routes_lead_to_the_service(objects: Objects) -> Iterator[str]:
    offered = ray_service(objects)["serveService"]
    grpc = {port["name"]: port["port"] for port in offered["spec"]["ports"]}.get("serve-grpc")
    for route in of_kind(objects, "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                if (backend["name"], backend["port"]) != (offered["metadata"]["name"], grpc):
                    yield f"GRPCRoute {route['metadata']['name']}: {backend} is not the service's gRPC port"


def routes_name_services_of_ours(objects: Objects) -> Iterator[str]:
    """The public API and health; a rule without matches would open Serve's own API, too."""
    package = "package outrider.v1;" in PROTO.read_text() and "service GenerationService " in PROTO.read_text()
    ours = {"outrider.v1.GenerationService" if package else "", "grpc.health.v1.Health"}
    for route in of_kind(objects, "GRPCRoute"):
        for rule in route["spec"]["rules"]:
            routed = {match.get("method", {}).get("service") for match in rule.get("matches", ())}
            if routed != ours:
                yield f"GRPCRoute {route['metadata']['name']}: must route {sorted(ours)}, got {routed}"


def routes_hang_on_tls_listeners(objects: Objects) -> Iterator[str]:
    listeners = {
        (gateway["metadata"]["name"], listener["name"]): listener
        for gateway in of_kind(objects, "Gateway")
        for listener in gateway["spec"]["listeners"]
    }
    for route in of_kind(objects, "GRPCRoute"):
        for parent in route["spec"]["parentRefs"]:
            listener = listeners.get((parent["name"], parent.get("sectionName")))
            if listener is None:
                yield f"GRPCRoute {route['metadata']['name']}: there is no listener {parent}"
            elif listener.get("hostname") not in route["spec"].get("hostnames", ()):
                yield f"GRPCRoute {route['metadata']['name']}: hostnames are not those of its listener"
    for listener in listeners.values():
        if listener["protocol"] != "HTTPS" or not listener.get("tls", {}).get("certificateRefs"):
            yield f"Gateway: listener {listener['name']} must end TLS with a certificate"


def gateways_let_streams_last(objects: Objects) -> Iterator[str]:
    """No end, or one that is not before that of the longest stream."""
    for route in of_kind(objects, "GRPCRoute"):
        name = route["metadata"]["name"]
        limits = [
            policy["spec"].get("timeout", {}).get("http", {})
            for policy in of_kind(objects, "BackendTrafficPolicy")
            if any((each["kind"], each["name"]) == ("GRPCRoute", name) for each in policy["spec"]["targetRefs"])
        ]
        if len(limits) != 1:
            yield f"GRPCRoute {name}: one BackendTrafficPolicy must say how long a call may last, got {len(limits)}"
        for http in limits:
            for field, otherwise in (("requestTimeout", ENVOY_TIMEOUT), ("maxStreamDuration", "0s")):
                if 0 < _seconds(http.get(field, otherwise)) < DRAIN_TIMEOUT_S:
                    yield f"GRPCRoute {name}: {field} ends streams after {http.get(field, otherwise)}"


def _seconds(duration: str) -> float:
    """Of a duration of the Gateway API, such as 1h30m."""
    return sum(int(count) * UNITS_S[unit] for count, unit in re.findall(r"(\d+)(h|ms|m|s)", duration))


CHECKS = (
    budgets_select_pods,
    budgets_are_counts_of_pods_to_keep,
    budgets_leave_room,
    several_pods_have_a_budget,
    pods_are_spread,
    services_lead_to_pods,
    gcs_finds_its_redis,
    routes_lead_to_the_service,
    routes_name_services_of_ours,
    routes_hang_on_tls_listeners,
    gateways_let_streams_last,
)
