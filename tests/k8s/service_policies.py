"""Disruption budgets, services and routes: what they select and lead to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from grpc_health.v1 import health_pb2

from deploy.app import DRAIN_TIMEOUT_S
from deploy.http.routes import COMPLETIONS, COUNT_TOKENS, HEALTH, MODELS, PAGE, STATUS
from protos.outrider.v1 import generation_pb2
from tests.k8s.manifests import Manifest, Objects, cluster, named, of_kind, pods, ray_pods, ray_service, selects

SERVICES = tuple(
    service.full_name for file in (generation_pb2, health_pb2) for service in file.DESCRIPTOR.services_by_name.values()
)
"""The public services of gRPC."""
OPTIONAL_ROLES = ("draft",)
"""Whose pods may all go at once: streams go on without."""
ENVOY_TIMEOUT = "15s"
"""Envoy's default limit of a response, the longest stream included."""
INSIDE = ("/-/healthz", "/-/routes", "/metrics", "/api/serve/applications/", "/ray.serve.RayServeAPIService/Healthz")
"""Paths of Serve, Ray and Prometheus."""
ZONE = "topology.kubernetes.io/zone"
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


def pods_are_near_each_other(objects: Objects) -> Iterator[str]:
    """In one zone, if it has room: of each round two messages go from one pod to another."""
    everyone = ray_pods(objects)[1:]
    for pod in everyone:
        wished = pod.spec.get("affinity", {}).get("podAffinity", {})
        terms = [term["podAffinityTerm"] for term in wished.get("preferredDuringSchedulingIgnoredDuringExecution", ())]
        near = [term for term in terms if term["topologyKey"] == ZONE]
        if not any(all(selects(term["labelSelector"], other.labels) for other in everyone) for term in near):
            yield f"{pod.where}: must prefer the zone of the others"


def drafts_give_way(objects: Objects) -> Iterator[str]:
    """Where there are priority classes: streams go on without a draft, and not without the others."""
    classes = {item["metadata"]["name"]: item for item in of_kind(objects, "PriorityClass")}
    named_by = {pod.role: pod.spec.get("priorityClassName") for pod in ray_pods(objects)}
    for role, name in named_by.items():
        if name not in ({None} if not classes else set(classes)):
            yield f"{role}: there is no PriorityClass {name}"
            return
    if not classes:
        return
    values = {role: classes[str(name)]["value"] for role, name in named_by.items()}
    if not values["head"] >= max(values["orchestrator"], values["target"]) > values["draft"]:
        yield f"priorities must fall from head to orchestrator and target, then draft, got {values}"
    if classes[str(named_by["draft"])].get("preemptionPolicy") != "Never":
        yield "draft: its priority must push nobody out"


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
    """Each path to the port that speaks its protocol; those of HTTP to a pool of such ports where there is one."""
    offered = ray_service(objects)["serveService"]
    pools = [pool["metadata"]["name"] for pool in of_kind(objects, "InferencePool")]
    ports = {port["name"]: port["port"] for port in offered["spec"]["ports"]}
    for where, rule in _rules(objects):
        is_grpc = any(_is_routed(f"/{service}/Method", rule) for service in SERVICES)
        wanted = (offered["metadata"]["name"], ports.get("serve-grpc" if is_grpc else "serve"))
        for backend in rule["backendRefs"]:
            if backend.get("kind") == "InferencePool" and backend["name"] in pools and "port" not in backend:
                if is_grpc:
                    yield f"{where}: {backend} speaks HTTP alone"
            elif (backend["name"], backend.get("port")) != wanted:
                yield f"{where}: {backend} is not the service's port {wanted[1]}"


def routes_open_the_public_apis(objects: Objects) -> Iterator[str]:
    """All of gRPC's and HTTP's, once each; what is for people inside, or Serve's and Ray's own, stays inside."""
    rules = list(_rules(objects))
    public = {f"/{service}/Method" for service in SERVICES} | {*COMPLETIONS, COUNT_TOKENS, MODELS, STATUS}
    for path in sorted(public) if rules else ():
        if sum(_is_routed(path, rule) for _, rule in rules) != 1:
            yield f"HTTPRoute: one rule must lead to {path}"
    for where, rule in rules:
        for path in (PAGE, HEALTH, *INSIDE):
            if _is_routed(path, rule):
                yield f"{where}: opens {path}"


def routes_hang_on_tls_listeners(objects: Objects) -> Iterator[str]:
    listeners = {
        (gateway["metadata"]["name"], listener["name"]): listener
        for gateway in of_kind(objects, "Gateway")
        for listener in gateway["spec"]["listeners"]
    }
    for route in of_kind(objects, "HTTPRoute"):
        for parent in route["spec"]["parentRefs"]:
            listener = listeners.get((parent["name"], parent.get("sectionName")))
            if listener is None:
                yield f"HTTPRoute {route['metadata']['name']}: there is no listener {parent}"
            elif listener.get("hostname") not in route["spec"].get("hostnames", ()):
                yield f"HTTPRoute {route['metadata']['name']}: hostnames are not those of its listener"
    for listener in listeners.values():
        if listener["protocol"] != "HTTPS" or not listener.get("tls", {}).get("certificateRefs"):
            yield f"Gateway: listener {listener['name']} must end TLS with a certificate"
        if [kind["kind"] for kind in listener.get("allowedRoutes", {}).get("kinds", ())] != ["HTTPRoute"]:
            yield f"Gateway: listener {listener['name']} must take HTTPRoutes alone: of two kinds it drops one"


def gateways_let_streams_last(objects: Objects) -> Iterator[str]:
    """No end, or one that is not before that of the longest stream."""
    for where, rule in _rules(objects):
        for field, otherwise in (("request", ENVOY_TIMEOUT), ("backendRequest", "0s")):
            limit = rule.get("timeouts", {}).get(field, otherwise)
            if 0 < _seconds(limit) < DRAIN_TIMEOUT_S:
                yield f"{where}: timeouts.{field} ends streams after {limit}"


def _rules(objects: Objects) -> Iterator[tuple[str, Manifest]]:
    for route in of_kind(objects, "HTTPRoute"):
        for number, rule in enumerate(route["spec"]["rules"]):
            yield f"HTTPRoute {route['metadata']['name']}, rule {number}", rule


def _is_routed(path: str, rule: Manifest) -> bool:
    """The Gateway API's rule: a prefix ends where an element of the path does, and a rule without matches has every
    path."""
    matches = rule.get("matches", [{}])
    return any(_fits(path, match.get("path", {"type": "PathPrefix", "value": "/"})) for match in matches)


def _fits(path: str, match: Manifest) -> bool:
    if match.get("type", "PathPrefix") == "Exact":
        return path == str(match["value"])
    assert match.get("type", "PathPrefix") == "PathPrefix", "the checks know no other"
    return f"{path}/".startswith(f"{match['value'].rstrip('/')}/")


def _seconds(duration: str) -> float:
    """Seconds of a duration of the Gateway API, such as 1h30m."""
    return sum(int(count) * UNITS_S[unit] for count, unit in re.findall(r"(\d+)(h|ms|m|s)", duration))


CHECKS = (
    budgets_select_pods,
    budgets_are_counts_of_pods_to_keep,
    budgets_leave_room,
    several_pods_have_a_budget,
    pods_are_spread,
    pods_are_near_each_other,
    drafts_give_way,
    services_lead_to_pods,
    gcs_finds_its_redis,
    routes_lead_to_the_service,
    routes_open_the_public_apis,
    routes_hang_on_tls_listeners,
    gateways_let_streams_last,
)
