"""`outrider serve` as a process, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    """Its output."""


@contextmanager
def command_serving(log: Path, *flags: str) -> Iterator[Serving]:
    """On free ports, until the block ends."""
    left_out = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    with log.open("w") as stderr:
        command = [Path(sys.executable).parent / "outrider", "serve", "--grpc-port", "0", "--http-port", "0", *flags]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        yield Serving(process, _wait_for_port(process, log), log)
    finally:
        for _ in range(2):  # the second time it waits for no stream
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        assert process.poll() is not None, "it does not stop"


def _wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    end_s = time.monotonic() + START_TIMEOUT_S
    while (banner := re.search(r"gRPC +localhost:(\d+)", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.2)
    return int(banner[1])
