"""Authorities and certificates that live as long as a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from core.config import LinkTls

HOUR = timedelta(hours=1)


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self.certificate = _pem(_signed(self._name, self._key, self._name, self._key, HOUR, is_authority=True))

    def issue(self, directory: Path, lifetime: timedelta = HOUR, passphrase: str | None = None) -> LinkTls:
        """The files of an end that trusts this authority and has a certificate of it, in `directory`."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(_named("an end"), key, self._name, self._key, lifetime, is_authority=False)
        how: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            how = serialization.BestAvailableEncryption(passphrase.encode())
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
        directory.mkdir(exist_ok=True)
        contents = {"tls.crt": _pem(certificate), "tls.key": private, "ca.crt": self.certificate}
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        return LinkTls(*(str(directory / name) for name in contents))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(name, key, by, with_key, lifetime, *, is_authority):
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(by, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - 2 * HOUR)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(with_key, hashes.SHA256())
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
