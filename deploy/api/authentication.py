"""Authentication: callers must send a token that is in a file.

Knows the file and the metadata of a call; nothing of the request. Health needs no token, since probes have none.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from core.errors import ConfigError, Unauthenticated
from deploy import files

logger = logging.getLogger(__name__)

TOKENS_FILE = "OUTRIDER_TOKENS_FILE"
"""Environment variable that names the file, as set by a manifest that mounts it; the setting has priority."""
HEADER = "authorization"
"""In lower case, as gRPC has all names."""
SCHEME = "bearer"
CALLER_CHARS = 16
"""Of a token's digest, as a caller's name: enough to tell callers apart."""


def tokens_path(setting: str | None) -> Path | None:
    """The file that settings or environment name; None admits every caller."""
    name = setting or os.environ.get(TOKENS_FILE)
    return Path(name) if name else None


class Authenticator:
    """Lets a call pass whose metadata carry one of the tokens.

    The file is checked at each call and read when it has changed, so that tokens can be replaced at run time. While it
    cannot be read or is empty, the tokens from before stay valid: neither everybody nor nobody is admitted then.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises: ConfigError when there is a path, but no token there."""
        self._path = path
        self._digests: tuple[bytes, ...] = ()
        self._version: tuple[int, ...] = ()
        self._complaint = ""
        if path is not None:
            self._read(path)

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """A name for the caller that does not give its token away; empty where no token is asked for.

        Raises: Unauthenticated.
        """
        if self._path is None:
            return ""
        try:
            self._read(self._path)
            self._complaint = ""
        except ConfigError as error:
            if str(error) != self._complaint:
                logger.warning("the tokens from before stay valid: %s", error)
            self._complaint = str(error)
        sent = [hashlib.sha256(token).digest() for token in _tokens(metadata)]
        # All are compared, as digests, so that the time tells nothing about a token.
        matches = [mine for mine in self._digests for theirs in sent if hmac.compare_digest(mine, theirs)]
        if not matches:
            raise Unauthenticated("a valid token is needed: 'authorization: Bearer TOKEN'")
        return matches[0].hex()[:CALLER_CHARS]

    def _read(self, path: Path) -> None:
        """Take the tokens from the file, if it is not the one that was read last. Raises: ConfigError."""
        version = files.version(path)
        if version == self._version:
            return
        try:
            lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"orchestrator.tokens_file: {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            if len(line.split()) > 1 or line.startswith("#"):
                raise ConfigError(f"orchestrator.tokens_file: {path}, line {number} must be one token and nothing else")
        tokens = list(filter(None, lines))
        if not tokens:
            raise ConfigError(f"orchestrator.tokens_file: {path} has no token")
        self._digests = tuple(hashlib.sha256(token.encode()).digest() for token in tokens)
        self._version = version


def _tokens(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[bytes]:
    """The tokens that a caller, or a gateway before it, sends."""
    for name, value in metadata:
        if name == HEADER:
            scheme, _, token = (value.decode("latin-1") if isinstance(value, bytes) else value).partition(" ")
            if scheme.lower() == SCHEME:
                yield token.strip().encode()
