"""The autoscaler's container, as the manifest has it: it starts what has ended again, and ends when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import yaml

from bench.harness.nodes import REPOSITORY
from tests.k8s.autoscaler_policies import AUTOSCALER_COMMAND

PAUSE = "sleep 5"
TIMEOUT_S = 30.0


def options() -> dict[str, list[str]]:
    service = yaml.safe_load((REPOSITORY / "k8s" / "base" / "ray-service.yaml").read_text())
    found: dict[str, list[str]] = service["spec"]["rayClusterConfig"]["autoscalerOptions"]
    return found


def test_an_autoscaler_that_dies_is_started_again_and_goes_with_its_pod(tmp_path: Path) -> None:
    """The first two die, the third one lives until the pod ends."""
    (script := tmp_path / "autoscaler").write_text(
        f'echo started >> "{tmp_path}/starts"\n'
        f'test "$(wc -l < "{tmp_path}/starts")" -lt 3 && exit 7\n'
        f'trap "echo stopped; exit" TERM\necho lives\nwhile true ; do sleep 0.1 ; done\n'
    )
    (args,) = options()["args"]
    assert PAUSE in args
    command = [*options()["command"], args.replace(PAUSE, "sleep 0.1")]
    environment = {**os.environ, AUTOSCALER_COMMAND: f"/bin/bash {script}"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as container:
        try:
            assert container.stdout is not None
            assert container.stdout.readline() == "lives\n"
            container.send_signal(signal.SIGTERM)
            rest, said = container.communicate(timeout=TIMEOUT_S)
        finally:
            if container.poll() is None:
                os.killpg(container.pid, signal.SIGKILL)
    assert rest == "stopped\n"
    assert (tmp_path / "starts").read_text() == "started\n" * 3
    assert said.count("the autoscaler ended with 7") == 2
