"""The sockets on which a tree of processes listens, by what Linux tells of them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LISTENING = "0A"
PROC = Path("/proc")


@dataclass(frozen=True)
class Listener:
    """One socket, and the command line of the process that has it."""

    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    command: str

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        mapped = getattr(self.address, "ipv4_mapped", None)  # as gRPC's sockets of both families have it
        return (mapped or self.address).is_loopback

    @property
    def reach(self) -> str:
        """Where a client of this machine finds it."""
        host = "127.0.0.1" if self.address.is_unspecified else str(self.address)
        return f"{host}:{self.port}"


def listeners(root: int) -> list[Listener]:
    """Listeners of the process `root` and all its descendants."""
    owners = {inode: pid for pid in family(root) for inode in sockets(pid)}
    return [
        Listener(address, port, command(owners[inode]))
        for table in ("tcp", "tcp6")
        for inode, address, port in listening(table)
        if inode in owners
    ]


def family(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def parents() -> Iterator[tuple[int, int]]:
    for folder in PROC.glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:  # it has ended
            continue
        yield int(folder.name), int(stat.rpartition(")")[2].split()[1])


def sockets(pid: int) -> Iterator[str]:
    for descriptor in (PROC / str(pid) / "fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except OSError:  # it has been closed
            continue
        if match:
            yield match[1]


def listening(table: str) -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    for line in (PROC / "net" / table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING:
            address, _, port = fields[1].partition(":")
            yield fields[9], parsed(address), int(port, 16)


def parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints words of four bytes in the machine's order."""
    raw = bytes.fromhex(text)
    return ipaddress.ip_address(b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4)))


def command(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
