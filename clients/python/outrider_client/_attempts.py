"""Decides whether and when a call is retried, and its timeout. No I/O: clock and random source are arguments.

Knows errors and options; must not know the call.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import grpc

from outrider_client.errors import DeadlinePassed, OutriderError
from outrider_client.options import Retry


class RetryBudget:
    """The remaining retries of all calls of a client; may be shared by threads."""

    def __init__(self, num_retries: int) -> None:
        self._most = num_retries
        self._left = num_retries
        self._lock = threading.Lock()

    def spend(self) -> bool:
        """Take one. False if none is left."""
        with self._lock:
            has_one = self._left > 0
            self._left -= has_one
            return has_one

    def refund(self) -> None:
        """Give one back."""
        with self._lock:
            self._left = min(self._most, self._left + 1)


class Attempts:
    """The calls made for one request, one after the other."""

    def __init__(
        self,
        retry: Retry,
        budget: RetryBudget,
        timeout_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.num_calls = 0
        self._retry = retry
        self._budget = budget
        self._now = now
        self._draw = draw
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else now() + timeout_s
        self._num_failures = 0
        """Failures in a row, without an answer in between."""
        self._is_answered = False

    def begin(self) -> float | None:
        """Timeout of the next call in seconds; None for no limit. Raises: DeadlinePassed."""
        left_s = None if self._deadline is None else self._deadline - self._now()
        if left_s is not None and left_s <= 0:
            raise self._deadline_passed()
        self.num_calls += 1
        self._is_answered = False
        return left_s

    def progressed(self) -> None:
        """Call this for each answer, or part of one."""
        if not self._is_answered:
            self._budget.refund()
        self._is_answered, self._num_failures = True, 0

    def failed(self, error: OutriderError) -> float:
        """Seconds to wait before the next call. Raises: `error` or DeadlinePassed if there is no next call."""
        self._num_failures += 1
        if not error.is_transient or self._num_failures > self._retry.max_retries or not self._budget.spend():
            raise error
        pause_s = (error.retry_after_s or 0.0) + self._draw() * self._retry.backoff_s(self._num_failures)
        if self._deadline is not None and self._now() + pause_s >= self._deadline:
            raise self._deadline_passed() from error
        return pause_s

    def _deadline_passed(self) -> DeadlinePassed:
        message = f"not answered in {self._timeout_s:g} s, after {self.num_calls} calls"
        return DeadlinePassed(grpc.StatusCode.DEADLINE_EXCEEDED, message)
