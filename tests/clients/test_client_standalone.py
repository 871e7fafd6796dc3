"""The distribution by itself: it installs, and works where there is nothing of this project, nor of Ray or torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grpc
import pytest

from tests.clients.scripted import Scripted, chunk, listening

SOURCE = Path(__file__).parents[2] / "clients" / "python"
LONE = """
import sys

ALLOWED = sys.stdlib_module_names | {"outrider_client", "grpc", "google", "typing_extensions"}


class OnlyItsDependencies:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED or name.startswith(("google.rpc", "google.api")):
            raise ModuleNotFoundError(f"{name} is not a dependency of outrider-client", name=name)


sys.meta_path.insert(0, OnlyItsDependencies())
import asyncio
import outrider_client

address = sys.argv[1]
with outrider_client.Client(address) as client:
    print(outrider_client.__file__, client.generate("x").token_ids)


async def main():
    async with outrider_client.AsyncClient(address) as client:
        print((await client.generate("x")).text)


asyncio.run(main())
try:
    import numpy
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the distribution has been installed, from a copy: building leaves files behind."""
    directory = tmp_path_factory.mktemp("client")
    shutil.copytree(SOURCE, directory / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", directory / "site", directory / "source"], check=True)
    return directory / "site"


@pytest.mark.thorough
def test_it_needs_nothing_but_its_dependencies(installed):
    with listening(Scripted([chunk(7, 8, total=2, is_last=True)])) as address:
        command = [sys.executable, "-c", LONE, address]
        done = subprocess.run(
            command, cwd=installed.parent, env={"PYTHONPATH": str(installed)}, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == f"{installed / 'outrider_client' / '__init__.py'} (7, 8)"
    assert second == "78"
    assert third == "numpy is not a dependency of outrider-client"


@pytest.mark.thorough
def test_it_brings_its_types_and_all_modules(installed):
    def names(directory):
        kinds = (".py", ".pyi", ".typed")
        return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.suffix in kinds} | {
            str(file.relative_to(directory)) for file in directory.rglob("py.typed")
        }

    assert names(installed / "outrider_client") == names(SOURCE / "outrider_client")
    assert (installed / "outrider_client" / "py.typed").exists()


def test_it_demands_what_its_generated_code_demands():
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    lowest = dict(dependency.split(">=") for dependency in project["dependencies"])
    proto = SOURCE / "outrider_client" / "_proto"
    stubs = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (proto / "generation_pb2_grpc.py").read_text())
    messages = re.search(r"Protobuf Python Version: ([\d.]+)", (proto / "generation_pb2.py").read_text())
    assert lowest == {"grpcio": stubs[1], "protobuf": messages[1]}
    assert grpc.__version__ >= stubs[1]
