"""The callback that Serve runs when one of its proxies starts. It installs the gRPC and the HTTP layer."""

from __future__ import annotations

import os

import uvicorn.config
from starlette.middleware import Middleware

from deploy.grpc import GRPC_HOST, listen_at, reflect_by_both_versions, take_bursts
from deploy.http import HttpProxy

CONNECTION = "deploy.http.connections:Connection"
"""Connection class for Serve's HTTP server, which is created after this callback."""


def prepare() -> list[Middleware]:
    """Return the middleware for Serve's HTTP server; configure its gRPC server, which is created later.

    The gRPC server then accepts bursts, offers reflection and listens at the configured address. Serve finds this
    function by the name in `deploy.launch.cluster.PREPARE`.
    """
    take_bursts()
    reflect_by_both_versions()
    uvicorn.config.HTTP_PROTOCOLS["auto"] = CONNECTION
    if host := os.environ.get(GRPC_HOST):
        listen_at(host)
    return [Middleware(HttpProxy)]
