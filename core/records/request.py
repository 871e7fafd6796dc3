"""A client's request, with every check that does not need a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from core.ranges import Range, check_parameters, parameter
from core.records.adapter import Adapter
from core.records.sampling import Sampling
from core.rules import Rule, Verification
from core.speculation import DRAFT_TOKENS

Policy = Literal["adaptive", "static", "static_tree", "heuristic", "confidence", "path_probability", "entropy"]
"""Policies for the draft length (docs/control.md)."""


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


PRIORITY = Range(-(2**31), 2**31 - 1, is_whole=True)
LIMIT = Range(0, 2**31 - 1, is_whole=True)


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one caller on one orchestrator, in place of the service's limits. None keeps the service's limit; 0
    means no limit.
    """

    max_requests_per_minute: int | None = parameter(None, LIMIT)
    max_tokens_per_minute: int | None = parameter(None, LIMIT)
    max_sessions: int | None = parameter(None, LIMIT)
    """Number of concurrent completions."""


NO_QUOTA = Quota()


EarlyStopping = Literal["never"] | bool
"""The setting of transformers. True ends the search once as many outputs have ended as there are beams. False then goes
on while the best beam, at its present length, scores higher than one of them; "never" while any length could make it do
so."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The parameters of a beam search. Temperature and truncation have no effect on it."""

    width: int = parameter(1, Range(1, 64, is_whole=True), "Number of beams")
    num_outputs: int = 1
    """Number of outputs to return, the best first; at most `width`."""
    length_penalty: float = parameter(
        1.0, Range(-10.0, 10.0), "Outputs are compared by their log probability over their length to this power"
    )
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True, kw_only=True)
class SpeculationFields:
    """Parameters of speculation as a caller gives them; `GenerationRequest` has their ranges. None takes the service's
    setting.
    """

    max_draft_tokens: int | None = None
    """0 disables speculation."""
    lenience: float | None = None
    """Required by lenient rules of verification; others have none."""
    pipelining: bool | None = None
    draft_temperature: float | None = None
    """Temperature of the draft; does not change the output distribution."""
    learning: bool | None = None
    """False keeps nothing of the request for training drafts."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to produce, with every check that does not need a model."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    verification: Verification = Verification.COUPLED
    lenience: float = parameter(
        1.0,
        Range(0.0, 1.0, excludes_low=True),
        "For lenient rules: a guess may be less likely than the best token by this factor",
    )
    """1 for rules that take none (`Rule.takes_lenience`)."""
    max_draft_tokens: int | None = parameter(None, DRAFT_TOKENS)
    """Maximum number of tokens drafted in a row. 0 disables speculation; None takes the service's setting."""
    policy: Policy | None = None
    """None takes the service's setting."""
    pipelining: bool | None = None
    """Whether to prepare the next block while the last one is verified. None takes the service's setting."""
    guessers: tuple[str, ...] = ()
    """Names of the guessers to use; empty takes the service's. Include "draft" to use the draft model."""
    template: Grammar | None = None
    """Grammar of the usual output. A hint for the guesser "template"; does not constrain the output."""
    draft_temperature: float | None = parameter(
        None, Range(0.001, 100.0), "Temperature of the draft; the output's distribution stays the target's"
    )
    """Has an effect only if the target samples. None takes the service's setting."""
    learning: bool | None = None
    """Whether the text may be kept for training drafts, if the service does that. None allows it."""
    num_source: int = 0
    """Number of tokens at the start of `prompt` that only an encoder reads: the source. 0 without an encoder."""
    resume_tokens: tuple[int, ...] = ()
    """Output that the client already has. The stream continues after it."""
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
    priority: int = parameter(0, PRIORITY)
    """Order in the admission queue: lower numbers go first."""
    caller: str = ""
    """Name of the caller, for shares of sessions and queue and for quotas. All anonymous callers share the empty
    name."""
    quota: Quota = NO_QUOTA
    """The caller's own quota, from its key."""
    expected_tokens: int | None = None
    """Output tokens to reserve from the quota until the request ends. None reserves `max_tokens`."""
    adapter: Adapter | None = None
    """LoRA adapter of the target that the request has named as its model. Drafts do not use it."""
    beams: BeamSearch | None = None
    """None samples one output, or decodes greedily."""
    isolation: str = ""
    """Name of a tenant. Recent outputs are used as guesses only for requests with the same name, because others could
    infer an output from the speed of theirs. Empty: not shared with any request."""

    def __post_init__(self) -> None:
        check_parameters(self)

    @property
    def num_outputs(self) -> int:
        return 1 if self.beams is None else self.beams.num_outputs

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
        return self.verification.at(is_greedy=self.sampling.is_greedy)
