"""Two hosts on this machine with a delay between them: network namespaces, and a wire that takes its time.

A kernel with netem could delay packets by itself; this works without it: the two ends are TUN devices, and a process of
its own carries packets from one to the other, each after a delay. Needs root, or user namespaces, and `ip`.
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
"""Of namespaces; the process that made them follows."""
NETWORK = "10.201.77"
MTU = 9000
MAX_WAIT_S = 0.5
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace; processes that are started inside it have this address and no other but loopback."""

    name: str
    address: str

    def enter(self) -> None:
        """From now on this thread, and what it starts, is on this host. Raises: OSError."""
        with Path("/var/run/netns", self.name).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.name}")


class Wire:
    """The link between two hosts."""

    def __init__(self, carrier: subprocess.Popen[str]) -> None:
        self._carrier = carrier

    def delay(self, seconds: float) -> None:
        """Set the delay of packets, in each direction."""
        assert self._carrier.stdin is not None
        print(seconds, file=self._carrier.stdin, flush=True)


def missing() -> str | None:
    """The missing requirement for two hosts on this machine, or None."""
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
    """Near and far, and the wire between them; this thread is on the near one while the block runs."""
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
    """Delete the namespaces of killed processes."""
    names = [path.name for path in Path("/var/run/netns").glob(f"{PREFIX}*")]
    for name in names:
        if not Path("/proc", name.removeprefix(PREFIX).partition("-")[0]).exists():
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _tunnel() -> int:
    """The end of a TUN device in the namespace of this thread: whole packets are read from it and written to it."""
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
    """Carry packets between the two ends until `commands` closes; each line of it is a delay in seconds."""
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
