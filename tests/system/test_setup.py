"""`make setup` takes the build of torch that the machine can use, from an index that it can reach."""

from __future__ import annotations

import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:1"


class _Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def index():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def torch_install(folder: Path, smi: str, *variables: str) -> str:
    """The command for torch, on a machine where `nvidia-smi` does as the shell commands `smi`."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (folder / "nvidia-smi").chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name not in {"TORCH"}
    }
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "no_proxy": "127.0.0.1"}
    command = ["make", "--dry-run", "--always-make", "setup", *variables]
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in printed.splitlines() if line.endswith(" torch")]
    return line


NO_DRIVER = "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9"
A_GPU = "echo 'GPU 0: NVIDIA L4 (UUID: GPU-0)'"


@pytest.mark.parametrize("smi", ["exit 127", NO_DRIVER, "echo 'No devices were found'"])
def test_without_a_gpu_builds_for_the_cpu_are_asked_for(tmp_path, index, smi):
    assert f"--extra-index-url {index} torch" in torch_install(tmp_path, smi, f"CPU_TORCH_INDEX={index}")


def test_where_their_index_cannot_be_reached_that_of_pip_decides(tmp_path):
    assert "index" not in torch_install(tmp_path, "exit 127", f"CPU_TORCH_INDEX={NOBODY}")


def test_with_a_gpu_the_usual_build_is_taken(tmp_path, index):
    assert "index" not in torch_install(tmp_path, A_GPU, f"CPU_TORCH_INDEX={index}")


@pytest.mark.parametrize(("build", "asks"), [("cpu", True), ("cuda", False)])
def test_the_build_can_be_named(tmp_path, index, build, asks):
    line = torch_install(tmp_path, A_GPU if asks else "exit 127", f"CPU_TORCH_INDEX={index}", f"TORCH={build}")
    assert ("index" in line) is asks
