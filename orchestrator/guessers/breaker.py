"""Circuit breaker for each source of guesses, so that a failing source affects nothing else.

Knows names and errors; must not know sessions or tokens.
"""

from __future__ import annotations

import logging

from core.speculation import BadGuesserInput

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Consecutive failures, over all sessions, after which new sessions do not use the source."""
TRIAL_SESSIONS = 32
"""While the breaker is open, one in `TRIAL_SESSIONS` new sessions tries the source. A valid answer closes the
breaker."""


class Breaker:
    """Breaker of one source, shared by all sessions of an orchestrator."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.num_failures = 0
        """Total number of failures."""
        self._num_in_a_row = 0
        self._num_refused = 0
        self._has_warned = False

    @property
    def is_open(self) -> bool:
        return self._num_in_a_row >= MAX_FAILURES

    def admits(self) -> bool:
        """Whether a new session may use the source."""
        if not self.is_open:
            return True
        self._num_refused += 1
        return self._num_refused % TRIAL_SESSIONS == 0

    def worked(self) -> None:
        """Record a valid answer."""
        self._num_in_a_row = 0

    def failed(self, error: Exception) -> None:
        """Record an exception or an invalid answer.

        Failures caused by a request's own input neither open nor close the breaker; otherwise one caller could disable
        the source for all others. Only the first failure is logged, since a source may fail in every session.
        """
        self.num_failures += 1
        if isinstance(error, BadGuesserInput):
            logger.debug("the guesser %s cannot use what a request has brought: %s", self._source, error)
            return
        if not self._has_warned:
            logger.warning("the guesser %s fails, and is counted from now on: %r", self._source, error, exc_info=error)
        self._has_warned = True
        self._num_in_a_row += 1
