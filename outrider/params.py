"""Sampling parameters of a prompt; fields have the same names as in the Python client.

Knows names and types; `deploy.api` validates the values, as it does for the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from core.errors import InvalidRequest
from core.records import EarlyStopping, Policy, SamplingFields, SpeculationFields, Verification
from deploy.api import Given, GivenBeams, given_sampling
from workers.grammar import STRUCTURES, Structure

Prompt = str | Sequence[int]
"""Text or token ids."""
STOPPINGS: Mapping[str | None, EarlyStopping] = {"when_full": True, "never": "never"}


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SamplingParams(SpeculationFields, SamplingFields):
    """How to complete a prompt. None uses the model's generation_config or the settings.

    Names and ranges match the service's fields (protos/outrider/v1/generation.proto).
    """

    n: int = 1
    """Number of outputs per prompt; output i depends only on the seed and i. With beams: the best n."""
    beam_width: int | None = None
    """Number of beams, to search for the likeliest outputs instead of sampling; at least n."""
    length_penalty: float | None = None
    early_stopping: Literal["when_full", "never"] | None = None
    source: str | tuple[int, ...] | None = None
    """Text or token ids for an encoder-decoder's encoder. The prompt, which may be "", then begins the decoder's text.
    Without a source the prompt is the source."""
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
    verification: Verification | None = None
    policy: Policy | None = None
    guessers: tuple[str, ...] = ()
    template: str | None = None
    """Regular expression of the usual output. A hint for guessing; does not constrain the output."""
    explain: bool = False
    """Whether to explain the decisions of each round."""
    receipt: bool = False
    """Whether to include a receipt: everything that determines the output."""
    adapter: str | None = None
    """Name of a LoRA adapter of the settings (target.engine.adapters); None for the target itself."""
    timeout_s: float | None = None
    """Time limit in seconds, from the call of `generate` to the end of the output."""

    def given(self, prompt: Prompt | Sequence[Mapping[str, str]], *, is_chat: bool = False) -> Given:
        """Convert to the input of `deploy.api`'s validation, with one prompt. Raises: InvalidRequest."""
        return Given(
            **{
                **{name: getattr(self, name) for name in _ALIKE},
                "text": prompt if isinstance(prompt, str) else None,
                "token_ids": None if is_chat or isinstance(prompt, str) else prompt,
                "chat": prompt if is_chat else None,
                "sampling": given_sampling(vars(self)),
                "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
                "source": self.source if isinstance(self.source, str) else None,
                "source_token_ids": None if isinstance(self.source, str) else self.source,
                "policy": self.policy or "",
                "structure": self._structure(),
                "beams": self._beams(),
            }
        )

    def _beams(self) -> GivenBeams | None:
        if self.beam_width is None and self.length_penalty is None and self.early_stopping is None:
            return None
        return GivenBeams(
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=STOPPINGS.get(self.early_stopping),
        )

    def _structure(self) -> Structure | None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(given[1], f"cannot be given beside {given[0]}: an output is held to one of them")
        return Structure(given[0], getattr(self, given[0])) if given else None


_ALIKE = {each.name for each in fields(Given)} & {each.name for each in fields(SamplingParams)}
"""Parameters that `Given` has under the same name."""


def checked(arguments: Mapping[str, Any]) -> SamplingParams:
    """Build parameters from keyword arguments. Raises: InvalidRequest naming the argument."""
    try:
        return SamplingParams(**arguments)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        is_unknown = first["type"] == "unexpected_keyword_argument"
        problem = "there is no such argument" if is_unknown else f"{first['msg']}, got {first['input']!r}"
        raise InvalidRequest(name, problem) from None
