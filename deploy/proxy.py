"""The callback that Serve runs as one of its proxies starts: it installs the gRPC and the HTTP layer."""

from __future__ import annotations

import os

import uvicorn.config
from starlette.middleware import Middleware

from deploy.grpc import GRPC_HOST, listen_at, reflect_by_both_versions, take_bursts
from deploy.http import HttpProxy

CONNECTION = "deploy.http.connections:Connection"
"""What Serve's HTTP server, which is made after this, makes of each connection."""


def prepare() -> list[Middleware]:
    """The layers around Serve's HTTP server. gRPC's server, which is made after this, takes bursts, reflects, and
    listens where it is told to.

    Serve has it by name (`deploy.launch.cluster.PREPARE`).
    """
    take_bursts()
    reflect_by_both_versions()
    uvicorn.config.HTTP_PROTOCOLS["auto"] = CONNECTION
    if host := os.environ.get(GRPC_HOST):
        listen_at(host)
    return [Middleware(HttpProxy)]
