"""`outrider plan`: an overlay of k8s/ for a pair on named GPUs, with as many replicas as a load needs.

Knows the overlays and their settings; what the pair needs is from `needs`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from typer import Option

from core.errors import ConfigError, StartupError
from deploy.cli.generate import EXIT_FAILED
from deploy.cli.planning.needs import Needs, NeedsOptions, needs_of
from deploy.cli.planning.needs_report import lines
from deploy.cli.terminal import say, working

Overlay = Literal["gke", "eks", "onprem"]
GKE, INSTANCE, PRODUCT = (
    "cloud.google.com/gke-accelerator",
    "node.kubernetes.io/instance-type",
    "nvidia.com/gpu.product",
)
NODES: Mapping[str, Mapping[tuple[str, int], Mapping[str, str]]] = {
    "gke": {
        (gpu, count): {GKE: name}
        for gpu, name in {
            "l4": "nvidia-l4",
            "a100": "nvidia-a100-80gb",
            "h100": "nvidia-h100-80gb",
            "h200": "nvidia-h200-141gb",
            "b200": "nvidia-b200",
        }.items()
        for count in (1, 2, 4, 8)
    },
    "eks": {
        ("l4", 1): {INSTANCE: "g6.4xlarge"},
        ("l4", 4): {INSTANCE: "g6.12xlarge"},
        ("l4", 8): {INSTANCE: "g6.48xlarge"},
        ("a10g", 1): {INSTANCE: "g5.4xlarge"},
        ("a10g", 4): {INSTANCE: "g5.12xlarge"},
        ("a10g", 8): {INSTANCE: "g5.48xlarge"},
        ("l40s", 1): {INSTANCE: "g6e.4xlarge"},
        ("l40s", 4): {INSTANCE: "g6e.12xlarge"},
        ("l40s", 8): {INSTANCE: "g6e.48xlarge"},
        ("a100", 8): {INSTANCE: "p4de.24xlarge"},
        ("h100", 1): {INSTANCE: "p5.4xlarge"},
        ("h100", 8): {INSTANCE: "p5.48xlarge"},
        ("h200", 8): {INSTANCE: "p5en.48xlarge"},
        ("b200", 8): {INSTANCE: "p6-b200.48xlarge"},
    },
    "onprem": {
        (gpu, count): {PRODUCT: name}
        for gpu, name in {
            "l4": "NVIDIA-L4",
            "a10g": "NVIDIA-A10G",
            "l40s": "NVIDIA-L40S",
            "a100": "NVIDIA-A100-SXM4-80GB",
            "h100": "NVIDIA-H100-80GB-HBM3",
            "h200": "NVIDIA-H200",
            "b200": "NVIDIA-B200",
        }.items()
        for count in (1, 2, 4, 8)
    },
}
"""Node selectors by overlay, GPU and number of GPUs of a pod."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")
TENSOR_PARALLEL = "components/gpu-tensor-parallel"
ROLES = {"draft": 1, "target": 2}
"""Places of the worker groups in the RayService."""
MIN_TARGETS = 2
"""So that one may die, or its node be emptied."""
MAX_SESSIONS = 62
"""Sessions of a target whose blocks fit into one pass."""
RANK_CPUS, REPLICA_CPUS, RANK_GIB = 4, 4, 48
"""CPUs and memory of a target's pod in components/gpu-tensor-parallel."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(NeedsOptions):
    """Write an overlay of k8s/ that serves a pair on GPUs of your choice, for a load of your choice."""

    target_repo: Annotated[str, Option(metavar="REPO@COMMIT", help="The target on the hub.")]
    draft_repo: Annotated[str, Option(metavar="REPO@COMMIT", help="The draft on the hub.")]
    out: Annotated[Path, Option(metavar="DIR", help="Folder to write; it must be new or empty.")]
    overlay: Annotated[Overlay, Option(help="The overlay of k8s/ to build on.")] = "gke"
    k8s: Annotated[Path, Option(metavar="DIR", help="The folder k8s/ of this project.")] = Path("k8s")


def plan(options: PlanOptions) -> int:
    """Returns the exit status. Raises: ConfigError."""
    gpu = _checked(options)
    try:
        with working("simulating the ways of decoding"):
            needs = needs_of(options, gpu)
        files = overlay_files(options, needs)
    except ConfigError:
        raise
    except StartupError as error:
        sys.stdout.write(f"not servable: {error}\n")
        return EXIT_FAILED
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (options.out / name).write_text(text)
    sys.stdout.write("\n".join([*lines(needs), ""]))
    say(f"wrote {', '.join(files)} to {options.out}; look at it with: kubectl kustomize {options.out}")
    return 0


def _checked(options: PlanOptions) -> str:
    """The target's GPUs. Raises: ConfigError."""
    for name, text in (("--target-repo", options.target_repo), ("--draft-repo", options.draft_repo)):
        if not REPOSITORY.fullmatch(text):
            raise ConfigError(f"{name} must be OWNER/NAME@COMMIT with a commit of 40 hexadecimal digits, got {text!r}")
    if options.gpu is None or options.draft is None:
        raise ConfigError(f"{'--gpu' if options.gpu is None else '--draft'} is needed to plan")
    if not (options.k8s / TENSOR_PARALLEL).is_dir():
        raise ConfigError(f"--k8s: {options.k8s} is not the folder k8s of this project")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ConfigError(f"--out: {options.out} is there, and not an empty folder")
    return options.gpu


def overlay_files(options: PlanOptions, needs: Needs) -> dict[str, str]:
    """The files of the overlay by name. Raises: ConfigError for GPUs that the overlay has no nodes for."""
    component = yaml.safe_load((options.k8s / TENSOR_PARALLEL / "kustomization.yaml").read_text())
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(options.k8s / "overlays" / options.overlay, options.out)],
        "configMapGenerator": component["configMapGenerator"],
        "replacements": component["replacements"],
        "patches": [{"path": "machines.yaml", "target": {"kind": "RayService", "name": "outrider"}}],
    }
    models = _models(options)
    return {
        "kustomization.yaml": yaml.safe_dump(kustomization, sort_keys=False),
        "models.env": "".join(f"{name}={value}\n" for name, value in models.items()),
        "machines.yaml": yaml.safe_dump(
            [*_machines(options.overlay, needs), *_ranks(options.k8s, needs)], sort_keys=False
        ),
        "serve.yaml": yaml.safe_dump(_serve(options, needs), sort_keys=False),
    }


def _models(options: PlanOptions) -> dict[str, str]:
    found = {}
    for role, text in (("TARGET", options.target_repo), ("DRAFT", options.draft_repo)):
        found[f"{role}_MODEL"], _, found[f"{role}_REVISION"] = text.partition("@")
    return found


def _machines(overlay: str, needs: Needs) -> list[dict[str, Any]]:
    """Patches of the RayService: nodes, GPUs and numbers of pods. Raises: ConfigError."""
    patches: list[dict[str, Any]] = []
    for role, place in ROLES.items():
        group = f"/spec/rayClusterConfig/workerGroupSpecs/{place}"
        least, most = _replicas(needs)[role]
        values = {
            "replicas": least,
            "minReplicas": least,
            "maxReplicas": 2 * most,  # in an update a replica starts while the one before it still drains
            "template/spec/nodeSelector": _node(overlay, needs, role),
        }
        patches.append({"op": "test", "path": f"{group}/groupName", "value": role})
        patches += [{"op": "replace", "path": f"{group}/{name}", "value": value} for name, value in values.items()]
    return patches


def _ranks(k8s: Path, needs: Needs) -> list[dict[str, Any]]:
    """Patches of a target's pod with several ranks: the component's, with other sizes."""
    count = needs.target.placed.count
    if count == 1:
        return []
    sizes = {"cpu": str(RANK_CPUS * count + REPLICA_CPUS), "memory": f"{RANK_GIB * count}Gi"}
    sizes |= {"ephemeral-storage": "20Gi", "nvidia.com/gpu": str(count)}
    patches: list[dict[str, Any]] = yaml.safe_load((k8s / TENSOR_PARALLEL / "target.yaml").read_text())
    for patch in patches:
        if patch["path"].endswith("/resources"):
            patch["value"] = {"requests": sizes, "limits": dict(sizes)}
    return patches


def _node(overlay: str, needs: Needs, role: str) -> dict[str, str]:
    model = needs.target if role == "target" else needs.draft
    assert model is not None
    option = "--gpu" if role == "target" else "--draft-gpu"
    place = (model.gpu, model.placed.count)
    if role == "draft" and model.placed.count > 1:
        raise ConfigError(f"{option}: a draft's pod has one GPU")
    if place not in NODES[overlay]:
        known = ", ".join(f"{gpu}:{count}" for gpu, count in NODES[overlay])
        raise ConfigError(f"{option}: {overlay} has no nodes with {place[1]} {place[0]} here; there are {known}")
    return dict(NODES[overlay][place])


def _replicas(needs: Needs) -> dict[str, tuple[int, int]]:
    """The least and the most replicas of each role: those for the load, and twice as many."""
    least = {"target": max(MIN_TARGETS, needs.load.num_targets), "draft": max(1, needs.load.num_drafts)}
    return {role: (num, 2 * num) for role, num in least.items()}


def _serve(options: PlanOptions, needs: Needs) -> dict[str, Any]:
    """The overlay's serve.yaml with this pair."""
    own = options.k8s / "overlays" / options.overlay / "serve.yaml"
    given = own if own.is_file() else options.k8s / "overlays" / "gke" / "serve.yaml"
    config: dict[str, Any] = yaml.safe_load(given.read_text())
    args = config["applications"][0]["args"]
    args["model_name"] = options.target_repo.partition("@")[0].rpartition("/")[2].lower()
    for role, repository, kv_dtype in (
        ("target", options.target_repo, options.kv_dtype),
        ("draft", options.draft_repo, options.draft_kv_dtype),
    ):
        args[role]["engine"]["model"] = f"/models/{repository}"
        least, most = _replicas(needs)[role]
        args[role]["autoscaling"] |= {"min_replicas": least, "max_replicas": most}
        if kv_dtype is not None:
            args[role]["engine"]["kv_dtype"] = kv_dtype
    args["target"]["autoscaling"]["sessions"] = min(MAX_SESSIONS, needs.load.streams)
    if needs.target.placed.count > 1:
        args["target"]["engine"]["tensor_parallel"] = needs.target.placed.count
    return config
