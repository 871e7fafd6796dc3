"""Checks that all settings share."""

from __future__ import annotations

from typing import Any

from core.errors import ConfigError


def check(condition: bool, setting: str, allowed: str, value: object) -> None:
    """Raises: ConfigError, naming the setting and what is allowed, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{setting} must be {allowed}, got {value!r}")


def forbid_unknown() -> dict[str, Any]:
    """What pydantic reads from `__pydantic_config__`; core itself does not import pydantic."""
    return {"extra": "forbid"}
