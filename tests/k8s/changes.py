"""Changes of rendered objects, as values: what a planted fault does to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

from tests.k8s.manifests import Manifest, Objects, named, of_kind, ray_pods, ray_service, serve_config

Change = Callable[[list[Manifest]], None]


def ray(role: str, *path: Any, to: Any) -> Change:
    """Set a field of the pod template of a Ray group."""
    return lambda objects: put(template(objects, role), path, to)


def container(role: str, *path: str, to: Any) -> Change:
    """Set a field of the Ray container of a group."""
    return lambda objects: put(template(objects, role)["spec"]["containers"][0], path, to)


def container_drop(role: str, *path: str) -> Change:
    """Take a field away from the Ray container of a group."""
    return lambda objects: drop(template(objects, role)["spec"]["containers"][0], path)


def group(role: str, *path: str, to: Any) -> Change:
    """Set a field of a Ray group."""
    return lambda objects: put(ray_group(objects, role), path, to)


def ray_group(objects: Objects, role: str) -> Manifest:
    """A Ray group."""
    return next(pod.group for pod in ray_pods(objects) if pod.role == role and pod.group is not None)


def service(*path: str, to: Any) -> Change:
    """Set a field of the RayService."""
    return lambda objects: put(ray_service(objects), path, to)


def of(kind: str, name: str, *path: Any, to: Any) -> Change:
    """Set a field of any object."""
    return lambda objects: put(named(objects, kind, name), path, to)


def without(kind: str, name: str) -> Change:
    """Take an object away."""
    return lambda objects: objects.remove(named(objects, kind, name))


def served(*path: Any, to: Any) -> Change:
    """Set a field in serveConfigV2."""

    def change(objects: list[Manifest]) -> None:
        config = serve_config(objects)
        put(config, path, to)
        ray_service(objects)["serveConfigV2"] = yaml.safe_dump(config)

    return change


def setting(*path: str, to: Any) -> Change:
    """Set a setting of the application."""
    return served("applications", 0, "args", *path, to=to)


def put(item: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set what `path` leads to, and make the mappings on the way."""
    for key in path[:-1]:
        item = item.setdefault(key, {}) if isinstance(item, dict) else item[key]
    item[path[-1]] = value


def drop(item: Any, path: tuple[Any, ...]) -> None:
    """Take away what `path` leads to."""
    for key in path[:-1]:
        item = item[key]
    del item[path[-1]]


def template(objects: Objects, role: str) -> Manifest:
    """The pod template of a Ray group."""
    return next(pod.template for pod in ray_pods(objects) if pod.role == role)


def empty_volume(role: str, name: str, to: Manifest) -> Change:
    """Another emptyDir under the name of a group's volume."""
    return lambda objects: put(
        next(each for each in template(objects, role)["spec"]["volumes"] if each["name"] == name), ("emptyDir",), to
    )


def unmount(objects: Objects, role: str, volume: str) -> None:
    """The container of `role` without one of its volumes."""
    container = template(objects, role)["spec"]["containers"][0]
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != volume]


def unset(objects: Objects, role: str, variable: str) -> None:
    """The container of `role` without one of its variables."""
    container = template(objects, role)["spec"]["containers"][0]
    container["env"] = [each for each in container["env"] if each["name"] != variable]


def forget_certificates(objects: Objects, role: str) -> None:
    """A group whose links have no TLS."""
    unmount(objects, role, "link-tls")
    unset(objects, role, "OUTRIDER_LINK_TLS_DIR")


def shorten_drain(objects: Objects, role: str, deadline_s: int) -> None:
    """Another deadline of the drain before a pod of `role` stops."""
    command = template(objects, role)["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    command[-1] = re.sub(r"(--deadline-remaining-seconds) \d+", rf"\1 {deadline_s}", command[-1])


def stay_after_the_drain(objects: Objects, role: str) -> None:
    """The hook of `role` never returns."""
    command = template(objects, role)["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    command[-1] = command[-1].rpartition("&&")[0] + "&& sleep infinity"


def forget_stop_file(objects: Objects, role: str) -> None:
    """The hook of `role` tells Ray alone that the pod is to stop."""
    command = template(objects, role)["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    command[-1] = command[-1].partition(";")[2]


def edit_download(objects: Objects, words: str, others: str) -> None:
    """Other words in the command of the jobs that download models."""
    for job in of_kind(objects, "Job"):
        container = job["spec"]["template"]["spec"]["containers"][0]
        assert words in container["command"][-1]
        container["command"][-1] = container["command"][-1].replace(words, others)


def edit_plugins(objects: Objects, words: str, others: str) -> None:
    """Other words in the settings of the endpoint picker."""
    data = named(objects, "ConfigMap", "outrider-epp")["data"]
    assert words in data["plugins.yaml"]
    data["plugins.yaml"] = data["plugins.yaml"].replace(words, others)


def add_secret(objects: list[Manifest]) -> None:
    """A password where anyone can read it."""
    metadata = {"name": "outrider-redis", "namespace": "outrider"}
    objects.append({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"password": "hunter2"}})


def break_serve_config(objects: list[Manifest]) -> None:
    """serveConfigV2 is cut off."""
    ray_service(objects)["serveConfigV2"] = "applications: [{name: outrider"


def panel(expression: str) -> Change:
    """Another expression of the dashboard's first panel."""

    def change(objects: list[Manifest]) -> None:
        data = named(objects, "ConfigMap", "outrider-dashboard")["data"]
        board = json.loads(data["outrider.json"])
        board["panels"][0]["targets"][0]["expr"] = expression
        data["outrider.json"] = json.dumps(board)

    return change


def close_to(objects: Objects, policy: str, kind: str, peer: Any = None) -> None:
    """The first rule of a network policy's egress without the peers of this kind, or without this one."""
    rule = named(objects, "NetworkPolicy", policy)["spec"]["egress"][0]
    rule["to"] = [item for item in rule["to"] if kind not in item or item[kind] != (peer or item[kind])]


def budget(name: str, *path: Any, to: Any) -> Change:
    """Set a field of a disruption budget."""
    return of("PodDisruptionBudget", name, "spec", *path, to=to)


def route(number: int, *path: Any, to: Any) -> Change:
    """Set a field of a rule of the route."""
    return of("HTTPRoute", "outrider", "spec", "rules", number, *path, to=to)


def rule(alert: str, *path: Any, to: Any) -> Change:
    """Set a field of an alerting rule."""

    def change(objects: list[Manifest]) -> None:
        groups = named(objects, "PrometheusRule", "outrider")["spec"]["groups"]
        put(next(each for group in groups for each in group["rules"] if each["alert"] == alert), path, to)

    return change


def policy(name: str, *path: Any, to: Any) -> Change:
    """Set a field of a network policy."""
    return of("NetworkPolicy", name, "spec", *path, to=to)
