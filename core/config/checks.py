"""The base class of a group of settings, and checks of their values."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from core.errors import ConfigError
from core.ranges import Range

ABOVE_0 = Range(0, math.inf, excludes_low=True)
SHARE = Range(0, 1)
SHARE_ABOVE_0 = Range(0, 1, excludes_low=True)


def at_least(low: float) -> Range:
    """From `low` on."""
    return Range(low, math.inf)


def whole(low: float, high: float) -> Range:
    """Whole numbers from `low` to `high`."""
    return Range(low, high, is_whole=True)


def check(condition: bool, setting: str, allowed: str, value: object) -> None:
    """Raises: ConfigError, naming the setting and what is allowed, unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{setting} must be {allowed}, got {value!r}")


class Settings:
    """One group of settings, a frozen dataclass. Unknown fields are refused when it is read from a file."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    """Read by pydantic, which core itself does not import."""

    def _check(self, allowed: Range, *names: str) -> None:
        """Check that each named setting is None or in the range. Raises: ConfigError."""
        for name in names:
            value = getattr(self, name)
            check(value is None or value in allowed, name, str(allowed), value)
