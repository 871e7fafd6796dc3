"""Why a service does not start is said in one line, whoever raised it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deploy.launch import application

FAILED = RuntimeError("Deploying application outrider failed: Failed to update the deployments ['target'].")
TRACE = """The deployment failed to start 3 times in a row. Error:
ray::target.__init__() (pid=1)
  File "deploy/serve/deployments.py", line 1, in __init__
    await self._current.load()
           ^^^^^^^^^^^^^^^^^^
{}"""
OURS = "core.errors.CheckpointError: m has no tokenizer.json"
TORCHS = "RuntimeError: Expected one of cpu, cuda device type at start of device string: gpu"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (TRACE.format(OURS), "m has no tokenizer.json"),
        (TRACE.format(TORCHS), f"target does not start: {TORCHS}"),
        (TRACE.format(f"ray.exceptions.RayTaskError({TORCHS})\n{TORCHS}"), f"target does not start: {TORCHS}"),
        ("Deployment 'target' has 1 replicas that have taken more than 30s to initialize.", str(FAILED)),
        ("", str(FAILED)),
    ],
)
def test_the_cause_is_told(message: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = {"draft": SimpleNamespace(message=""), "target": SimpleNamespace(message=message)}
    found = SimpleNamespace(applications={application.APPLICATION: SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(application.serve, "status", lambda: found)
    assert application._reason(FAILED) == reason
