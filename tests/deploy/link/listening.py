"""An engine's end of its links on this machine."""

from __future__ import annotations

from deploy.link.address import LinkAddress
from deploy.link.requests import Request
from deploy.link.server import LinkServer, Post
from deploy.link.tls import Certificates

HOST = "127.0.0.1"
ANY_PORT = (0, 0)


def listen(
    post: Post, kind: type[Request], epoch: int, certificates: Certificates | None = None
) -> tuple[LinkServer, LinkAddress]:
    server = LinkServer(epoch, (kind,), certificates)
    server.bind(HOST, ANY_PORT)
    return server, server.start(post)
