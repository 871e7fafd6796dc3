"""A client of Outrider: `Client` for threads, `AsyncClient` for asyncio.

When a server dies, both call again with the seed and the tokens received so far. The caller sees one unbroken stream:
no token is lost or repeated.
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
