"""Admission: a request is refused at once, before any model work, or served to the end."""

from __future__ import annotations

from core.config import Limits
from core.errors import Overloaded


class Admission:
    """Counts the completions in progress against their limit."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_admitted = 0

    @property
    def num_admitted(self) -> int:
        return self._num_admitted

    def __enter__(self) -> None:
        """Raises: Overloaded when there is no room."""
        if self._num_admitted >= self._limits.max_sessions:
            raise Overloaded(
                f"all {self._limits.max_sessions} places are taken; try again in {self._limits.retry_after_s:g} s",
                self._limits.retry_after_s,
            )
        self._num_admitted += 1

    def __exit__(self, *_: object) -> None:
        self._num_admitted -= 1
