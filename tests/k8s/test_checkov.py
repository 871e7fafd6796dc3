"""checkov's rules over every composition; the pods inside the RayService are shown to it as pods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.changes import container, container_drop, ray
from tests.k8s.compositions import OPTIONS, OVERLAYS, Composition, objects
from tests.k8s.manifests import Manifest, Objects, ray_pods

CHECKOV = Path(sys.prefix) / "checkov" / "bin" / "checkov"
"""In an environment of its own; `make k8s` makes it."""
SETTINGS = Path(__file__).parent / "checkov.yaml"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_checkov_has_nothing_to_say(overlay: str, tmp_path: Path) -> None:
    report = checkov(objects(Composition(overlay, OPTIONS)), tmp_path, yaml.safe_load(SETTINGS.read_text()))
    assert report["summary"]["passed"] > 100
    assert report["summary"]["parsing_errors"] == 0
    assert not complaints(report), "\n".join(sorted(complaints(report)))


def test_checkov_sees_the_pods_inside_the_ray_service_and_no_rule_is_skipped_in_vain(tmp_path: Path) -> None:
    rendered = objects(Composition("gke", OPTIONS))
    container("draft", "securityContext", "privileged", to=True)(rendered)
    container_drop("target", "livenessProbe")(rendered)
    ray("orchestrator", "spec", "hostNetwork", to=True)(rendered)
    settings = yaml.safe_load(SETTINGS.read_text())
    skipped = set(settings.pop("skip-check"))
    found = {complaint.split(" ")[0] for complaint in complaints(checkov(rendered, tmp_path, settings))}
    assert {"CKV_K8S_16", "CKV_K8S_8", "CKV_K8S_19"} <= found
    assert skipped <= found


def checkov(rendered: Objects, directory: Path, settings: Manifest) -> dict[str, Any]:
    """Its report on these objects."""
    if not CHECKOV.exists():
        pytest.fail(f"{CHECKOV} is not there; make k8s installs it")
    manifests = directory / "manifests"
    manifests.mkdir()
    text = yaml.safe_dump_all([*rendered, *(as_pod(pod.role, pod.template) for pod in ray_pods(rendered))])
    (manifests / "all.yaml").write_text(text)
    (directory / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = [str(CHECKOV), "--config-file", str(directory / "settings.yaml"), "--directory", str(manifests)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, "--output", "json"], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def as_pod(role: str, template: Manifest) -> Manifest:
    metadata = {**template["metadata"], "name": f"ray-{role}", "namespace": "outrider"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def complaints(report: dict[str, Any]) -> list[str]:
    failed = report["results"]["failed_checks"]
    return [f"{check['check_id']} {check['resource']}: {check['check_name']}" for check in failed]
