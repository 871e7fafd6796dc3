"""Both clients under one face, so that each test holds for both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from outrider_client import AsyncClient, Chunk, Client, Completion, Retry

QUICK = Retry(initial_backoff_s=0.001, max_backoff_s=0.05)


class Blocking:
    """The blocking client as it is."""

    def __init__(self, address: Any, **options: Any) -> None:
        self.client = Client(address, **{"retry": QUICK, **options})

    def chunks(self, prompt: str | None = "say", **fields: Any) -> list[Chunk]:
        with self.client.stream(prompt, **fields) as stream:
            return list(stream)

    def generate(self, prompt: str | None = "say", **fields: Any) -> Completion:
        return self.client.generate(prompt, **fields)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.client, method)(*args, **kwargs)

    def close(self) -> None:
        self.client.close()


class Asyncio:
    """The client for asyncio, on an event loop of its own in a thread of its own."""

    def __init__(self, address: Any, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.client = AsyncClient(address, **{"retry": QUICK, **options})

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def chunks(self, prompt: str | None = "say", **fields: Any) -> list[Chunk]:
        async def collect() -> list[Chunk]:
            async with self.client.stream(prompt, **fields) as stream:
                return [chunk async for chunk in stream]

        return self.run(collect())

    def generate(self, prompt: str | None = "say", **fields: Any) -> Completion:
        return self.run(self.client.generate(prompt, **fields))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.run(getattr(self.client, method)(*args, **kwargs))

    def close(self) -> None:
        self.run(self.client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(params=[Blocking, Asyncio], ids=["blocking", "asyncio"], scope="module")
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def connect(kind: Any) -> Iterator[Any]:
    """Makes clients of one kind, and closes them."""
    made = []

    def make(address: Any, **options: Any) -> Any:
        made.append(kind(address, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()
