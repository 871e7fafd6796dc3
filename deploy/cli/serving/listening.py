"""Checks the address and the ports on which a command is to listen."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address

from core.errors import ConfigError


def check_ports(ports: Mapping[str, int]) -> None:
    """Ports by flag; 0 is any free one. Raises: ConfigError if two are the same."""
    flags: dict[int, str] = {}
    for flag, port in ports.items():
        if port and flags.setdefault(port, flag) != flag:
            raise ConfigError(f"{flag} {port} is {flags[port]}, too: give each its own, or 0 for any")


def check_host(host: str) -> None:
    """Raises: ConfigError."""
    try:
        address = ip_address(host)
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError) as error:
        raise ConfigError(f"--host {host} cannot be used ({error}): give an IP address of this machine") from error
