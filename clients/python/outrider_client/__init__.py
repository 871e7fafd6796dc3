"""A client of Outrider: `Client` for threads, `AsyncClient` for asyncio.

Both give one unbroken stream for each completion: when a server dies, they call again with the received tokens and the
seed, and the caller sees no lost and no repeated token.
"""

from outrider_client.aio import AsyncClient, AsyncStream
from outrider_client.client import Client, Stream
from outrider_client.errors import (
    DeadlinePassed,
    Inconsistent,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    ServiceError,
    Unauthenticated,
)
from outrider_client.options import Connection, Retry, Tls
from outrider_client.records import (
    Call,
    CallTrace,
    Chunk,
    Completion,
    Control,
    Finish,
    FinishReason,
    ListedModel,
    Model,
    ModelInfo,
    Sample,
    SamplingDefaults,
    ServiceTier,
    Source,
    Speculation,
    Timing,
    TokenLogprob,
    Unknown,
    Usage,
    Verification,
    VerifiedBlock,
)
from outrider_client.request import GenerateFields

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Call",
    "CallTrace",
    "Chunk",
    "Client",
    "Completion",
    "Connection",
    "Control",
    "DeadlinePassed",
    "Finish",
    "FinishReason",
    "GenerateFields",
    "Inconsistent",
    "InvalidRequest",
    "ListedModel",
    "Model",
    "ModelInfo",
    "NotFound",
    "OutriderError",
    "Overloaded",
    "Retry",
    "Sample",
    "SamplingDefaults",
    "ServiceError",
    "ServiceTier",
    "Source",
    "Speculation",
    "Stream",
    "Timing",
    "Tls",
    "TokenLogprob",
    "Unauthenticated",
    "Unknown",
    "Usage",
    "Verification",
    "VerifiedBlock",
]
