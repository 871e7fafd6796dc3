"""A variable number of concurrent streams, each compared with plain decoding.

Knows the client and the expected tokens; must not know what is done to the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from outrider_client import AsyncClient, OutriderError


@dataclass(frozen=True, slots=True)
class Expected:
    """One request, and its tokens under plain decoding."""

    prompt: str
    seed: int
    temperature: float
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """Results of the streams so far."""

    num_done: int = 0
    num_wrong: int = 0
    num_resumed: int = 0
    """Number of streams that took more than one call."""
    failures: list[str] = field(default_factory=list)


class SteadyLoad:
    """Keeps a given number of streams running. A context manager."""

    def __init__(self, client: AsyncClient, jobs: Sequence[Expected]) -> None:
        self.tally = Tally()
        self._client = client
        self._jobs = jobs
        self._num_wanted = 0
        self._running: set[asyncio.Task[None]] = set()
        self._numbers = count()

    async def __aenter__(self) -> SteadyLoad:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.keep(0)
        await asyncio.gather(*self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def keep(self, num_streams: int) -> None:
        """Keep `num_streams` running from now on. Surplus streams run to their end."""
        self._num_wanted = num_streams
        while len(self._running) < self._num_wanted:
            task = asyncio.create_task(self._go_on())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _go_on(self) -> None:
        while len(self._running) <= self._num_wanted:
            await self._stream(self._jobs[next(self._numbers) % len(self._jobs)])

    async def _stream(self, job: Expected) -> None:
        tokens: list[int] = []
        try:
            async with self._client.stream(
                job.prompt, max_tokens=len(job.tokens), temperature=job.temperature, seed=job.seed, ignore_eos=True
            ) as stream:
                async for chunk in stream:
                    tokens += chunk.token_ids
        except OutriderError as error:
            self.tally.failures.append(" ".join(str(error).split()))
            return
        self.tally.num_done += 1
        self.tally.num_resumed += stream.num_calls > 1
        self.tally.num_wrong += tuple(tokens) != job.tokens
