"""An installed wheel has what runs and nothing else, works from any folder, and says who has taken one of its names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"core", "orchestrator", "workers", "simulation", "protos", "deploy", "outrider", "models"}
IN_PROCESS = """
from outrider import LLM
with LLM(settings={"target.engine.num_threads": 1}, progress=False) as llm:
    [output] = llm.generate("import os", max_tokens=8, temperature=0)
print(len(output.token_ids), llm.config.target.engine.model)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Wheels of the distribution and its client, built from a copy, since setuptools writes where it builds."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheels")
    built = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for folder in (*OURS, "bench", "clients"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=built)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out]
    run(sys.executable, "-m", *command, copy, copy / "clients" / "python")
    return sorted(out.glob("*.whl"))


def run(*command, cwd=ROOT, fails=False, **variables):
    """Its output; it sees none of the variables by which Python finds packages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def environment(folder: Path) -> Path:
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def install(python: Path, *wheels: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--no-compile", *wheels)


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory):
    """The interpreter of an environment with the wheels; what they require it borrows from this one."""
    python = environment(tmp_path_factory.mktemp("environment"))
    install(python, *wheels)
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(purelib, "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_it_has_what_runs_and_the_demo_pair(wheels):
    names = [name for wheel in wheels for name in ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {*OURS, "outrider_client"}
    assert {name for name in names if name.startswith("models/") and name.endswith(".py")} == {"models/__init__.py"}
    modules = {str(path.relative_to(ROOT)) for name in OURS - {"models"} for path in (ROOT / name).rglob("*.py")}
    assert modules - set(names) == set()
    assert {"models/demo/draft/model.safetensors", "deploy/http/page/page.html", "simulation/traces/demo.npz"} <= set(
        names
    )


def test_it_asks_for_the_client_of_its_own_version():
    ours, client = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "clients/python")
    )
    assert f"outrider-client=={client['version']}" in ours["dependencies"]
    assert ours["version"] == client["version"]


@pytest.mark.ci
def test_commands_run_from_another_folder(python, tmp_path):
    outrider = python.parent / "outrider"
    assert "outrider 0.1.0" in run(outrider, "--version", cwd=tmp_path)
    demo = Path(run(python, "-c", "import models; print(models.__path__[0])", cwd=tmp_path).strip()) / "demo"
    assert ROOT not in demo.parents
    said = run(outrider, "check", "--target", demo / "target", "--draft", demo / "draft", cwd=tmp_path)
    assert "servable: draft and target share" in said
    assert "70b" in run(outrider, "simulate", "--help", cwd=tmp_path)


@pytest.mark.ci
def test_batches_run_from_another_folder(python, tmp_path):
    number, model = run(python, "-c", IN_PROCESS, cwd=tmp_path).split()[-2:]
    assert number == "8"
    assert ROOT not in Path(model).parents


@pytest.mark.slow
def test_it_runs_with_what_it_requires_and_nothing_else(wheels, tmp_path):
    """Takes a minute, and an index of packages."""
    python = environment(tmp_path / "environment")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", *wheels)
    run(*pip, "check")
    assert run(python, "-c", IN_PROCESS, cwd=tmp_path).split()[-2] == "8"


@pytest.mark.parametrize("shadow", ["core/__init__.py", "core/util.py", "workers.py"])
def test_a_package_in_the_place_of_ours_is_named(python, tmp_path, shadow):
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text("")
    name = shadow.split("/")[0].removesuffix(".py")
    is_seen = shadow != "core/util.py"  # a folder without __init__ gives way to ours
    said = run(python.parent / "outrider", "--version", cwd=tmp_path, fails=is_seen, PYTHONPATH=str(tmp_path))
    imported = run(python, "-c", "from outrider import LLM", cwd=tmp_path, fails=is_seen)
    for text in (said, imported):
        assert (f"{tmp_path / name}" in text and f"in place of Outrider's package '{name}'" in text) is is_seen


def test_a_package_that_was_imported_before_is_named(python, tmp_path):
    (tmp_path / "deploy.py").write_text("")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import deploy; sys.path.pop(0); from outrider import LLM"
    )
    assert "in place of Outrider's package 'deploy'" in run(python, "-c", script, fails=True)


def test_a_distribution_that_overwrites_ours_is_named(wheels, tmp_path):
    other = tmp_path / "other"
    (other / "workers").mkdir(parents=True)
    (other / "workers" / "__init__.py").write_text("'''Another's.'''\n")
    (other / "pyproject.toml").write_text('[project]\nname = "many-workers"\nversion = "1"\n')
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path)
    run(sys.executable, "-m", "pip", "wheel", *options, other)
    python = environment(tmp_path / "environment")
    install(python, *wheels)
    install(python, *tmp_path.glob("many_workers*.whl"))
    said = run(python.parent / "outrider", "check", cwd=tmp_path, fails=True)
    assert "workers has been overwritten by another distribution (many-workers)" in said
