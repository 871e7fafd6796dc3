"""Settings of the links between orchestrators and engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from core.config.checks import check, forbid_unknown

LINK_PORTS = (20200, 20299)
"""Outside the ports of Ray's processes (10002 to 19999) and below those that the kernel gives to clients."""


@dataclass(frozen=True, slots=True)
class LinkTls:
    """Files (PEM) with which orchestrators and engines encrypt their links and authenticate each other.

    The paths are the same on every node that has either. A changed file applies to links that are opened afterwards.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = forbid_unknown()

    certificate_file: str
    """Certificate of the node, followed by intermediate ones if there are any. It has to be valid for both uses (server
    and client authentication) if it names any; host names in it are not looked at."""
    key_file: str
    """Private key of the certificate, without a passphrase."""
    ca_file: str
    """Certificates of the authorities. The other end's certificate has to be signed by one of them. Use an authority
    that signs for this service alone: every certificate that it has signed is trusted."""

    def __post_init__(self) -> None:
        for name in ("certificate_file", "key_file", "ca_file"):
            check(bool(getattr(self, name)), name, "the path of a file", getattr(self, name))
