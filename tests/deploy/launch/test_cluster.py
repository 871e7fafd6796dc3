"""Messages about a cluster on a terminal; starting and stopping one is tested wherever tests use Ray."""

from __future__ import annotations

import socket

import pytest
from ray._private import worker as ray_worker

from core.errors import StartupError
from deploy.launch import cluster

ADVICE = (
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, "
    "check the logs for the dead worker. Lease ID: 0a00 Worker ID: 4617 Node ID: c64f Worker IP address: 192.0.2.2 "
    "Worker port: 40953 Worker PID: 30416 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits "
    "with a connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM "
    "killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly."
)


def test_a_death_is_told_in_a_line_and_other_news_as_they_are(monkeypatch, capsys):
    """Through Ray's own function; once, however many clusters a process starts one after the other."""
    monkeypatch.setattr(ray_worker, "print_to_stdstream", ray_worker.print_to_stdstream)
    cluster._shorten_advice()
    cluster._shorten_advice()
    for lines in ([ADVICE], ["The node is full."]):
        ray_worker.print_to_stdstream({"lines": lines, "pid": "raylet", "is_err": False}, ignore_prefix=True)
    death, other = capsys.readouterr().out.splitlines()
    assert "process 30416 has died" in death
    assert "OOM" not in death
    assert "The node is full." in other


def test_free_ports_are_those_of_the_range_that_nobody_has_and_each_comes_once(monkeypatch):
    with socket.create_server((cluster.HOST, 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(cluster, "PORTS", range(port, port + 1))
        with pytest.raises(StartupError, match=f"no port from {port} to {port} is free"):
            next(cluster._free_ports())
    assert next(cluster._free_ports()) == port
    monkeypatch.undo()
    ports = list(zip(cluster._free_ports(), range(50), strict=False))
    assert len({port for port, _ in ports}) == 50
