"""Base class of all APIs' replies, whole or as a stream of events.

Knows chunks; must not know how a reply is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest
from core.records import Chunk, GenerationRequest, Usage
from deploy.http.bodies import Body
from deploy.http.failures import Failure
from deploy.http.output import Reading
from orchestrator.text import Tokenizer

OWNER = "outrider"


@dataclass(frozen=True, slots=True)
class ReplyOrder:
    body: Body
    model: str
    requests: Sequence[GenerationRequest]
    """The samples of the first prompt, then those of the next."""
    tokenizer: Tokenizer
    reading: Reading
    created_s: int
    fingerprint: str = ""
    """Identifies the model and software that compute the outputs."""
    named: Callable[[InvalidRequest], InvalidRequest] = lambda error: error
    """Renames an error's field to the body's own."""

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id


class Reply(ABC):
    """One reply. An instance keeps track of what it has written."""

    @abstractmethod
    def piece(self, index: int, chunk: Chunk) -> bytes:
        """The events of a chunk of sample `index`; the first chunk also opens the stream."""

    @abstractmethod
    def last_piece(self) -> bytes:
        """The events at the end of the stream, after all samples."""

    def failing(self, failure: Failure) -> bytes:
        return failure.event

    @abstractmethod
    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> Mapping[str, Any]:
        """The reply as one object; `chunks` are those of each sample."""


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def usage_of(chunks: Sequence[Chunk], request: GenerationRequest) -> Usage:
    """The usage of one sample so far."""
    return chunks[-1].usage if chunks else Usage(len(request.prompt), 0)
