"""The jobs of model-cache fill a volume, with a hub and a check that are scripts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.k8s.compositions import K8S

COMMIT, OTHER = "a" * 40, "b" * 40
HUB = """#!/bin/bash
echo "hf $*" >> "$CALLS"
while [ "$1" != --local-dir ] ; do shift ; done
mkdir -p "$2" && echo half > "$2/model.safetensors"
test ! -e "$VOLUME/hub-is-down" || exit 1
echo whole > "$2/model.safetensors"
"""
CHECK = """#!/bin/bash
echo "outrider $*" >> "$CALLS"
test ! -e "$VOLUME/not-servable"
"""


@dataclass
class Volume:
    """A volume at `path`, and the commands that have run."""

    path: Path
    models: dict[str, str] = field(default_factory=dict)

    def run(self, role: str, revision: str | None = None) -> int:
        """The job that fills the model of `role`."""
        prefix = role.upper()
        if revision is not None:
            self.models[f"{prefix}_REVISION"] = revision
        own = {"MODEL": self.models[f"{prefix}_MODEL"], "REVISION": self.models[f"{prefix}_REVISION"]}
        path = f"{self.path / 'bin'}:{os.environ['PATH']}"
        environment = {**self.models, **own, "PATH": path, "VOLUME": str(self.path), "CALLS": str(self.path / "calls")}
        shell, flags, script = command()
        return subprocess.run([shell, flags, script.replace("/models/", f"{self.path}/")], env=environment).returncode

    def weights(self, model: str, revision: str) -> str | None:
        found = self.path / f"{model}@{revision}" / "model.safetensors"
        return found.read_text().strip() if found.exists() else None

    def calls(self) -> list[str]:
        return (self.path / "calls").read_text().splitlines()


def command() -> list[str]:
    """The command of both jobs."""
    listed, _ = yaml.safe_load_all((K8S / "components" / "model-cache" / "fill.yaml").read_text())
    found = [job["spec"]["template"]["spec"]["containers"][0]["command"] for job in listed["items"]]
    assert found[0] == found[1]
    words: list[str] = found[0]
    return words


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    (tmp_path / "bin").mkdir()
    for name, text in (("hf", HUB), ("outrider", CHECK)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    models = {"TARGET_MODEL": "org/large", "TARGET_REVISION": COMMIT, "DRAFT_MODEL": "org/small"}
    return Volume(tmp_path, {**models, "DRAFT_REVISION": COMMIT})


def test_each_model_comes_to_a_folder_of_its_commit_and_the_pair_is_checked_once_both_are_there(volume: Volume) -> None:
    assert volume.run("target") == volume.run("draft") == 0
    assert volume.weights("org/large", COMMIT) == volume.weights("org/small", COMMIT) == "whole"
    pair = f"--target {volume.path}/org/large@{COMMIT} --draft {volume.path}/org/small@{COMMIT}"
    assert [call for call in volume.calls() if "--draft" in call] == [f"outrider check --no-weights {pair}"]


def test_a_job_that_runs_again_touches_nothing(volume: Volume) -> None:
    assert volume.run("target") == 0
    before = volume.calls()
    assert volume.run("target") == 0
    assert volume.calls() == before


def test_another_commit_leaves_alone_what_is_served(volume: Volume) -> None:
    assert volume.run("target") == volume.run("target", OTHER) == 0
    assert volume.weights("org/large", COMMIT) == volume.weights("org/large", OTHER) == "whole"


@pytest.mark.parametrize("trouble", ["hub-is-down", "not-servable"])
def test_what_is_not_whole_or_not_servable_is_not_there_and_the_next_run_goes_on(volume: Volume, trouble: str) -> None:
    (volume.path / trouble).touch()
    assert volume.run("target") != 0
    assert volume.weights("org/large", COMMIT) is None
    (volume.path / trouble).unlink()
    assert volume.run("target") == 0
    assert volume.weights("org/large", COMMIT) == "whole"


@pytest.mark.parametrize("revision", ["main", COMMIT[:12], COMMIT.upper()])
def test_a_branch_is_refused_before_anything_is_downloaded(volume: Volume, revision: str) -> None:
    assert volume.run("target", revision) != 0
    assert not (volume.path / "calls").exists()
