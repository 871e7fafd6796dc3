"""The blocking client is what its generator makes of the one for asyncio."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "clients" / "python"


def check(folder):
    return subprocess.run([sys.executable, folder / "blocking.py", "--check"], capture_output=True, text=True)


@pytest.mark.thorough
def test_the_blocking_client_is_generated(tmp_path):
    assert check(SOURCE).stderr == ""
    shutil.copytree(SOURCE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "copy" / "outrider_client" / "client.py"
    file.write_text(file.read_text().replace("POLL_S)", "POLL_S * 2)"))
    changed = check(tmp_path / "copy")
    assert changed.returncode == 1
    assert "client.py is not what aio.py gives" in changed.stderr
