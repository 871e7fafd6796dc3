"""Authentication: callers must send a key whose digest is in a file.

Knows the file and the metadata of a call; must not know the request. Health checks need no key: probes have none.
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
from core.ranges import Range, ranges_of
from core.records import PRIORITY, Quota
from deploy.files import ReloadedFiles

TOKENS_FILE = "OUTRIDER_TOKENS_FILE"
"""Environment variable that names the file, set by a manifest that mounts it. The setting has priority."""
HEADER = "authorization"
"""Lower case, as gRPC requires."""
SCHEME = "bearer"
CALLER_CHARS = 16
"""Hexadecimal digits of a token's digest that name a caller without a name in the file."""
KEY_BYTES = 32
"""Random bytes of a key. 256 bits cannot be guessed from a digest, even one that is fast to compute."""
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
NAME_CHARS = "1 to 64 letters, digits or any of '._@-'"
TENANT = "tenant"
"""Field of a key's line with the caller's tenant."""
LEARNING = "learning"
"""Field of a key's line that keeps its caller's requests from being learnt from; its only value is `no`."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"-?\d{1,10}")


def tokens_path(setting: str | None) -> Path | None:
    """The file named by the setting or the environment; None admits every caller."""
    name = setting or os.environ.get(TOKENS_FILE)
    return Path(name) if name else None


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits that a key sets for its caller, in place of the settings in `limits`. None keeps the setting."""

    max_priority: int | None = None
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_sessions: int | None = None

    @property
    def quota(self) -> Quota:
        return Quota(self.max_requests_per_minute, self.max_tokens_per_minute, self.max_sessions)


NO_LIMITS = KeyLimits()
LIMITS: Mapping[str, Range] = {"max_priority": PRIORITY, **ranges_of(Quota)}
"""Fields of a key's line with a number, and their ranges."""


class Caller(str):
    __slots__ = ("learning", "limits", "tenant")
    limits: KeyLimits
    tenant: str
    """Callers of one tenant can learn about each other's outputs by timing. Empty for a caller without a tenant."""
    learning: bool
    """Whether its requests may be kept for training drafts."""

    def __new__(cls, name: str, limits: KeyLimits = NO_LIMITS, tenant: str = "", *, learning: bool = True) -> Caller:
        caller = super().__new__(cls, name)
        caller.limits = limits
        caller.tenant = tenant
        caller.learning = learning
        return caller

    @property
    def isolation(self) -> str:
        """Name of the group whose members can learn about each other's outputs. Empty for callers without a key.

        The prefix prevents a caller's name from matching a tenant's.
        """
        if self.tenant:
            return f"tenant:{self.tenant}"
        return f"caller:{self}" if self else ""


def new_key(name: str, limits: KeyLimits = NO_LIMITS, tenant: str = "", *, learning: bool = True) -> tuple[str, str]:
    """A new key for a caller, and its line for the file. Raises: ConfigError for an invalid name or limit."""
    _check_name("a caller's", name)
    given = {field: value for field, value in asdict(limits).items() if value is not None}
    for field, value in given.items():
        if value not in LIMITS[field]:
            raise ConfigError(f"{field} must be {LIMITS[field]}, got {value}")
    fields = [f"{field}={value}" for field, value in given.items()]
    if tenant:
        _check_name("a tenant's", tenant)
        fields.append(f"{TENANT}={tenant}")
    if not learning:
        fields.append(f"{LEARNING}=no")
    key = secrets.token_urlsafe(KEY_BYTES)
    return key, ":".join([name, _digest(key.encode()).hex(), *fields])


def _check_name(whose: str, name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{whose} name must be {NAME_CHARS}, got {name!r}")


class Authenticator:
    """Admits calls whose metadata carry one of the keys. A call in progress continues even if its key is removed.

    A line of the file is NAME:SHA256, optionally followed by limits such as :max_priority=N (`LIMITS`), by
    :tenant=NAME and by :learning=no. A caller may have several lines. A line without a colon is a token in plain text.
    Each call checks whether the file has changed and then reads it, so that keys can be replaced at run time. If it
    cannot be read or a line is wrong, the previous keys stay valid.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises: ConfigError if the file at `path` has no key."""
        self._callers = (
            None if path is None else ReloadedFiles([path], lambda: _read(path), "the keys from before stay valid")
        )

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """The caller's name, which does not reveal its key; empty without authentication.

        Raises: Unauthenticated.
        """
        if self._callers is None:
            return Caller("")
        callers, sent = self._callers.now(), [_digest(token) for token in _tokens(metadata)]
        # Compare all of them, as digests, so that the time reveals nothing about a key.
        matches = [caller for mine, caller in callers for theirs in sent if hmac.compare_digest(mine, theirs)]
        if not matches:
            raise Unauthenticated("a valid token is needed: 'authorization: Bearer TOKEN'")
        return matches[0]


def _read(path: Path) -> tuple[tuple[bytes, Caller], ...]:
    """The digest and caller of each key in the file. Raises: ConfigError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"orchestrator.tokens_file: {path} cannot be read: {error}") from error
    callers = tuple(_caller(path, number, line) for number, line in enumerate(lines, 1) if line)
    if not callers:
        raise ConfigError(f"orchestrator.tokens_file: {path} has no token")
    return callers


def _caller(path: Path, number: int, line: str) -> tuple[bytes, Caller]:
    """The digest and caller of one line. Raises: ConfigError, which shows nothing of the line."""
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
    limits, tenant, learning = _allowed(where, about)
    return bytes.fromhex(digest), Caller(name, limits, tenant, learning=learning)


def _allowed(where: str, fields: Sequence[str]) -> tuple[KeyLimits, str, bool]:
    """The limits, the tenant, and whether to learn. Raises: ConfigError, which names the field."""
    given: dict[str, str] = {}
    for number, text in enumerate(fields, 1):
        name, separator, value = text.partition("=")
        if not separator or name not in (*LIMITS, TENANT, LEARNING):
            known = ", ".join([*LIMITS, TENANT, LEARNING])
            raise ConfigError(f"{where} must have {known} behind the digest: field {number} is none of these")
        if name in given:
            raise ConfigError(f"{where} must have {name} once")
        given[name] = value
    tenant = given.pop(TENANT, None)
    if tenant is not None and NAME.fullmatch(tenant) is None:
        raise ConfigError(f"{where} must have {TENANT} {NAME_CHARS}")
    learning = given.pop(LEARNING, None)
    if learning not in (None, "no"):
        raise ConfigError(f"{where} must have {LEARNING} no, or leave it out")
    for name, value in given.items():
        if _NUMBER.fullmatch(value) is None or int(value) not in LIMITS[name]:
            raise ConfigError(f"{where} must have {name} {LIMITS[name]}")
    return KeyLimits(**{name: int(value) for name, value in given.items()}), tenant or "", learning is None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tokens(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[bytes]:
    """The bearer tokens sent by the caller, or by a gateway in front of it."""
    for name, value in metadata:
        if name == HEADER:
            scheme, _, token = (value.decode("latin-1") if isinstance(value, bytes) else value).partition(" ")
            if scheme.lower() == SCHEME:
                yield token.strip().encode()
