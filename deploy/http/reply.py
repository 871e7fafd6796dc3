"""What the replies of all APIs have in common: whole, or as the events of a stream.

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
    """What a reply is made for."""

    body: Body
    model: str
    requests: Sequence[GenerationRequest]
    """Samples of one prompt, then as many of the next."""
    tokenizer: Tokenizer
    reading: Reading
    created_s: int
    fingerprint: str = ""
    """Of what computes the outputs."""
    named: Callable[[InvalidRequest], InvalidRequest] = lambda error: error
    """What is wrong, by the fields of the body."""

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id


class Reply(ABC):
    """One reply. An instance counts what it has written."""

    @abstractmethod
    def piece(self, index: int, chunk: Chunk) -> bytes:
        """The events of a chunk of sample `index`; the first has those that open the stream before them."""

    @abstractmethod
    def last_piece(self) -> bytes:
        """The events that follow when all samples have ended."""

    def failing(self, failure: Failure) -> bytes:
        """The events that end a stream which has failed."""
        return failure.event

    @abstractmethod
    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> Mapping[str, Any]:
        """The reply at once; `chunks` are those of each sample."""


def text_of(chunks: Sequence[Chunk]) -> str:
    """Of one sample."""
    return "".join(chunk.text for chunk in chunks)


def usage_of(chunks: Sequence[Chunk], request: GenerationRequest) -> Usage:
    """Of one sample so far."""
    return chunks[-1].usage if chunks else Usage(len(request.prompt), 0)
