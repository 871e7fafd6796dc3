"""Two hosts on this machine with a delay between them: network namespaces, connected by a slow wire.

Works without the kernel's netem: each end is a TUN device, and a separate process forwards packets between them with a
delay. Needs root or user namespaces, and the `ip` command.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICE = "outrider"
PREFIX = "outrider-"
"""Prefix of the namespaces' names; the id of the process that made them follows."""
NETWORK = "10.201.77"
MTU = 9000
MAX_WAIT_S = 0.5
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace. Processes started in it have only this address and loopback."""

    name: str
    address: str

    def enter(self) -> None:
        """Move this thread, and processes it starts from now on, to this host. Raises: OSError."""
        with Path("/var/run/netns", self.name).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.name}")


class Wire:
    """The link between two hosts."""

    def __init__(self, carrier: subprocess.Popen[str]) -> None:
        self._carrier = carrier

    def delay(self, seconds: float) -> None:
        """Set the delay of packets in each direction, in seconds."""
        assert self._carrier.stdin is not None
        print(seconds, file=self._carrier.stdin, flush=True)


def missing() -> str | None:
    """The requirement for two hosts that this machine lacks, or None."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if not os.access("/dev/net/tun", os.W_OK):
        return "/dev/net/tun cannot be opened"
    tried = f"{PREFIX}{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", tried], capture_output=True, check=False).returncode:
        return "no network namespace can be made"
    _ip("netns", "delete", tried)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, Wire]]:
    """The near host, the far host and the wire between them. This thread is on the near host inside the block."""
    _sweep()
    near, far = (Host(f"{PREFIX}{os.getpid()}-{n}", f"{NETWORK}.{n}") for n in (1, 2))
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    ends: list[int] = []
    try:
        for host in (near, far):
            _ip("netns", "add", host.name)
            host.enter()
            _ip("link", "set", "lo", "up")
            ends.append(_tunnel())
            _ip("address", "add", f"{host.address}/24", "dev", DEVICE)
            _ip("link", "set", DEVICE, "up", "mtu", str(MTU))
        near.enter()
        with _carrier(ends) as wire:
            yield near, far, wire
    finally:
        ctypes.CDLL(None).setns(home, CLONE_NEWNET)
        for end in (home, *ends):
            os.close(end)
        for host in (near, far):
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _sweep() -> None:
    """Delete the namespaces of processes that were killed."""
    names = [path.name for path in Path("/var/run/netns").glob(f"{PREFIX}*")]
    for name in names:
        if not Path("/proc", name.removeprefix(PREFIX).partition("-")[0]).exists():
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _tunnel() -> int:
    """Open a TUN device in this thread's namespace; whole packets are read from and written to it."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return end


@contextmanager
def _carrier(ends: list[int]) -> Iterator[Wire]:
    command = [sys.executable, __file__, *map(str, ends)]
    with subprocess.Popen(command, pass_fds=ends, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield Wire(process)
        finally:
            process.kill()


def carry(ends: list[int], commands: Any) -> None:
    """Carry packets between the two ends until `commands` closes. Each line of `commands` sets the delay in seconds."""
    other = dict(zip(ends, reversed(ends), strict=True))
    under_way: deque[tuple[float, int, bytes]] = deque()
    delay_s = 0.0
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else MAX_WAIT_S
        ready, _, _ = select.select([commands, *ends], [], [], min(wait_s, MAX_WAIT_S))
        for end in ready:
            if end is commands:
                if not (line := commands.readline()):
                    return
                delay_s = float(line)
                continue
            packet = os.read(end, 2 * MTU)
            under_way.append((time.monotonic() + delay_s, other[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            os.write(end, packet)


if __name__ == "__main__":
    carry([int(end) for end in sys.argv[1:]], sys.stdin)
