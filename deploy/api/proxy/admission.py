"""Admission in one proxy: a limit on completions in progress, and a limit on waiting bytes.

Serve's router queues every call, so an orchestrator can refuse one only after it has waited. Calls that can be refused
without asking the orchestrators are refused here. The orchestrators check again, because a proxy does not see other
proxies' calls. Knows counts; must not know gRPC or Serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from core.errors import InvalidRequest, Overloaded

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Seconds after which the next call refreshes the orchestrators' limits, without waiting for them."""
ANSWER_TIMEOUT_S = 10.0
QUIET_S = 0.0005
"""Seconds without an arrival after which a call enters Serve."""
MAX_TURN_S = 0.005
"""Maximum seconds that a call waits for its turn, however many calls arrive."""
MAX_OTHER_CALLS = 256
"""Most calls in progress other than completions. They are short and compute little."""
MAX_WAITING_BYTES = 32 * 2**20
"""Most bytes of messages that no orchestrator has answered yet. They pass through Ray's object store, which has at
least 128 MiB."""
RETRY_S = 1.0
LOG_PERIOD_S = 10.0


@dataclass(frozen=True, slots=True)
class Places:
    """The limits of one orchestrator."""

    num_completions: int
    """Includes completions waiting in the queue."""
    retry_after_s: float
    """Estimated seconds until another completion can be admitted once the limit is reached."""
    max_request_bytes: int
    """Longest message that any of its models can use, in bytes."""
    model_name: str
    """The default model. Refusals are counted for it, because the message has not been read yet."""


class ProxyAdmission:
    """Counts the calls in progress through one proxy.

    `ask` returns the limits of each orchestrator; `record` is called for each refusal, with a model's name.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Sequence[Places]]],
        record: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._record = record
        self._now = now
        self._model_name: str | None = None
        self._most: int | None = None
        """Most completions at once. None while unknown; until then only the orchestrators refuse."""
        self._retry_after_s = RETRY_S
        self.max_bytes: int | None = None
        """Longest gRPC message that any orchestrator can use, in bytes; None while unknown."""
        self._asked_s = -REFRESH_S
        self._asking: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._num_arrived = 0
        self._num_completions = 0
        self._num_others = 0
        self._waiting_bytes = 0
        self._num_refused = 0
        self._told_s = -LOG_PERIOD_S

    def arrived(self, *, is_completion: bool) -> None:
        """Register a call that has arrived but is still unread. Raises: Overloaded if the limit is reached."""
        self._num_arrived += 1
        self._refresh()
        self._require_place(is_completion)

    async def turn(self) -> None:
        """Wait until no call has arrived for `QUIET_S`, at most `MAX_TURN_S`. Calls keep their order.

        gRPC's server accepts one call per iteration of the event loop, and cancels calls if too many wait to be
        accepted. Entering Serve blocks the loop for milliseconds, so all arrived calls are accepted or refused first.
        """
        async with self._beginning:
            end_s = self._now() + MAX_TURN_S
            num_before = -1
            while self._num_arrived != num_before and self._now() < end_s:
                num_before = self._num_arrived
                await asyncio.sleep(QUIET_S)

    @contextmanager
    def call(self, *, is_completion: bool) -> Iterator[None]:
        """Count one call until it ends. Raises: Overloaded if the limit is reached."""
        self._require_place(is_completion)
        self._count(is_completion, +1)
        try:
            yield
        finally:
            self._count(is_completion, -1)

    def check_length(self, num_bytes: int) -> None:
        """Raises: InvalidRequest if a gRPC message is too long for every orchestrator."""
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise InvalidRequest("request", f"must be at most {self.max_bytes} bytes long, got {num_bytes}")

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """While a request is read, count its pieces as waiting bytes; the yielded function takes each piece's size.

        The function raises Overloaded if too many bytes are waiting. A request that waits alone is always admitted.
        """
        num_read = 0

        def count(num_bytes: int) -> None:
            nonlocal num_read
            others = self._waiting_bytes - num_read
            if others and self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
                raise self._refusal("too many long requests are waiting")
            num_read += num_bytes
            self._waiting_bytes += num_bytes

        try:
            yield count
        finally:
            self._waiting_bytes -= num_read

    @contextmanager
    def waiting(self, num_bytes: int) -> Iterator[Callable[[], None]]:
        """Count a request as waiting until it is answered; the yielded function reports an early answer.

        Raises: Overloaded if too many bytes are waiting. A request that waits alone is always admitted.
        """
        if self._waiting_bytes and self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            raise self._refusal("too many long requests are waiting")
        self._waiting_bytes += num_bytes
        left = num_bytes

        def answered() -> None:
            nonlocal left
            self._waiting_bytes -= left
            left = 0

        try:
            yield answered
        finally:
            answered()

    def _require_place(self, is_completion: bool) -> None:
        if is_completion:
            if self._most is not None and self._num_completions >= self._most:
                raise self._refusal(f"all {self._most} places, those in the queue included, are taken")
        elif self._num_others >= MAX_OTHER_CALLS:
            raise self._refusal(f"{MAX_OTHER_CALLS} calls are in progress")

    def _count(self, is_completion: bool, change: int) -> None:
        if is_completion:
            self._num_completions += change
        else:
            self._num_others += change

    def _refusal(self, reason: str) -> Overloaded:
        """Count a refusal. Log one line per period: there may be thousands."""
        self._num_refused += 1
        if self._model_name is not None:
            self._record(self._model_name)
        if self._now() - self._told_s >= LOG_PERIOD_S:
            logger.warning("refused %d calls since the last such line: %s", self._num_refused, reason)
            self._told_s, self._num_refused = self._now(), 0
        return Overloaded(f"{reason}; try again in {self._retry_after_s:g} s", self._retry_after_s)

    def _refresh(self) -> None:
        if self._now() - self._asked_s >= REFRESH_S and self._asking is None:
            self._asked_s = self._now()
            self._asking = asyncio.ensure_future(self._learn())

    async def _learn(self) -> None:
        try:
            orchestrators = await asyncio.wait_for(self._ask(), ANSWER_TIMEOUT_S)
            if orchestrators:
                self._most = sum(each.num_completions for each in orchestrators)
                self._retry_after_s = max(each.retry_after_s for each in orchestrators)
                self.max_bytes = max(each.max_request_bytes for each in orchestrators)
                self._model_name = orchestrators[0].model_name
        except Exception as error:  # noqa: BLE001  calls continue whatever is wrong with Serve
            logger.warning("the limits of the orchestrators are not known; they refuse by themselves: %r", error)
            self._most = self.max_bytes = None
        finally:
            self._asking = None
