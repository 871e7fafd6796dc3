"""The overlays and components that are put together, and what kustomize makes of them. Knows no policy."""

from __future__ import annotations

import os
import shutil
import subprocess
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from tests.k8s.manifests import Manifest

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("cpu-demo", "gke", "eks", "aks", "onprem")
ON_GKE = ("aks", "onprem")
"""Overlays that change gke's machines and storage, and nothing else."""
OPTIONS = (
    "gcs-fault-tolerance",
    "gateway-tls",
    "inference-pool",
    "caller-tokens",
    "link-tls",
    "priority-classes",
    "monitoring",
)
"""Components that any overlay takes; the others belong to overlays that name them."""
TENSOR_PARALLEL = "gpu-tensor-parallel"
"""On top of an overlay with GPUs, before the others."""
EIGHT = "gpu-tensor-parallel-8"
"""On top of that one."""
TWO_NODES = "gpu-two-nodes"
"""In place of that one."""
MIG = "gpu-mig"
"""On top of an overlay with GPUs."""
MODELS_ELSEWHERE = ("model-s3", "model-image")
"""In place of what model-cache has."""
SKIP_VARIABLE = "OUTRIDER_WITHOUT_KUBECTL"


@dataclass(frozen=True, slots=True)
class Composition:
    """An overlay with optional components on top."""

    overlay: str
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.overlay, *self.components))


DEMO = Composition("cpu-demo")
EVERYTHING = Composition("gke", OPTIONS)
SLICED = Composition("gke", (MIG, *OPTIONS))
LARGE = Composition("gke", (TENSOR_PARALLEL, *OPTIONS))
IN_STAGES = Composition("gke", (TENSOR_PARALLEL, TWO_NODES, *OPTIONS))
LARGEST = Composition("gke", (TENSOR_PARALLEL, EIGHT, MIG, *OPTIONS))
ALL = (
    *(
        Composition(overlay, components)
        for overlay in OVERLAYS
        for components in ((), *((option,) for option in OPTIONS if overlay not in ON_GKE), OPTIONS)
    ),
    *(Composition("gke", (each,)) for each in MODELS_ELSEWHERE),
    Composition("gke", (MIG,)),
    Composition("gke", (TENSOR_PARALLEL,)),
    LARGE,
    IN_STAGES,
    LARGEST,
    SLICED,
)


@cache
def render(composition: Composition) -> str:
    """The YAML that `kubectl apply` would get. Fails the test, with kustomize's words, if there is none."""
    kubectl = find_kubectl()
    with TemporaryDirectory(prefix="outrider-k8s-") as directory:
        here = Path(directory).resolve()
        (here / "kustomization.yaml").write_text(yaml.safe_dump(_kustomization(composition, here)))
        done = subprocess.run(
            [kubectl, "kustomize", str(here)], capture_output=True, text=True, timeout=60, check=False
        )
    if done.returncode:
        pytest.fail(f"{composition} does not build: {done.stderr}")
    return done.stdout


def objects(composition: Composition) -> list[Manifest]:
    """A fresh copy of all objects of `composition`."""
    return deepcopy(_parsed(composition))


def find_kubectl() -> str:
    """The path of kubectl.

    Without it the tests fail, since a skipped check looks like a passed one; who has none and knows it says so by
    setting OUTRIDER_WITHOUT_KUBECTL, and reads the reason in pytest's summary.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        return kubectl
    if os.environ.get(SKIP_VARIABLE):
        pytest.skip(f"kubectl is not installed, and {SKIP_VARIABLE} is set: the manifests were NOT checked")
    pytest.fail(f"kubectl is needed to build the manifests of k8s/; install it, or set {SKIP_VARIABLE}=1 to go without")


@cache
def _parsed(composition: Composition) -> list[Manifest]:
    return list(yaml.load_all(render(composition), yaml.CSafeLoader))


def _kustomization(composition: Composition, here: Path) -> dict[str, object]:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(K8S / "overlays" / composition.overlay, here)],
        "components": [os.path.relpath(K8S / "components" / name, here) for name in composition.components],
    }
