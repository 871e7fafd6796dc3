"""What a session is given at its beginning: the models that serve it, and the completion it is to make."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import Limits, SpeculationConfig
from core.records import GenerationRequest, ModelInfo, SequenceSpec
from core.text import TokenLog


@dataclass(frozen=True, slots=True)
class Pair:
    """What a session must know of the models it is served by."""

    target: ModelInfo
    draft: ModelInfo | None
    speculation: SpeculationConfig
    limits: Limits


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion in the making: its committed tokens, and how they are drawn."""

    session_id: str
    pair: Pair
    log: TokenLog
    spec: SequenceSpec

    @classmethod
    def begin(cls, request: GenerationRequest, pair: Pair, session_id: str) -> Completion:
        """The prompt alone; output that a client already has is added by the session."""
        spec = SequenceSpec(
            len(request.prompt),
            request.sampling,
            request.verification,
            request.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs,
        )
        return cls(session_id, pair, TokenLog(request.prompt), spec)
