"""deploy/Dockerfile, as far as it can be judged without building it."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib

import pytest

from deploy.cli.serve import ServeOptions
from tests.deploy.cli.parsing import parsed
from tests.k8s.compositions import ROOT
from tests.k8s.model_policies import IMAGE_ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
LINES = [line.strip() for line in DOCKERFILE.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
COPIED = [word for line in LINES if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]]
LET_IN = [
    line[1:] for line in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
]


def test_what_is_copied_is_there_and_is_let_in() -> None:
    assert [name for name in COPIED if not (ROOT / name).exists()] == []
    assert sorted(COPIED) == sorted(LET_IN)


def test_the_image_has_every_layer_and_the_demo_pair() -> None:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    assert {*layers, "protos", "models", "constraints.txt"} <= set(COPIED)


def test_code_is_where_manifests_look_for_the_demo_pair() -> None:
    assert f"WORKDIR {IMAGE_ROOT}" in LINES


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_final_stages_run_without_rights_and_without_pip_s_work(stage: str) -> None:
    body = DOCKERFILE.split(f"AS {stage}\n")[1].split("\nFROM ")[0]
    assert "USER 1000:1000" in body
    assert f"COPY --from=build-{stage} {IMAGE_ROOT} {IMAGE_ROOT}" in body
    assert f"FROM runtime AS {stage}" in LINES


def test_everything_is_pinned() -> None:
    installs = [part for line in LINES for part in re.split(r"&&", line) if "pip install" in part]
    assert installs
    assert all("--constraint constraints.txt" in install for install in installs)
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize(
    ("version", "image", "is_built"),
    [
        ("0.1.0.dev0", "python:3.11.14-slim-bookworm", True),
        ("0.2.0", "python:3.11.14-slim-bookworm", False),
        ("0.2.0", f"python:3.11.14-slim-bookworm@sha256:{'0' * 64}", True),
        ("0.2.0", "registry.example.com/python-dev:3.11.14", False),
        ("", "python:3.11.14-slim-bookworm", False),
    ],
)
def test_a_release_is_built_from_a_base_image_by_digest(version: str, image: str, is_built: bool) -> None:
    (command,) = (line.removeprefix("RUN ") for line in LINES if line.startswith("RUN case"))
    environment = {"VERSION": version, "PYTHON_IMAGE": image}
    done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is is_built
    assert is_built or "--build-arg PYTHON_IMAGE=NAME@sha256:DIGEST" in done.stderr


def test_the_image_says_what_it_is_and_what_is_in_it() -> None:
    labels = set(re.findall(r"org\.opencontainers\.image\.([a-z.]+)=", DOCKERFILE))
    assert {"title", "licenses", "version", "revision", "base.name"} <= labels
    for stage in ("cpu", "cuda"):
        assert "pip inspect > packages.json" in DOCKERFILE.split(f"AS build-{stage}\n")[1].split("\nFROM ")[0]


def test_its_command_serves_others_than_the_container_itself_at_the_ports_it_names() -> None:
    (command,) = (json.loads(line.removeprefix("CMD ")) for line in LINES if line.startswith("CMD "))
    assert command[:2] == ["outrider", "serve"]
    options = parsed(ServeOptions, command[2:])
    assert options.host == "0.0.0.0"
    assert f"EXPOSE {options.grpc_port} {options.http_port} {options.metrics_port}" in LINES
