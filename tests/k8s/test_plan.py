"""Overlays that `outrider plan` writes build, have the planned sizes, and keep to every policy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.cli import main
from tests.k8s.compositions import K8S, find_kubectl
from tests.k8s.manifests import Manifest, pods, ray_service
from tests.k8s.test_manifests import CHECKS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIGS = K8S.parent / "bench" / "checkpoints" / "configs"


def config(folder: Path, name: str) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text())["config"]))
    return file


def planned(folder: Path, *argv: str) -> list[Manifest]:
    """The objects of the overlay that is written to `folder` / out."""
    target, draft = config(folder, "llama-3.3-70b-instruct"), config(folder, "llama-3.2-1b-instruct")
    models = ("--target", str(target), "--draft", str(draft))
    repositories = ("--target-repo", f"a/big@{COMMIT}", "--draft-repo", f"a/small@{COMMIT}")
    where = ("--k8s", str(K8S), "--out", str(folder / "out"))
    assert main.main(["plan", *models, *repositories, *where, "--output-tokens", "8", *argv]) == 0
    done = subprocess.run(
        [find_kubectl(), "kustomize", str(folder / "out")], capture_output=True, text=True, timeout=60, check=True
    )
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


@pytest.mark.parametrize(
    ("gpus", "overlay", "count"),
    [
        ("h200:4", "gke", 4),
        ("h100:8", "eks", 8),
        ("h200:2", "onprem", 2),
        pytest.param("b200", "gke", 1, marks=pytest.mark.ci),
    ],
)
def test_a_planned_overlay_keeps_to_every_policy(gpus: str, overlay: str, count: int, tmp_path: Path) -> None:
    objects = planned(tmp_path, "--gpu", gpus, "--draft-gpu", "l4", "--overlay", overlay, "--rate", "100")
    complaints = [f"{name}: {complaint}" for name, check in CHECKS.items() for complaint in check(objects)]
    assert complaints == []
    (pod,) = (pod for pod in pods(objects) if pod.role == "target" and pod.group is not None)
    assert pod.ray["resources"]["limits"]["nvidia.com/gpu"] == str(count)
    settings = yaml.safe_load(ray_service(objects)["serveConfigV2"])["applications"][0]["args"]
    assert settings["target"]["engine"]["model"] == f"/models/a/big@{COMMIT}"
    assert settings["target"]["engine"].get("tensor_parallel", 1) == count
    least = settings["target"]["autoscaling"]["min_replicas"]
    assert least > 2
    assert pod.group is not None
    assert (pod.group["minReplicas"], pod.group["maxReplicas"]) == (least, 4 * least)
