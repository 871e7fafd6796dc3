"""Does each object have the shape that its schema asks for? Unknown fields are refused everywhere: they are typos."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes_validate import utils as kubernetes_schemas
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema
from referencing import Registry, Resource

from core.errors import ConfigError
from tests.k8s.manifests import Manifest, Objects, of_kind, pods, serve_config, settings

KUBERNETES = "1.32"
"""The oldest release that the manifests are meant for."""
RAY_SERVICE_SCHEMA = Path(__file__).parent / "schemas" / "rayservice.v1.7.0.json"
CUSTOM_SCHEMAS = Path(__file__).parent / "schemas" / "custom.json"
"""Our own, of the parts of other operators' resources that we use: no published schema of theirs is needed for it."""


def core_kinds_have_their_shape(objects: Objects) -> Iterator[str]:
    """Kubernetes' own kinds, and the pods inside the RayService, against Kubernetes' schemas."""
    for item in objects:
        if _is_core(item["apiVersion"]):
            yield from _errors(_core_validator(item["kind"], item["apiVersion"]), item, _title(item))
    for pod in pods(objects):
        as_pod = {"apiVersion": "v1", "kind": "Pod", **pod.template}
        yield from _errors(_core_validator("Pod", "v1"), as_pod, pod.where)


def ray_service_has_its_shape(objects: Objects) -> Iterator[str]:
    """Against KubeRay's schema."""
    services = of_kind(objects, "RayService")
    if len(services) != 1:
        yield f"there must be one RayService, got {len(services)}"
    for item in services:
        if item["apiVersion"] != "ray.io/v1":
            yield f"RayService must be ray.io/v1, got {item['apiVersion']}"
        yield from _errors(_ray_service_validator(), item, _title(item))


def custom_resources_have_their_shape(objects: Objects) -> Iterator[str]:
    """Gateway API and Prometheus operator; a kind that nobody knows here is refused."""
    schemas = json.loads(CUSTOM_SCHEMAS.read_text())
    for item in objects:
        if _is_core(item["apiVersion"]) or item["kind"] == "RayService":
            continue
        key = f"{item['apiVersion']}/{item['kind']}"
        if key not in schemas:
            yield f"{_title(item)}: there is no schema for {key}"
            continue
        yield from _errors(jsonschema.Draft202012Validator(closed(schemas[key])), item, _title(item))


def serve_config_has_its_shape(objects: Objects) -> Iterator[str]:
    """serveConfigV2 against Ray Serve's models, which by themselves let unknown fields pass."""
    try:
        config = serve_config(objects)
        ServeDeploySchema.model_validate(config)
    except (yaml.YAMLError, ValidationError) as error:
        yield f"serveConfigV2: {error}"
        return
    yield from _unknown_fields(ServeDeploySchema, config, "serveConfigV2")
    for part in ("http_options", "grpc_options"):
        yield from _unknown_fields(_model_of(part), config.get(part, {}), f"serveConfigV2.{part}")
    for application in config["applications"]:
        yield from _unknown_fields(_model_of("applications"), application, "serveConfigV2.applications")


def settings_are_accepted(objects: Objects) -> Iterator[str]:
    """The application's args by the code that will read them."""
    try:
        settings(objects)
    except ConfigError as error:
        yield f"serveConfigV2 args: {error}"


def closed(schema: Any) -> Any:
    """The same schema, which refuses the fields that it does not name."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: closed(part) for key, part in schema.items()}
    is_open = "additionalProperties" in parts or parts.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(parts.get("properties"), dict) and parts.get("type") == "object" and not is_open:
        parts["additionalProperties"] = False
    return parts


@cache
def _ray_service_validator() -> Any:
    schema = json.loads(RAY_SERVICE_SCHEMA.read_text())
    # Of the service's metadata the schema only says that it is an object.
    return jsonschema.Draft202012Validator(closed(schema))


@cache
def _core_validator(kind: str, api_version: str) -> Any:
    """kubernetes-validate's, but with its schemas read once."""
    group, _, version = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.split(".")[0], version)))
    directory = f"kubernetes-json-schema/v{_schema_version()}-local-strict"
    schema = kubernetes_schemas.schema_contents(f"{directory}/{name}.json", KUBERNETES)
    return jsonschema.Draft202012Validator(schema, registry=_core_definitions(directory))


@cache
def _core_definitions(directory: str) -> Any:
    definitions = Resource.from_contents(
        kubernetes_schemas.schema_contents(f"{directory}/_definitions.json", KUBERNETES)
    )
    return definitions @ Registry()


@cache
def _schema_version() -> str:
    versions = [version for version in _versions() if version.startswith(f"{KUBERNETES}.")]
    return versions[-1]


def _versions() -> list[str]:
    names: list[str] = kubernetes_schemas.all_versions()
    return [name.partition("-")[0] for name in names]


def _model_of(field: str) -> type[BaseModel]:
    annotation: Any = ServeDeploySchema.model_fields[field].annotation
    model: type[BaseModel] = getattr(annotation, "__args__", [annotation])[0]
    return model


def _unknown_fields(model: type[BaseModel], values: Manifest, where: str) -> Iterator[str]:
    for name in sorted(set(values) - set(model.model_fields)):
        yield f"{where}: there is no field {name}"


def _errors(validator: Any, item: Manifest, where: str) -> Iterator[str]:
    for error in validator.iter_errors(item):
        yield f"{where}: {'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"


def _is_core(api_version: str) -> bool:
    group = api_version.rpartition("/")[0]
    return "." not in group or group in ("networking.k8s.io", "rbac.authorization.k8s.io", "scheduling.k8s.io")


def _title(item: Manifest) -> str:
    return f"{item['kind']} {item['metadata']['name']}"


CHECKS = (
    core_kinds_have_their_shape,
    ray_service_has_its_shape,
    custom_resources_have_their_shape,
    serve_config_has_its_shape,
    settings_are_accepted,
)
