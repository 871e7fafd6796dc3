"""The callback that Serve runs as one of its proxies starts: it installs the gRPC and the HTTP layer."""

from __future__ import annotations

import os

from starlette.middleware import Middleware

from deploy.grpc import GRPC_HOST, listen_at, take_bursts
from deploy.http import HttpProxy


def prepare() -> list[Middleware]:
    """The layers around Serve's HTTP server; gRPC's server, which is made after this, takes bursts, and listens where
    it is told to.

    Serve has it by name (`deploy.launch.cluster.PREPARE`).
    """
    take_bursts()
    if host := os.environ.get(GRPC_HOST):
        listen_at(host)
    return [Middleware(HttpProxy)]
