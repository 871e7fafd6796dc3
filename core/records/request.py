"""A client's request, with every check that needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
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
    allowed_token_ids: tuple[int, ...] = ()
    """All others are masked; () allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences that the output may not hold: the last id of each is masked where the output ends in the others."""
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
        """Whether a token's law depends on the tokens before it by more than the logits."""
        return self.has_penalties or any(len(word) > 1 for word in self.bad_words)

    def bad_after(self, tokens: Sequence[int], prompt_len: int) -> list[int]:
        """The ids that would complete a bad word after `tokens`, prompt included; words of one id need no tokens."""
        found = []
        for *prefix, last in self.bad_words:
            start = len(tokens) - len(prefix)
            if not prefix or (start >= prompt_len and list(tokens[start:]) == prefix):
                found.append(last)
        return found


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """Lark's notation with llguidance's additions."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must be a word of; as text, which each engine compiles by itself."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Quota:
    """What one caller may ask of one orchestrator, in place of the service's limits: None leaves it to these, 0 sets
    no limit."""

    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_sessions: int | None = None
    """Completions at once."""


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to produce, with every check that needs no model."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    verification: Verification = Verification.COUPLED
    lenience: float = 1.0
    """Of a rule that takes one (`Rule.takes_lenience`), in (0, 1]; of others 1."""
    max_draft_tokens: int | None = None
    """Upper bound on the draft length, from the root down; 0 decodes plainly; None takes the service's setting."""
    policy: Policy | None = None
    """None takes the service's setting, as with `pipelining`."""
    pipelining: bool | None = None
    """Whether the next block is prepared while the last one is verified."""
    guessers: tuple[str, ...] = ()
    """Who guesses; empty leaves it to the service. A draft is asked only where "draft" is among them."""
    template: Grammar | None = None
    """What the output usually looks like, for the guesser of that name; it holds the output to nothing."""
    draft_temperature: float | None = None
    """Of the draft's law q, where the target samples; None takes the service's setting."""
    resume_tokens: tuple[int, ...] = ()
    """Output that the client has already: the stream continues after it as if it had never stopped."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    """Alternatives to report with each token of the prompt but the first; None reports nothing."""
    include_stop: bool = False
    wants_trace: bool = False
    """Report each call to an engine with the chunk that it led to."""
    wants_explanation: bool = False
    """Say with each chunk why the decisions that led to it were made."""
    wants_receipt: bool = False
    """Have a `Receipt` with the last chunk."""
    grammar: Grammar | None = None
    """An output that does not end before is a word of it; one that max_tokens or a stop cuts short may be a part."""
    deadline: float | None = None
    """Seconds on the service's clock."""
    priority: int = 0
    """Order in the queue for places: a lower number is served first."""
    caller: str = ""
    """Whose share of places, queue and quota it takes; empty for all who are not told apart."""
    quota: Quota = NO_QUOTA
    """The caller's own, as its key has it."""
    expected_tokens: int | None = None
    """Tokens of output that count against the quota until it ends; None counts `max_tokens`."""
    isolation: str = ""
    """Name of those whose outputs may show in the speed of this one, and it in theirs: one caller or tenant; empty for
    nobody."""

    def __post_init__(self) -> None:
        ranges.check("lenience", self.lenience, ranges.LENIENCE)
        if self.draft_temperature is not None:
            ranges.check("draft_temperature", self.draft_temperature, ranges.DRAFT_TEMPERATURE)

    @property
    def is_repeatable(self) -> bool:
        """Whether what has been output can be gone on with elsewhere, so that it is a text of the target's own law: not
        where a rule is lossy and there may be guesses, for then the text depends on the blocks that were verified.
        """
        return self.rule.is_lossless or self.max_draft_tokens == 0

    @property
    def depends_on_guesses(self) -> bool:
        """Whether prompt, parameters and seed do not determine the output, since the guesses decide, too."""
        return self.max_draft_tokens != 0 and (self.rule.needs_q or not self.rule.is_lossless)

    @property
    def rule(self) -> Rule:
        """What verifies it."""
        return self.verification.at(is_greedy=self.sampling.is_greedy)
