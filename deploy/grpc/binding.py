"""The address of Serve's gRPC proxy. Serve (Ray 2.60) has no setting for it and listens on all interfaces."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from ray._common.network_utils import build_address
from ray.serve._private import default_impl

GRPC_HOST = "OUTRIDER_GRPC_HOST"
"""Environment variable with the address to listen at; unset means all interfaces."""


def listen_at(host: str) -> None:
    """Make this process's gRPC servers listen at `host`. Must run before a server is created."""
    if ip_address(host).is_unspecified:
        return
    add = default_impl.add_grpc_address

    def add_at(server: Any, address: str) -> None:
        add(server, build_address(host, int(address.rpartition(":")[2])))

    default_impl.add_grpc_address = add_at
