"""What determines an output, and what the output was: enough to check later that it comes out again."""

from __future__ import annotations

from dataclasses import dataclass

from core.records.model import ModelInfo
from core.records.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Receipt:
    """Of one completion that has ended. Digests name their kind before the colon."""

    version: str
    """Of Outrider."""
    model: str
    """Its name in requests."""
    target: ModelInfo
    draft: ModelInfo | None
    """None where no draft was ready when the request came."""
    tokenizer_digest: str
    request: GenerationRequest
    """With every parameter as it was resolved."""
    prompt_digest: str
    output_digest: str
    num_output_tokens: int
