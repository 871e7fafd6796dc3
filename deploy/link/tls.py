"""TLS on links: the certificates of one end, read from files.

Both ends present a certificate signed by the other's authorities (mutual TLS 1.3). Host names are not checked: engines
are reached at pod addresses, which no certificate contains. The key of the lease identifies the engine.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from core.config import LinkTls
from core.errors import ConfigError
from deploy.files import ReloadedFiles

TLS_DIR = "OUTRIDER_LINK_TLS_DIR"
"""Environment variable that names a directory, set by a manifest that mounts a Secret. The setting has priority."""
CERTIFICATE, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
"""Names of the files in that directory, as in a Secret from cert-manager."""


class Certificates:
    """The TLS contexts of one end. The files are checked before each link."""

    def __init__(self, files: LinkTls) -> None:
        """Raises: ConfigError, which names the setting, if the files cannot be used."""
        paths = [Path(path) for path in (files.certificate_file, files.key_file, files.ca_file)]
        kept = "links keep the certificates that were read before"
        renewed = f"new links use the new certificate in {files.certificate_file}"
        self._contexts = ReloadedFiles(paths, lambda: _read(files), kept, renewed)

    @classmethod
    def of(cls, setting: LinkTls | None) -> Certificates | None:
        """The certificates named by the setting or the environment; None without TLS. Raises: ConfigError."""
        directory = os.environ.get(TLS_DIR)
        if setting is None and directory:
            setting = LinkTls(*(str(Path(directory) / name) for name in (CERTIFICATE, KEY, AUTHORITIES)))
        return cls(setting) if setting is not None else None

    def for_engine(self) -> ssl.SSLContext:
        return self._contexts.now()[0]

    def for_orchestrator(self) -> ssl.SSLContext:
        return self._contexts.now()[1]


def _read(files: LinkTls) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of an engine and of an orchestrator. Raises: ConfigError."""
    for setting in ("certificate_file", "key_file", "ca_file"):
        _check_readable(setting, getattr(files, setting))
    return _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)


def _context(files: LinkTls, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _load_certificates(context, "ca_file", files.ca_file)
    try:
        context.load_cert_chain(files.certificate_file, files.key_file, _no_passphrase)
    except ssl.SSLError as error:
        _load_certificates(context, "certificate_file", files.certificate_file)
        raise _wrong("key_file", f"{files.key_file} has no key of {files.certificate_file}: {error.reason}") from error
    return context


def _load_certificates(context: ssl.SSLContext, setting: str, path: str) -> None:
    """Raises: ConfigError if the file has no certificates."""
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise _wrong(setting, f"{path} has no certificate (PEM)") from error


def _check_readable(setting: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise _wrong(setting, f"{path} cannot be read: {error.strerror}") from error


def _no_passphrase() -> str:
    """Called for a key with a passphrase; OpenSSL would otherwise prompt at the terminal."""
    raise _wrong("key_file", "the key must have no passphrase: store it without one")


def _wrong(setting: str, problem: str) -> ConfigError:
    return ConfigError(f"engine.link_tls.{setting} (or {TLS_DIR}): {problem}")
