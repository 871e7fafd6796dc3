"""Every pod must be locked down, probed and bounded. Each check is a pure function from objects to complaints."""

from __future__ import annotations

from collections.abc import Iterator

from tests.k8s.manifests import Objects, containers, cpus, named, of_kind, pods, ray_pods, worker_pods

AGENT_PORT = 52365
"""Where Ray tells whether this node of it lives; without its token, for kubelet has none."""
LEAST_STARTUP_S = 180
FIRST_USER = 1000
OF_THE_CLUSTER = ("Namespace", "PersistentVolume", "PriorityClass")
"""Kinds that are in no namespace."""
ACCOUNTS = {"head": "outrider-head", "picker": "outrider-picker"}
"""Service accounts with a token, by role."""


def containers_are_locked_down(objects: Objects) -> Iterator[str]:
    for where, container in containers(objects):
        context = container.get("securityContext", {})
        wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True}
        for name, value in wanted.items():
            if context.get(name) is not value:
                yield f"{where}: {name} must be {value}"
        if context.get("privileged"):
            yield f"{where}: must not be privileged"
        capabilities = context.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
            yield f"{where}: must drop all capabilities and add none"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{where}: seccompProfile must be RuntimeDefault"


def pods_are_locked_down(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        context = pod.spec.get("securityContext", {})
        if context.get("runAsUser", 0) < FIRST_USER or context.get("runAsNonRoot") is not True:
            yield f"{pod.where}: must run as a user of its own, not as root"
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(name):
                yield f"{pod.where}: {name} must not be set"
        for volume in pod.spec.get("volumes", ()):
            if "hostPath" in volume:
                yield f"{pod.where}: volume {volume['name']} is a hostPath"


def namespace_is_restricted(objects: Objects) -> Iterator[str]:
    for namespace in of_kind(objects, "Namespace"):
        if namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"namespace {namespace['metadata']['name']} must enforce the restricted pod security standard"
    for item in objects:
        if item["kind"] not in OF_THE_CLUSTER and item["metadata"].get("namespace") != "outrider":
            yield f"{item['kind']} {item['metadata']['name']} must be in the namespace outrider"


def only_those_hold_a_token_who_need_one(objects: Objects) -> Iterator[str]:
    """For the API server: the autoscaler in the head's pod, and the picker of an inference pool."""
    for pod in pods(objects):
        if pod.spec.get("automountServiceAccountToken") is not (pod.role in ACCOUNTS):
            yield f"{pod.where}: automountServiceAccountToken must be {pod.role in ACCOUNTS}"
        if pod.spec.get("serviceAccountName") != ACCOUNTS.get(pod.role, "outrider-worker"):
            yield f"{pod.where}: has the wrong service account {pod.spec.get('serviceAccountName')}"


def nothing_secret_is_written_down(objects: Objects) -> Iterator[str]:
    for item in of_kind(objects, "Secret"):
        yield f"Secret {item['metadata']['name']}: secrets are made by hand, not by manifests"
    for where, container in containers(objects):
        for variable in container.get("env", ()):
            is_secret = any(word in variable["name"] for word in ("TOKEN", "PASSWORD", "SECRET", "KEY"))
            is_secret &= not variable["name"].endswith("_FILE")  # that is where one is
            if is_secret and "value" in variable:
                yield f"{where}: {variable['name']} must come from a Secret"


def images_are_pinned(objects: Objects) -> Iterator[str]:
    for where, container in containers(objects):
        if where == "autoscalerOptions":
            continue  # it takes the head's
        _, colon, tag = container["image"].rpartition("/")[2].partition(":")
        if not colon or tag == "latest":
            yield f"{where}: image {container['image']} needs a tag that does not move"


def ray_pods_run_one_image(objects: Objects) -> Iterator[str]:
    """Ray refuses nodes of another version, and pickles move between all of them."""
    tags = {pod.ray["image"].rpartition(":")[2] for pod in ray_pods(objects)}
    if len(tags) != 1:
        yield f"Ray's pods must run one version, got {sorted(tags)}"


def temporary_files_have_a_place(objects: Objects) -> Iterator[str]:
    """With a read-only root, Ray needs a volume at /tmp; bounded, so that logs cannot fill a node."""
    for pod in pods(objects):
        empty = {
            volume["name"] for volume in pod.spec.get("volumes", ()) if volume.get("emptyDir", {}).get("sizeLimit")
        }
        places = {mount["mountPath"]: mount["name"] for mount in pod.ray.get("volumeMounts", ())}
        if pod.role != "redis" and places.get("/tmp") not in empty:
            yield f"{pod.where}: needs an emptyDir with a sizeLimit at /tmp"


def containers_are_probed(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod.spec["containers"]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if not pod.is_job and probe not in container:
                    yield f"{pod.where}, container {container['name']}: {probe} is missing"


def probes_ask_ports_that_are_there(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        names = pod.ports
        known = {AGENT_PORT, *names, *names.values()}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for way in ("httpGet", "grpc", "tcpSocket"):
                port = pod.ray.get(probe, {}).get(way, {}).get("port")
                if port is not None and port not in known:
                    yield f"{pod.where}: {probe} asks port {port}, which the container does not name"


def only_ray_decides_over_life_and_death(objects: Objects) -> Iterator[str]:
    """A probe that kills must not look at the application: it would kill targets because an orchestrator is ill."""
    for pod in ray_pods(objects):
        for probe in ("startupProbe", "livenessProbe"):
            asked = pod.ray.get(probe, {}).get("httpGet", {})
            if (asked.get("path"), asked.get("port")) != ("/api/healthz", AGENT_PORT):
                yield f"{pod.where}: {probe} must ask Ray's node agent"


def startup_is_long_enough(objects: Objects) -> Iterator[str]:
    for pod in ray_pods(objects):
        probe = pod.ray.get("startupProbe", {})
        allowed_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        if allowed_s < LEAST_STARTUP_S:
            yield f"{pod.where}: startupProbe allows {allowed_s} s; give Ray at least {LEAST_STARTUP_S}"


def readiness_asks_the_service(objects: Objects) -> Iterator[str]:
    """Orchestrators' pods ask the application by gRPC; others their proxy, which says when it is to leave."""
    for pod in worker_pods(objects):
        probe = pod.ray.get("readinessProbe", {})
        if pod.role == "orchestrator":
            if probe.get("grpc", {}).get("port") != pod.ports.get("serve-grpc"):
                yield f"{pod.where}: readinessProbe must ask the application by gRPC"
        elif probe.get("httpGet", {}).get("path") != "/-/healthz":
            yield f"{pod.where}: readinessProbe must ask Serve's proxy"


def resources_are_bounded(objects: Objects) -> Iterator[str]:
    """Requests equal limits: Ray plans with the limits, and a pod that has what it asked for is evicted last."""
    for where, container in containers(objects):
        resources = container.get("resources", {})
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        missing = {"cpu", "memory"} - set(limits)
        if missing or requests != limits:
            yield f"{where}: requests and limits of cpu and memory must be set and equal"
        elif cpus(limits["cpu"]) <= 0:
            yield f"{where}: cpu must be positive"


def what_pods_refer_to_is_there(objects: Objects) -> Iterator[str]:
    """Volume claims, config maps and service accounts; secrets are made by hand, as the runbook says."""
    for pod in pods(objects):
        wanted = [("ServiceAccount", pod.spec.get("serviceAccountName", "default"))]
        for volume in pod.spec.get("volumes", ()):
            if "persistentVolumeClaim" in volume:
                wanted.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for container in pod.containers:
            sources = container.get("envFrom", ())
            wanted += [("ConfigMap", source["configMapRef"]["name"]) for source in sources if "configMapRef" in source]
        for kind, name in wanted:
            try:
                named(objects, kind, name)
            except LookupError as error:
                yield f"{pod.where}: {error}"


def mounts_name_volumes(objects: Objects) -> Iterator[str]:
    for pod in pods(objects):
        volumes = {volume["name"] for volume in pod.spec.get("volumes", ())}
        volumes |= {"data"} if pod.role == "redis" else set()  # of its volumeClaimTemplates
        for container in pod.containers:
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in volumes:
                    yield f"{pod.where}, container {container['name']}: there is no volume {mount['name']}"


CHECKS = (
    containers_are_locked_down,
    pods_are_locked_down,
    namespace_is_restricted,
    only_those_hold_a_token_who_need_one,
    nothing_secret_is_written_down,
    images_are_pinned,
    ray_pods_run_one_image,
    temporary_files_have_a_place,
    containers_are_probed,
    probes_ask_ports_that_are_there,
    only_ray_decides_over_life_and_death,
    startup_is_long_enough,
    readiness_asks_the_service,
    resources_are_bounded,
    what_pods_refer_to_is_there,
    mounts_name_volumes,
)
