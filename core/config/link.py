"""Settings of the links between orchestrators and engines.

`Limits.reply_timeout_s` says how long an engine may be silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import Settings, check

LINK_PORTS = (20200, 20299)
"""Default ports: not used by Ray's processes (10002 to 19999), and below the kernel's ephemeral ports."""


@dataclass(frozen=True, slots=True)
class LinkTls(Settings):
    """Files (PEM) with which orchestrators and engines encrypt their links and authenticate each other.

    The paths are the same on every node that has either. A changed file applies to links that are opened afterwards.
    """

    certificate_file: str
    """PEM file with the node's certificate, followed by any intermediate ones. If the certificate limits its uses, both
    server and client authentication must be among them; host names are not checked."""
    key_file: str
    """PEM file with the certificate's private key, without a passphrase."""
    ca_file: str
    """PEM file with the certificates of the authorities, one of which must have signed the other end's certificate. Use
    an authority for this service alone, because every certificate that it has signed is trusted."""

    def __post_init__(self) -> None:
        for name in ("certificate_file", "key_file", "ca_file"):
            check(bool(getattr(self, name)), name, "the path of a file", getattr(self, name))
