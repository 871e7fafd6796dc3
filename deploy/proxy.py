"""What Serve calls as one of its proxies starts: both languages of the API are put in place there."""

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
