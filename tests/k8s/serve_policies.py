"""Do the manifests and the application that they carry fit each other: ports, places, sizes, times?"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path

from deploy.api.authentication import TOKENS_FILE
from deploy.app import APPLICATION, DRAIN_TIMEOUT_S
from deploy.files import STOP_FILE
from deploy.launch.cluster import MAX_MESSAGE_BYTES, NODE_ENVIRONMENT, SERVICERS
from deploy.link.tls import TLS_DIR
from tests.k8s.manifests import (
    ROLE,
    Objects,
    Pod,
    cluster,
    deployments,
    least_replicas,
    most_replicas,
    pods_of_replica,
    ray_pods,
    ray_resources,
    ray_service,
    replica_resources,
    serve_config,
    settings,
    worker_pods,
)
from tests.k8s.pod_policies import AGENT_PORT

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENS = "outrider-tokens"
CERTIFICATES = "outrider-link-tls"
LOADING_S = 900.0
"""For a node, an image and weights of a replacement."""
STAYS_UNTIL_DRAINED = f"&& while (: </dev/tcp/localhost/{AGENT_PORT}) 2>/dev/null ; do sleep 1 ; done"
"""tests/system/test_drained_pod.py shows what it does."""
MAX_MESSAGE = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"


def one_application_is_served(objects: Objects) -> Iterator[str]:
    config = serve_config(objects)
    if config.get("proxy_location") != "EveryNode":
        yield "serveConfigV2: proxy_location must be EveryNode"
    wanted = {"name": APPLICATION, "route_prefix": "/", "import_path": "deploy.app:build"}
    applications = config["applications"]
    if len(applications) != 1 or {key: applications[0].get(key) for key in wanted} != wanted:
        yield f"serveConfigV2: there must be one application with {wanted}"


def proxies_can_be_reached(objects: Objects) -> Iterator[str]:
    if serve_config(objects).get("http_options", {}).get("host") not in ("0.0.0.0", "::"):
        yield "serveConfigV2: http_options.host must be 0.0.0.0, or ::, for KubeRay and probes to reach the proxy"


def servicers_are_the_codes(objects: Objects) -> Iterator[str]:
    options = serve_config(objects).get("grpc_options", {})
    if tuple(options.get("grpc_servicer_functions", ())) != SERVICERS:
        yield f"serveConfigV2: grpc_servicer_functions must be {list(SERVICERS)}"
    if options.get("enable_reflection") is not True:
        yield "serveConfigV2: enable_reflection must be true"


def ports_agree(objects: Objects) -> Iterator[str]:
    """serveConfigV2, the Service and every container say the same two ports by the same two names."""
    config = serve_config(objects)
    wanted = {
        "serve": config.get("http_options", {}).get("port"),
        "serve-grpc": config.get("grpc_options", {}).get("port"),
    }
    offered = ray_service(objects)["serveService"]["spec"]["ports"]
    for port in offered:
        if port["port"] != port["targetPort"]:
            yield f"serveService: port {port['name']} must keep its number, got {port['port']} and {port['targetPort']}"
    if {port["name"]: port["port"] for port in offered} != wanted:
        yield f"serveService: ports must be {wanted}"
    for pod in ray_pods(objects):
        if {name: pod.ports.get(name) for name in wanted} != wanted:
            yield f"{pod.where}: container ports must include {wanted}"


def messages_are_bounded(objects: Objects) -> Iterator[str]:
    """Every proxy has the same bound. It is not below the application's, whose refusal says what was too long."""
    least = settings(objects).limits.max_message_bytes
    for pod in ray_pods(objects):
        values = [each.get("value") for each in pod.ray.get("env", ()) if each["name"] == MAX_MESSAGE]
        if values != [str(MAX_MESSAGE_BYTES)]:
            yield f"{pod.where}: {MAX_MESSAGE} must be {MAX_MESSAGE_BYTES}, got {values}"
    if least > MAX_MESSAGE_BYTES:
        yield f"limits.max_message_bytes is {least}, but proxies take {MAX_MESSAGE_BYTES} at most"


def proxies_are_prepared(objects: Objects) -> Iterator[str]:
    """Proxies have the environment of `outrider serve`. Without it, for example, gRPC cancels calls of a burst by
    itself."""
    for pod in ray_pods(objects):
        for name, wanted in NODE_ENVIRONMENT.items():
            values = [each.get("value") for each in pod.ray.get("env", ()) if each["name"] == name]
            if name != MAX_MESSAGE and values != [wanted]:
                yield f"{pod.where}: {name} must be {wanted}, got {values}"


def grpc_port_speaks_http2(objects: Objects) -> Iterator[str]:
    protocols = {
        port["name"]: port.get("appProtocol") for port in ray_service(objects)["serveService"]["spec"]["ports"]
    }
    if protocols.get("serve-grpc") != "kubernetes.io/h2c":
        yield "serveService: appProtocol of serve-grpc must be kubernetes.io/h2c, or gateways speak HTTP/1 to it"


def places_that_settings_name_exist(objects: Objects) -> Iterator[str]:
    """Ray labels that a deployment selects are those of exactly one group."""
    groups = cluster(objects)["workerGroupSpecs"]
    for role, deployment in deployments(settings(objects)).items():
        if not deployment.labels:
            yield f"{role}: labels must name its group"
        fitting = [
            group["groupName"] for group in groups if deployment.labels.items() <= group.get("labels", {}).items()
        ]
        if fitting != [role]:
            yield f"{role}: labels {deployment.labels} select the groups {fitting}"


def groups_are_labelled_alike(objects: Objects) -> Iterator[str]:
    """Name, Ray label and pod label of a group are one word; the head's pods are labelled head."""
    roles = [pod.role for pod in ray_pods(objects)]
    if roles != ["head", "orchestrator", "draft", "target"]:
        yield f"pods of the RayCluster must have the roles head, orchestrator, draft, target, got {roles}"
    for pod in worker_pods(objects):
        group = pod.group or {}
        if {group["groupName"], group.get("labels", {}).get(ROLE)} != {pod.role}:
            yield f"{pod.where}: groupName, labels and the pod's label {ROLE} must agree"


def replicas_fit_into_pods(objects: Objects) -> Iterator[str]:
    """One replica to a pod, with its engine and all ranks of a stage: it must fit, and a second one must not."""
    by_role = {pod.role: pod for pod in worker_pods(objects)}
    for role, deployment in deployments(settings(objects)).items():
        wanted, offered = replica_resources(deployment), ray_resources(by_role[role])
        short = [name for name in wanted if wanted[name] > offered.get(name, 0) + 1e-9]
        for name in short:
            yield f"{role}: a replica wants {name} {wanted[name]:g}, a pod has {offered.get(name, 0):g}"
        if not short and all(2 * wanted[name] <= offered[name] for name in wanted):
            yield f"{role}: two replicas fit into one pod, and would die together"


def groups_can_hold_all_replicas(objects: Objects) -> Iterator[str]:
    groups = {pod.role: pod.group or {} for pod in worker_pods(objects)}
    for role, deployment in deployments(settings(objects)).items():
        least, most = groups[role]["minReplicas"], groups[role]["maxReplicas"]
        surge, num_pods = ceil(most_replicas(deployment) * deployment.surge_percent / 100), pods_of_replica(deployment)
        if most < num_pods * (most_replicas(deployment) + surge):
            yield f"{role}: {most_replicas(deployment)} replicas and {surge} in an update, but at most {most} pods"
        if least > num_pods * least_replicas(deployment):
            yield f"{role}: {least} pods are kept for {least_replicas(deployment)} replicas"
        if not least <= groups[role]["replicas"] <= most:
            yield f"{role}: replicas must be between minReplicas and maxReplicas"


def streams_may_end(objects: Objects) -> Iterator[str]:
    """A pod that is to stop tells Ray, and has as long as a stream may last, beside the time that replacements load.

    Within a stream's time before its deadline Serve stops replicas of a draining node at once, replaced or not.
    """
    for pod in worker_pods(objects):
        if pod.spec.get("terminationGracePeriodSeconds", 30) < DRAIN_TIMEOUT_S + LOADING_S:
            yield f"{pod.where}: terminationGracePeriodSeconds must be at least {DRAIN_TIMEOUT_S + LOADING_S:.0f}"
        words = " ".join(pod.ray.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ())).split()
        if "drain-node" not in words:
            yield f"{pod.where}: preStop must drain the node"
        elif float(words[words.index("--deadline-remaining-seconds") + 1]) < DRAIN_TIMEOUT_S + LOADING_S:
            yield f"{pod.where}: the deadline of preStop must be at least {DRAIN_TIMEOUT_S + LOADING_S:.0f} s"
        elif STAYS_UNTIL_DRAINED not in " ".join(words):
            yield f"{pod.where}: preStop must end when Ray has left, with: {STAYS_UNTIL_DRAINED}"
        has_file = any(variable["name"] == STOP_FILE for variable in pod.ray.get("env", ()))
        if not has_file or f'"${STOP_FILE}"' not in words[: words.index("drain-node") if "drain-node" in words else 0]:
            yield f"{pod.where}: preStop must leave the file that {STOP_FILE} names, before it tells Ray"
    if ray_service(objects).get("rayClusterDeletionDelaySeconds", 60) < DRAIN_TIMEOUT_S:
        yield f"RayService: rayClusterDeletionDelaySeconds must be at least {DRAIN_TIMEOUT_S:.0f}"


def upgrades_switch_at_once(objects: Objects) -> Iterator[str]:
    """The incremental strategy splits HTTP only; None would change nothing."""
    if ray_service(objects).get("upgradeStrategy", {}).get("type") != "NewCluster":
        yield "RayService: upgradeStrategy must be NewCluster"


def ray_asks_for_its_token(objects: Objects) -> Iterator[str]:
    if cluster(objects).get("authOptions", {}).get("mode") != "token":
        yield "RayCluster: authOptions.mode must be token"
    for pod in ray_pods(objects):
        for variable in pod.ray.get("env", ()):
            if variable["name"] == "RAY_AUTH_MODE":
                yield f"{pod.where}: RAY_AUTH_MODE overrides authOptions"


def callers_are_asked_for_tokens_that_are_there(objects: Objects) -> Iterator[str]:
    """A mounted key that is not required leaves the door open; a missing file keeps a pod from serving."""
    for pod in worker_pods(objects):
        volumes = pod.spec.get("volumes", ())
        secrets = {each["name"] for each in volumes if each.get("secret", {}).get("secretName") == TOKENS}
        folders = {mount["mountPath"] for mount in pod.ray.get("volumeMounts", ()) if mount["name"] in secrets}
        files = [each.get("value", "") for each in pod.ray.get("env", ()) if each["name"] == TOKENS_FILE]
        if secrets and not files:
            yield f"{pod.where}: {TOKENS} is mounted, and {TOKENS_FILE} does not name it"
        for file in files:
            if str(Path(file).parent) not in folders:
                yield f"{pod.where}: {TOKENS_FILE} names {file}, where no {TOKENS} is mounted"


def links_have_certificates_at_both_ends(objects: Objects) -> Iterator[str]:
    """An end without them gets no link, and rounds go the slow way, unencrypted."""
    with_tls = [pod for pod in worker_pods(objects) if _variable(pod, TLS_DIR) or _folder_of(pod, CERTIFICATES)]
    if not with_tls:
        return
    for pod in worker_pods(objects):
        if pod not in with_tls:
            yield f"{pod.where}: has no {CERTIFICATES}, which other ends of its links have"
        elif _variable(pod, TLS_DIR) != _folder_of(pod, CERTIFICATES):
            yield f"{pod.where}: {TLS_DIR} must name where {CERTIFICATES} is mounted"


def the_head_only_leads(objects: Objects) -> Iterator[str]:
    """No replica on it, and no call through it: its loss must cost neither."""
    if cluster(objects)["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield 'head: num-cpus must be "0"'
    if ray_service(objects).get("excludeHeadPodFromServeSvc") is not True:
        yield "RayService: excludeHeadPodFromServeSvc must be true"


def ray_is_the_version_that_is_pinned(objects: Objects) -> Iterator[str]:
    pinned = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line.startswith("ray==")]
    if [f"ray=={cluster(objects).get('rayVersion')}"] != pinned:
        yield f"RayCluster: rayVersion {cluster(objects).get('rayVersion')} is not the {pinned[0]} of constraints.txt"


def _variable(pod: Pod, name: str) -> str | None:
    return next((each.get("value") for each in pod.ray.get("env", ()) if each["name"] == name), None)


def _folder_of(pod: Pod, secret: str) -> str | None:
    """Where a Secret is mounted."""
    volumes = {each["name"] for each in pod.spec["volumes"] if each.get("secret", {}).get("secretName") == secret}
    return next((mount["mountPath"] for mount in pod.ray["volumeMounts"] if mount["name"] in volumes), None)


CHECKS = (
    one_application_is_served,
    proxies_can_be_reached,
    servicers_are_the_codes,
    ports_agree,
    messages_are_bounded,
    proxies_are_prepared,
    grpc_port_speaks_http2,
    places_that_settings_name_exist,
    groups_are_labelled_alike,
    replicas_fit_into_pods,
    groups_can_hold_all_replicas,
    streams_may_end,
    upgrades_switch_at_once,
    ray_asks_for_its_token,
    callers_are_asked_for_tokens_that_are_there,
    links_have_certificates_at_both_ends,
    the_head_only_leads,
    ray_is_the_version_that_is_pinned,
)
