"""Everything that determines an output, and a digest of the output, to check later that it is reproduced."""

from __future__ import annotations

from dataclasses import dataclass

from core.records.model import ModelInfo
from core.records.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt of one finished completion. Digests are prefixed with their kind and a colon."""

    version: str
    """Version of Outrider."""
    model: str
    """Model name as used in requests."""
    target: ModelInfo
    draft: ModelInfo | None
    """None if no draft was ready when the request arrived."""
    tokenizer_digest: str
    request: GenerationRequest
    """The request with every parameter resolved."""
    prompt_digest: str
    output_digest: str
    num_output_tokens: int
