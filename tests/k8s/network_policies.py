"""Nobody may talk to anybody by default, and each opening leads where it is meant to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network

from core.config import LINK_PORTS
from tests.k8s.manifests import Manifest, Objects, of_kind, pods, ray_pods, ray_service, selects

OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
CLIENT_NAMESPACE = {"outrider.dev/client": "true"}
PROMETHEUS_NAMESPACE = {"outrider.dev/monitoring": "true"}
SYSTEM_NAMESPACE = {"kubernetes.io/metadata.name": "kube-system"}
SOMEWHERE = "203.0.113.1"
"""An address out in the world."""
NODE_DNS = "169.254.20.10"
"""Where NodeLocal DNSCache listens, unless it is told otherwise."""
METADATA = "169.254.169.254"
"""The metadata server of a cloud's node; GKE's Cloud DNS answers there, too."""

Peer = Mapping[str, str] | str
"""The labels of a pod, or an address."""


def nothing_is_open_by_default(objects: Objects) -> Iterator[str]:
    for policy in of_kind(objects, "NetworkPolicy"):
        spec = policy["spec"]
        if spec["podSelector"] == {} and set(spec["policyTypes"]) == {"Ingress", "Egress"} and len(spec) == 2:
            return
    yield "there is no NetworkPolicy that denies everything to every pod"


def policies_select_pods(objects: Objects) -> Iterator[str]:
    everyone = [pod.labels for pod in pods(objects)]
    for policy in of_kind(objects, "NetworkPolicy"):
        if not any(selects(policy["spec"]["podSelector"], labels) for labels in everyone):
            yield f"NetworkPolicy {policy['metadata']['name']} selects no pod"


def openings_are_narrow(objects: Objects) -> Iterator[str]:
    """Each rule names peers; whoever is not a pod of ours gets named ports only; the world gets in nowhere."""
    for policy in of_kind(objects, "NetworkPolicy"):
        for direction, peers_key in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(direction, ()):
                peers = rule.get(peers_key, [])
                is_inside = bool(peers) and all(set(peer) == {"podSelector"} and peer["podSelector"] for peer in peers)
                if not peers or not (is_inside or rule.get("ports")):
                    yield f"NetworkPolicy {policy['metadata']['name']}: a rule of {direction} opens too much"
                if direction == "ingress" and any("ipBlock" in peer for peer in peers):
                    yield f"NetworkPolicy {policy['metadata']['name']}: lets addresses in, not pods"


def openings_are_for_both_families(objects: Objects) -> Iterator[str]:
    """Openings to the world include IPv6."""
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", ()):
            blocks = {peer["ipBlock"]["cidr"] for peer in rule.get("to", ()) if "ipBlock" in peer}
            if len(blocks & {"0.0.0.0/0", "::/0"}) == 1:
                yield f"NetworkPolicy {policy['metadata']['name']}: opens IPv4 or IPv6 alone"


def ray_nodes_reach_each_other(objects: Objects) -> Iterator[str]:
    everyone = ray_pods(objects)
    for here in everyone:
        for there in everyone:
            if not ingress(objects, there.labels, here.labels, None, 6379):
                yield f"{there.where} does not let in {here.where}"
            if not egress(objects, here.labels, there.labels, None, 6379):
                yield f"{here.where} is not let out to {there.where}"


def engines_are_linked_to_orchestrators_alone(objects: Objects) -> Iterator[str]:
    """Orchestrators reach the ports of links; nobody from another namespace does."""
    everyone = ray_pods(objects)
    orchestrators = [pod for pod in everyone if pod.role == "orchestrator"]
    for engine in (pod for pod in everyone if pod.role in ("draft", "target")):
        for port in LINK_PORTS:
            for orchestrator in orchestrators:
                if not (
                    ingress(objects, engine.labels, orchestrator.labels, None, port)
                    and egress(objects, orchestrator.labels, engine.labels, None, port)
                ):
                    yield f"{engine.where}: {orchestrator.where} cannot open a link to port {port}"
            for namespace in ({}, CLIENT_NAMESPACE, PROMETHEUS_NAMESPACE):
                if ingress(objects, engine.labels, {}, namespace, port):
                    yield f"{engine.where}: others than orchestrators reach link port {port}"


def clients_reach_the_service(objects: Objects) -> Iterator[str]:
    for pod in ray_pods(objects)[1:]:
        for port in ray_service(objects)["serveService"]["spec"]["ports"]:
            if not ingress(objects, pod.labels, {}, CLIENT_NAMESPACE, port["targetPort"]):
                yield f"{pod.where}: clients cannot reach {port['name']}"
            if ingress(objects, pod.labels, {}, {}, port["targetPort"]):
                yield f"{pod.where}: any namespace can reach {port['name']}"


def the_operator_reaches_the_head(objects: Objects) -> Iterator[str]:
    head = ray_pods(objects)[0]
    if not ingress(objects, head.labels, OPERATOR, {}, head.ports.get("dashboard", 8265)):
        yield "head: KubeRay cannot reach the dashboard, and nothing would be deployed"
    for stranger in ({}, CLIENT_NAMESPACE):
        if ingress(objects, head.labels, {}, stranger, head.ports.get("dashboard", 8265)):
            yield "head: others than KubeRay can reach the dashboard"


def the_autoscaler_reaches_kubernetes(objects: Objects) -> Iterator[str]:
    head, *workers = ray_pods(objects)
    for port in (443, 6443):
        if not egress(objects, head.labels, SOMEWHERE, None, port):
            yield f"head: the autoscaler cannot reach an API server at port {port}"
        for pod in workers:
            if egress(objects, pod.labels, SOMEWHERE, None, port):
                yield f"{pod.where}: can reach the world at port {port}"


def names_are_resolved(objects: Objects) -> Iterator[str]:
    """DNS pods, a cache on the node (in whichever network that is) or the cloud answer; long answers come by TCP."""
    resolvers: dict[str, tuple[Peer, Mapping[str, str] | None]] = {
        "DNS": ({"k8s-app": "kube-dns"}, SYSTEM_NAMESPACE),
        "node-local DNS with a network of its own": ({"k8s-app": "node-local-dns"}, SYSTEM_NAMESPACE),
        "node-local DNS": (NODE_DNS, None),
        "cloud DNS": (METADATA, None),
    }
    for pod in pods(objects):
        for name, (peer, namespace) in resolvers.items():
            for protocol in ("UDP", "TCP"):
                if not egress(objects, pod.labels, peer, namespace, 53, protocol):
                    yield f"{pod.where}: cannot reach {name} by {protocol}"


def nobody_asks_the_metadata_server_for_more(objects: Objects) -> Iterator[str]:
    """It gives whoever asks the rights of the node."""
    for pod in pods(objects):
        if egress(objects, pod.labels, METADATA, None, 80):
            yield f"{pod.where}: can reach the metadata server of its node"


def the_head_reaches_its_redis(objects: Objects) -> Iterator[str]:
    """And nobody else does."""
    head, *workers = ray_pods(objects)
    for redis in (pod for pod in pods(objects) if pod.role == "redis"):
        if not (
            ingress(objects, redis.labels, head.labels, None, 6379)
            and egress(objects, head.labels, redis.labels, None, 6379)
        ):
            yield "head: cannot reach Redis"
        for pod in workers:
            if ingress(objects, redis.labels, pod.labels, None, 6379):
                yield f"{pod.where}: can reach Redis, and has no business there"


def prometheus_reaches_the_metrics(objects: Objects) -> Iterator[str]:
    if not of_kind(objects, "PodMonitor"):
        return
    for pod in ray_pods(objects):
        for name in ("metrics", "as-metrics"):
            if name in pod.ports and not ingress(objects, pod.labels, {}, PROMETHEUS_NAMESPACE, pod.ports[name]):
                yield f"{pod.where}: Prometheus cannot reach the port {name}"


def models_can_be_downloaded(objects: Objects) -> Iterator[str]:
    for pod in (pod for pod in pods(objects) if pod.is_job):
        if not egress(objects, pod.labels, SOMEWHERE, None, 443):
            yield f"{pod.where}: cannot reach the hub"


def ingress(
    objects: Objects,
    labels: Mapping[str, str],
    peer: Peer,
    namespace: Mapping[str, str] | None,
    port: int,
) -> bool:
    """Whether pods with `labels` let in a pod `peer` of a namespace with labels; None is our own namespace."""
    return _allowed(objects, labels, "ingress", "from", peer, namespace, port)


def egress(
    objects: Objects,
    labels: Mapping[str, str],
    peer: Peer,
    namespace: Mapping[str, str] | None,
    port: int,
    protocol: str = "TCP",
) -> bool:
    """Whether pods with `labels` are let out to such a pod, or to an address that is no pod's."""
    return _allowed(objects, labels, "egress", "to", peer, namespace, port, protocol)


def _allowed(
    objects: Objects,
    labels: Mapping[str, str],
    direction: str,
    peers_key: str,
    peer: Peer,
    namespace: Mapping[str, str] | None,
    port: int,
    protocol: str = "TCP",
) -> bool:
    for policy in of_kind(objects, "NetworkPolicy"):
        if not selects(policy["spec"]["podSelector"], labels):
            continue
        for rule in policy["spec"].get(direction, ()):
            ports = [(item["port"], item.get("protocol", "TCP")) for item in rule.get("ports", ())]
            is_peer = any(_is_peer(item, peer, namespace) for item in rule.get(peers_key, ()))
            if is_peer and (not ports or (port, protocol) in ports):
                return True
    return False


def _is_peer(item: Manifest, peer: Peer, namespace: Mapping[str, str] | None) -> bool:
    if "ipBlock" in item or isinstance(peer, str):
        return isinstance(peer, str) and "ipBlock" in item and _holds(item["ipBlock"], peer)
    if "namespaceSelector" in item:
        if namespace is None or not selects(item["namespaceSelector"], namespace):
            return False
    elif namespace is not None:
        return False
    return selects(item.get("podSelector", {}), peer)


def _holds(block: Manifest, address: str) -> bool:
    inside = ip_address(address) in ip_network(block["cidr"])
    return inside and not any(ip_address(address) in ip_network(hole) for hole in block.get("except", ()))


CHECKS = (
    nothing_is_open_by_default,
    policies_select_pods,
    openings_are_narrow,
    openings_are_for_both_families,
    ray_nodes_reach_each_other,
    engines_are_linked_to_orchestrators_alone,
    clients_reach_the_service,
    the_operator_reaches_the_head,
    the_autoscaler_reaches_kubernetes,
    names_are_resolved,
    nobody_asks_the_metadata_server_for_more,
    the_head_reaches_its_redis,
    prometheus_reaches_the_metrics,
    models_can_be_downloaded,
)
