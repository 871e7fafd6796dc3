"""A server and its address, and one prompt sent to it with the chunks that came back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider_client import Chunk, Client, Finish, GenerateFields

DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT = 9000, 8000
MAX_RETRIES = 3
"""In a row: enough to go on with another replica; the first refusal is told within half a second."""
BEARER_VARIABLE = "OUTRIDER_TOKEN"
"""Environment variable with the token for the server: other users can read what stands on a command line."""


def bearer_token() -> str | None:
    """The token from the environment; None without one."""
    return os.environ.get(BEARER_VARIABLE, "").strip() or None


@dataclass
class Job:
    """One prompt, and the chunks of its stream so far."""

    prompt: str
    fields: GenerateFields
    began_s: float = 0.0
    duration_s: float = 0.0
    """Seconds from the call to the last chunk, as seen by the client."""
    chunks: list[Chunk] = field(default_factory=list)

    def run(self, client: Client, show: Callable[[Chunk], None] = lambda _: None) -> Job:
        """Stream to the end; `show` is given each chunk as it comes. Raises: OutriderError."""
        self.began_s = time.monotonic()
        with client.stream(self.prompt, **self.fields) as stream:
            for chunk in stream:
                self.duration_s = time.monotonic() - self.began_s
                self.chunks.append(chunk)
                show(chunk)
        return self

    @property
    def finish(self) -> Finish:
        """How the stream ended."""
        finish = self.chunks[-1].finish
        assert finish is not None, "a stream without a last chunk raises"
        return finish

    @property
    def explanation(self) -> tuple[str, ...]:
        """The explanations of its rounds, if they were asked for."""
        return tuple(line for chunk in self.chunks for line in chunk.explanation)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for chunk in self.chunks for token_id in chunk.token_ids)
