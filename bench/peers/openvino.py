"""OpenVINO GenAI's environment, its copy of the weights, and its process.

Knows the PyPI packages `openvino-genai` and `optimum-intel`; must not know our server.
"""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

from bench.models.sizes import read_shape
from core.errors import StartupError

PACKAGES = ("torch==2.13.0", "openvino-genai", "optimum-intel[openvino]")
SOURCE = Path(__file__).parents[2]


def installed(folder: Path) -> Path:
    """The interpreter of an environment that this makes."""
    if not (folder / "bin/optimum-cli").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", *PACKAGES], check=True)
    return folder / "bin/python"


def exported(python: Path, source: Path, target: Path) -> Path:
    """The checkpoint as OpenVINO reads it. Raises: StartupError if `target` was made from another model."""
    if not (target / "openvino_model.bin").exists():
        program, task = python.with_name("optimum-cli"), "text-generation-with-past"
        subprocess.run([program, "export", "openvino", "--model", source, "--task", task, target], check=True)
    if (shape := read_shape(target)) != read_shape(source):
        raise StartupError(f"{target} has another shape than {source}: {shape}, not {read_shape(source)}")
    return target


def start(python: Path, model: Path, port: int, *, num_threads: int, num_guesses: int) -> subprocess.Popen[bytes]:
    """Start the server; the caller waits until it answers, and ends it. Without guesses it decodes plainly."""
    arguments = ["-m", "bench.peers.openvino_server", model, num_threads, num_guesses, port]
    return subprocess.Popen(
        [python, *map(str, arguments)], env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
