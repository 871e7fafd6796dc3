"""Runs a function of a test module in a process of its own, since Triton reads its settings once, at import."""

from __future__ import annotations

import os
import subprocess
import sys


def run(module: str, code: str, **variables: str) -> str:
    """The output of `code`, in which the module is `t`; with these environment variables, and none of Triton's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", f"import {module} as t; {code}"],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
