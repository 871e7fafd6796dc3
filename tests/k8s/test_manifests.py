"""Every composition of k8s/ builds, has the shape its schemas ask for, and keeps to every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.k8s import (
    autoscaler_policies,
    gpu_policies,
    model_policies,
    monitoring_policies,
    network_policies,
    picker_policies,
    pod_policies,
    schema_checks,
    serve_policies,
    service_policies,
)
from tests.k8s.compositions import (
    ALL,
    EIGHT,
    K8S,
    MIG,
    MODELS_ELSEWHERE,
    OPTIONS,
    OVERLAYS,
    TENSOR_PARALLEL,
    TWO_NODES,
    Composition,
    objects,
)
from tests.k8s.manifests import Objects, pods
from tests.k8s.network_policies import egress

MODULES = (
    schema_checks,
    pod_policies,
    serve_policies,
    model_policies,
    gpu_policies,
    autoscaler_policies,
    network_policies,
    service_policies,
    picker_policies,
    monitoring_policies,
)
CHECKS: dict[str, Callable[[Objects], Iterator[str]]] = {
    check.__name__: check for module in MODULES for check in module.CHECKS
}


def is_one_option(composition: Composition) -> bool:
    """Whether an option stands alone on another overlay than gke, where each stands alone, too."""
    return composition.overlay != "gke" and len(composition.components) == 1 and composition.components[0] in OPTIONS


@pytest.mark.parametrize(
    "composition",
    [pytest.param(each, id=str(each), marks=pytest.mark.ci if is_one_option(each) else ()) for each in ALL],
)
def test_composition_keeps_to_every_policy(composition: Composition) -> None:
    rendered = objects(composition)
    complaints = [f"{name}: {complaint}" for name, check in CHECKS.items() for complaint in check(rendered)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("address", ["172.20.0.10", "10.100.0.10"])
def test_names_are_resolved_where_eks_has_no_dns_pods(address: str) -> None:
    rendered = objects(Composition("eks"))
    for pod in pods(rendered):
        assert egress(rendered, pod.labels, address, None, 53, "UDP"), pod.where
        assert egress(rendered, pod.labels, address, None, 53), pod.where


def test_every_folder_is_composed() -> None:
    overlays = {path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml")}
    components = {path.parent.name for path in K8S.glob("components/*/kustomization.yaml")}
    named = "".join(path.read_text() for path in K8S.glob("overlays/*/kustomization.yaml"))
    assert overlays == set(OVERLAYS)
    assert {name for name in components if f"components/{name}" not in named} == {
        TENSOR_PARALLEL,
        EIGHT,
        TWO_NODES,
        MIG,
        *MODELS_ELSEWHERE,
        *OPTIONS,
    }


def test_checks_have_names_of_their_own() -> None:
    assert len(CHECKS) == sum(len(module.CHECKS) for module in MODULES)
