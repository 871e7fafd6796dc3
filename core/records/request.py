"""What a client asks for, checked as far as that goes without the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core import ranges
from core.rules import Rule, Verification

Policy = Literal["adaptive", "static", "static_tree", "heuristic", "confidence", "path_probability", "entropy"]
"""How to decide how far to draft (docs/control.md)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What turns the target's logits into p, and the seed of the noise that draws from it.

    Raises: InvalidRequest for a value outside its range in `core.ranges` (checks that need the model are made at
    admission).
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output (Keskar et al. 2019, section 4.1)."""
    presence_penalty: float = 0.0
    """Over the output alone."""
    frequency_penalty: float = 0.0
    """Over the output alone."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Tokens of output before `suppressed_ids` may appear."""
    suppressed_ids: tuple[int, ...] = ()
    """The ids that end the output; they are masked until `min_tokens` have been generated."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in ranges.SAMPLING.items():
            ranges.check(name, getattr(self, name), allowed)
        for token_id, bias in self.logit_bias:
            ranges.check(f"logit_bias[{token_id}]", bias, ranges.LOGIT_BIAS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to produce, checked as far as that goes without the model."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    verification: Verification = Verification.COUPLED
    max_draft_tokens: int | None = None
    """Upper bound on the draft length, from the root down; 0 decodes plainly; None leaves it to the service."""
    policy: Policy | None = None
    """None leaves it to the service, as with `pipelining`."""
    pipelining: bool | None = None
    """Whether the next block is prepared while the last one is verified."""
    resume_tokens: tuple[int, ...] = ()
    """Output already received: the stream goes on after it as if it had never stopped."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    include_stop: bool = False
    wants_trace: bool = False
    """Report each call to an engine with the chunk that it led to."""
    deadline: float | None = None
    """On the service's clock, in seconds."""

    @property
    def rule(self) -> Rule:
        """What verifies it."""
        return self.verification.at(is_greedy=self.sampling.is_greedy)
