"""The callback that Serve runs as one of its proxies starts: it installs the gRPC and the HTTP layer."""

from __future__ import annotations

from starlette.middleware import Middleware

from deploy.grpc import take_bursts
from deploy.http import HttpProxy


def prepare() -> list[Middleware]:
    """The layers around Serve's HTTP server; gRPC's server, which is made after this, takes bursts.

    Serve has it by name (`deploy.launch.cluster.PREPARE`).
    """
    take_bursts()
    return [Middleware(HttpProxy)]
