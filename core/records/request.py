"""A client's request, with every check that does not need a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from core import ranges
from core.rules import Rule, Verification

Policy = Literal["adaptive", "static", "static_tree", "heuristic", "confidence", "path_probability", "entropy"]
"""Policies for the draft length (docs/control.md)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that turn the target's logits into p, and the seed of the sampling noise.

    Raises: InvalidRequest for a value outside its range in `core.ranges`. Checks that need the model are made at
    admission.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Applies to prompt and output (Keskar et al. 2019, section 4.1)."""
    presence_penalty: float = 0.0
    """Applies to the output only."""
    frequency_penalty: float = 0.0
    """Applies to the output only."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Number of output tokens before `suppressed_ids` may appear."""
    suppressed_ids: tuple[int, ...] = ()
    """Token ids that end the output. They are masked for the first `min_tokens` tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """All other ids are masked; () allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences that the output must not contain. The last id of each is masked wherever the output ends in the ids
    before it."""
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

    @property
    def reads_tokens(self) -> bool:
        """Whether the distribution of a token depends on earlier tokens by more than the logits."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)

    def bad_after(self, tokens: Sequence[int], prompt_len: int) -> list[int]:
        """Return the ids that would complete a bad word after `tokens` (prompt included). Bad words of one id always
        count.
        """
        found = []
        for *prefix, last in self.bad_words:
            start = len(tokens) - len(prefix)
            if not prefix or (start >= prompt_len and list(tokens[start:]) == prefix):
                found.append(last)
        return found


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """Lark's notation with llguidance's extensions."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole output must match, as text. Each engine compiles it."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one caller on one orchestrator, in place of the service's limits. None keeps the service's limit; 0
    means no limit.
    """

    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_sessions: int | None = None
    """Number of concurrent completions."""


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to produce, with every check that does not need a model."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    verification: Verification = Verification.COUPLED
    lenience: float = 1.0
    """For rules that take one (`Rule.takes_lenience`), in (0, 1]; otherwise 1."""
    max_draft_tokens: int | None = None
    """Most tokens drafted from the root down. 0 disables speculation; None takes the service's setting."""
    policy: Policy | None = None
    """None takes the service's setting; so does None for `pipelining`."""
    pipelining: bool | None = None
    """Whether to prepare the next block while the last one is verified."""
    guessers: tuple[str, ...] = ()
    """Names of the guessers to use; empty takes the service's. Include "draft" to use the draft model."""
    template: Grammar | None = None
    """Grammar of the usual output. A hint for the guesser "template"; does not constrain the output."""
    draft_temperature: float | None = None
    """Temperature of the draft's distribution q if the target samples. None takes the service's setting."""
    resume_tokens: tuple[int, ...] = ()
    """Output that the client already has. The stream continues after it as if it had never stopped."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    """Number of alternatives to report for each prompt token but the first. None reports nothing."""
    include_stop: bool = False
    wants_trace: bool = False
    """Report each engine call with the chunk that it produced."""
    wants_explanation: bool = False
    """Report with each chunk why its decisions were made."""
    wants_receipt: bool = False
    """Attach a `Receipt` to the last chunk."""
    grammar: Grammar | None = None
    """A complete output matches this grammar; an output cut short by max_tokens or a stop is a prefix of a match."""
    deadline: float | None = None
    """Seconds on the service's clock."""
    priority: int = 0
    """Order in the admission queue: lower numbers go first."""
    caller: str = ""
    """Caller whose share of sessions, queue and quota this uses; empty for all anonymous callers."""
    quota: Quota = NO_QUOTA
    """The caller's own quota, from its key."""
    expected_tokens: int | None = None
    """Output tokens to reserve from the quota until the request ends. None reserves `max_tokens`."""
    isolation: str = ""
    """Tenant whose recent outputs may be used as guesses, and who may use this one's. Other tenants could see such
    outputs in the speed of theirs. Empty: nobody."""

    def __post_init__(self) -> None:
        ranges.check("lenience", self.lenience, ranges.LENIENCE)
        if self.draft_temperature is not None:
            ranges.check("draft_temperature", self.draft_temperature, ranges.DRAFT_TEMPERATURE)

    @property
    def is_repeatable(self) -> bool:
        """Whether another engine can continue the output so far without a change of the target's distribution. False
        for a lossy rule with guesses, because the text then depends on the verified blocks.
        """
        return self.rule.is_lossless or self.max_draft_tokens == 0

    @property
    def depends_on_guesses(self) -> bool:
        """Whether the output depends on the guesses, besides prompt, parameters and seed."""
        return self.max_draft_tokens != 0 and (self.rule.needs_q or not self.rule.is_lossless)

    @property
    def rule(self) -> Rule:
        """The rule that verifies it."""
        return self.verification.at(is_greedy=self.sampling.is_greedy)
