"""A circuit breaker for each source of guesses: one that raises or answers nonsense costs itself, and nobody else.

Knows names and errors; must not know sessions or tokens.
"""

from __future__ import annotations

import logging

from core.speculation import BadGuesserInput

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""In a row, over all sessions: then new sessions do without the source."""
TRIAL_SESSIONS = 32
"""One new session in this many asks the source although its breaker is open; a sound answer closes the breaker."""


class Breaker:
    """Of one source, shared by all sessions of an orchestrator."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.num_failures = 0
        """In all."""
        self._num_in_a_row = 0
        self._num_refused = 0
        self._has_warned = False

    @property
    def is_open(self) -> bool:
        return self._num_in_a_row >= MAX_FAILURES

    def admits(self) -> bool:
        """Whether a new session is given the source."""
        if not self.is_open:
            return True
        self._num_refused += 1
        return self._num_refused % TRIAL_SESSIONS == 0

    def worked(self) -> None:
        """It has given a sound answer."""
        self._num_in_a_row = 0

    def failed(self, error: Exception) -> None:
        """It has raised, or answered nonsense. What a request brings with it neither opens nor closes the breaker: a
        caller could take the source from all others. Only the first time is logged: it may fail in every session.
        """
        self.num_failures += 1
        if isinstance(error, BadGuesserInput):
            logger.debug("the guesser %s cannot use what a request has brought: %s", self._source, error)
            return
        if not self._has_warned:
            logger.warning("the guesser %s fails, and is counted from now on: %r", self._source, error, exc_info=error)
        self._has_warned = True
        self._num_in_a_row += 1
