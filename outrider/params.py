"""Sampling parameters of a prompt; fields have the same names as in the Python client.

Knows names and types; `deploy.api` validates the values, as it does for the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from core.errors import InvalidRequest
from core.records import Policy, Verification
from deploy.api import Given, given_sampling
from workers.grammar import STRUCTURES, Structure

Prompt = str | Sequence[int]
"""Text or token ids."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SamplingParams:
    """How to complete a prompt. None uses the model's generation_config or the settings.

    Names and ranges match the service's fields (protos/outrider/v1/generation.proto).
    """

    temperature: float | None = None
    """0 means greedy decoding."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """The same seed gives the same tokens. Without one, a random seed is used and reported with the output."""
    n: int = 1
    """Number of outputs per prompt; output i depends only on the seed and i."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    """Maximum number of output tokens. None uses limits.default_max_tokens if set; else 256, or for a chat the rest of
    the context."""
    min_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    """Number of alternatives to report per token; 0 reports only the chosen token."""
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    """At most one of the next five fields may be given; it constrains the whole output."""
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    max_draft_tokens: int | None = None
    """0 disables speculation."""
    verification: Verification | None = None
    lenience: float | None = None
    policy: Policy | None = None
    pipelining: bool | None = None
    guessers: tuple[str, ...] = ()
    template: str | None = None
    """Regular expression of the usual output. A hint for guessing; does not constrain the output."""
    draft_temperature: float | None = None
    """Temperature of the draft; does not change the output distribution."""
    explain: bool = False
    """Whether to explain the decisions of each round."""
    receipt: bool = False
    """Whether to include a receipt: everything that determines the output."""
    timeout_s: float | None = None
    """Time limit in seconds, from the call of `generate` to the end of the output."""

    def given(self, prompt: Prompt | Sequence[Mapping[str, str]], *, is_chat: bool = False) -> Given:
        """Convert to the input of `deploy.api`'s validation, with one prompt. Raises: InvalidRequest."""
        sampling = given_sampling(vars(self))
        return Given(
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if is_chat or isinstance(prompt, str) else prompt,  # type: ignore[arg-type]
            chat=prompt if is_chat else None,  # type: ignore[arg-type]
            sampling=sampling,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            bad_word_ids=self.bad_word_ids,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop=self.include_stop,
            verification=self.verification,
            lenience=self.lenience,
            max_draft_tokens=self.max_draft_tokens,
            policy=self.policy or "",
            pipelining=self.pipelining,
            guessers=self.guessers,
            template=self.template,
            draft_temperature=self.draft_temperature,
            explain=self.explain,
            receipt=self.receipt,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            n=self.n,
            timeout_s=self.timeout_s,
            structure=self._structure(),
        )

    def _structure(self) -> Structure | None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(given[1], f"cannot be given beside {given[0]}: an output is held to one of them")
        return Structure(given[0], getattr(self, given[0])) if given else None


def checked(fields: Mapping[str, Any]) -> SamplingParams:
    """Build parameters from keyword arguments. Raises: InvalidRequest naming the argument."""
    try:
        return SamplingParams(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        is_unknown = first["type"] == "unexpected_keyword_argument"
        problem = "there is no such argument" if is_unknown else f"{first['msg']}, got {first['input']!r}"
        raise InvalidRequest(name, problem) from None
