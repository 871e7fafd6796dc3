"""Clients that others have written, unchanged, each in an environment of its own, drive the running demo pair.

The programs are in `programs`; `make clients` makes the environments and runs these tests alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from local import DEMO
from served import Guarded

HERE = Path(__file__).parent
ENVIRONMENTS = Path(sys.prefix) / "clients"
TIMEOUT_S = 240
PROGRAMS = {
    "with_instructor": "instructor",
    "with_langchain": "langchain",
    "with_litellm": "litellm",
    "with_litellm_proxy": "litellm",
    "with_llm": "llm",
    "with_lm_eval": "lm-eval",
    "with_openai_agents": "openai-agents",
    "with_pydantic_ai": "pydantic-ai",
}
"""And the environment of each, by the name of its requirements."""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_client_of_python_s_works_unchanged(guarded, tmp_path, program):
    environment = require(PROGRAMS[program])
    run([environment / "bin" / "python", HERE / "programs" / f"{program}.py"], guarded, tmp_path)


def test_the_ai_sdk_of_npm_works_unchanged(guarded, tmp_path):
    """A program finds packages beside itself alone."""
    environment = require("ai-sdk")
    (tmp_path / "node_modules").symlink_to(environment / "node_modules")
    run([Path("node"), shutil.copy(HERE / "programs" / "with_ai_sdk.mjs", tmp_path)], guarded, tmp_path)


def require(name: str) -> Path:
    """The environment, where it has been made."""
    environment = ENVIRONMENTS / name
    if not (environment / ".installed").exists():
        pytest.skip(f"{environment} is not there; make clients makes it")
    return environment


def run(command: list[Path], server: Guarded, folder: Path) -> None:
    """Raises: AssertionError with what the program says, where a check of it fails."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    told = {"SERVER_URL": server.url, "SERVER_KEY": server.token, "TOKENIZER_DIR": str(DEMO / "target")}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**own, **told, "HOME": str(folder)},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held" in done.stdout, "a program without checks says nothing"
