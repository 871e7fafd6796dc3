"""Authentication: callers must send a key that a file knows, by its digest.

Knows the file and the metadata of a call; nothing of the request. Health needs no key, since probes have none.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from core.errors import ConfigError, Unauthenticated
from core.ranges import PRIORITY, QUOTA, Range
from core.records import Quota
from deploy.files import Reread

TOKENS_FILE = "OUTRIDER_TOKENS_FILE"
"""Environment variable that names the file, as set by a manifest that mounts it; the setting has priority."""
HEADER = "authorization"
"""In lower case, as gRPC has all names."""
SCHEME = "bearer"
CALLER_CHARS = 16
"""Of a token's digest, as the name of a caller that the file does not name: enough to tell callers apart."""
KEY_BYTES = 32
"""Random bytes of a key: 256 bits cannot be guessed from a digest, however fast the digest is to compute."""
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
NAME_CHARS = "1 to 64 letters, digits or any of '._@-'"
TENANT = "tenant"
"""The field of a key's line with the name of its caller's tenant."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"-?\d{1,10}")


def tokens_path(setting: str | None) -> Path | None:
    """The file that settings or environment name; None admits every caller."""
    name = setting or os.environ.get(TOKENS_FILE)
    return Path(name) if name else None


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key allows its caller, in place of the settings in `limits`; None leaves it to these."""

    max_priority: int | None = None
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_sessions: int | None = None

    @property
    def quota(self) -> Quota:
        return Quota(self.max_requests_per_minute, self.max_tokens_per_minute, self.max_sessions)


NO_LIMITS = KeyLimits()
LIMITS: Mapping[str, Range] = {
    "max_priority": PRIORITY,
    "max_requests_per_minute": QUOTA,
    "max_tokens_per_minute": QUOTA,
    "max_sessions": QUOTA,
}
"""The fields of a key's line, and the numbers that each may have."""


class Caller(str):
    """The name of a caller, and what its key allows."""

    __slots__ = ("limits", "tenant")
    limits: KeyLimits
    tenant: str
    """Callers of one tenant may learn of each other's outputs by how fast theirs are; empty for a caller by itself."""

    def __new__(cls, name: str, limits: KeyLimits = NO_LIMITS, tenant: str = "") -> Caller:
        caller = super().__new__(cls, name)
        caller.limits = limits
        caller.tenant = tenant
        return caller

    @property
    def isolation(self) -> str:
        """Name of those who may learn of each other: no caller's is a tenant's. Empty for all who send no key."""
        if self.tenant:
            return f"tenant:{self.tenant}"
        return f"caller:{self}" if self else ""


def new_key(name: str, limits: KeyLimits = NO_LIMITS, tenant: str = "") -> tuple[str, str]:
    """A key for the caller `name`, and the line of the file that lets it in. Raises: ConfigError for no such name."""
    _check_name("a caller's", name)
    given = {field: value for field, value in asdict(limits).items() if value is not None}
    for field, value in given.items():
        if value not in LIMITS[field]:
            raise ConfigError(f"{field} must be {LIMITS[field]}, got {value}")
    fields = [f"{field}={value}" for field, value in given.items()]
    if tenant:
        _check_name("a tenant's", tenant)
        fields.append(f"{TENANT}={tenant}")
    key = secrets.token_urlsafe(KEY_BYTES)
    return key, ":".join([name, _digest(key.encode()).hex(), *fields])


def _check_name(whose: str, name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{whose} name must be {NAME_CHARS}, got {name!r}")


class Authenticator:
    """Lets a call pass whose metadata carry one of the keys. What is in progress has passed, whatever comes of its key.

    A line of the file is NAME:SHA256, and behind it what the key allows, as in :max_priority=N (`LIMITS`), and perhaps
    :tenant=NAME; a caller may have several. A line without a colon is a token as it is sent. The file is checked at
    each call and read when it has changed, so that keys can be replaced at run time. While it cannot be read or a line
    is wrong, the keys from before stay valid: neither everybody nor nobody is admitted then.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises: ConfigError when there is a path, but no key there."""
        self._callers = None if path is None else Reread([path], lambda: _read(path), "the keys from before stay valid")

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """A name for the caller that does not give its key away; empty where no key is asked for.

        Raises: Unauthenticated.
        """
        if self._callers is None:
            return Caller("")
        callers, sent = self._callers.now(), [_digest(token) for token in _tokens(metadata)]
        # All are compared, as digests, so that the time tells nothing about a key.
        matches = [caller for mine, caller in callers for theirs in sent if hmac.compare_digest(mine, theirs)]
        if not matches:
            raise Unauthenticated("a valid token is needed: 'authorization: Bearer TOKEN'")
        return matches[0]


def _read(path: Path) -> tuple[tuple[bytes, Caller], ...]:
    """The digests of all keys in the file, and whose they are. Raises: ConfigError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"orchestrator.tokens_file: {path} cannot be read: {error}") from error
    callers = tuple(_caller(path, number, line) for number, line in enumerate(lines, 1) if line)
    if not callers:
        raise ConfigError(f"orchestrator.tokens_file: {path} has no token")
    return callers


def _caller(path: Path, number: int, line: str) -> tuple[bytes, Caller]:
    """The digest of a line's key, and whose it is. Raises: ConfigError, which shows nothing of the line."""
    where = f"orchestrator.tokens_file: {path}, line {number}"
    if len(line.split()) > 1 or line.startswith("#"):
        raise ConfigError(f"{where} must be one token and nothing else")
    name, *fields = line.split(":")
    if not fields:
        token = _digest(line.encode())
        return token, Caller(token.hex()[:CALLER_CHARS])
    digest, *about = fields
    if NAME.fullmatch(name) is None or _DIGEST.fullmatch(digest) is None:
        raise ConfigError(
            f"{where} must be NAME:SHA256 and perhaps :FIELD=VALUE, as `outrider keys new NAME` prints it"
        )
    return bytes.fromhex(digest), Caller(name, *_allowed(where, about))


def _allowed(where: str, fields: Sequence[str]) -> tuple[KeyLimits, str]:
    """The limits and the tenant that fields of the form NAME=VALUE give. Raises: ConfigError, which names the field."""
    given: dict[str, str] = {}
    for number, text in enumerate(fields, 1):
        name, separator, value = text.partition("=")
        if not separator or name not in (*LIMITS, TENANT):
            raise ConfigError(
                f"{where} must have {', '.join([*LIMITS, TENANT])} behind the digest: field {number} is none of these"
            )
        if name in given:
            raise ConfigError(f"{where} must have {name} once")
        given[name] = value
    tenant = given.pop(TENANT, None)
    if tenant is not None and NAME.fullmatch(tenant) is None:
        raise ConfigError(f"{where} must have {TENANT} {NAME_CHARS}")
    for name, value in given.items():
        if _NUMBER.fullmatch(value) is None or int(value) not in LIMITS[name]:
            raise ConfigError(f"{where} must have {name} {LIMITS[name]}")
    return KeyLimits(**{name: int(value) for name, value in given.items()}), tenant or ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tokens(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[bytes]:
    """The tokens that a caller, or a gateway before it, sends."""
    for name, value in metadata:
        if name == HEADER:
            scheme, _, token = (value.decode("latin-1") if isinstance(value, bytes) else value).partition(" ")
            if scheme.lower() == SCHEME:
                yield token.strip().encode()
