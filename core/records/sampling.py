"""The sampling parameters: the name, type, range and text of each.

gRPC, HTTP bodies, the Python API, the client, links and receipts fill their fields by these names
(docs/howto/add-a-sampling-parameter.md).

Inside the ranges float32 holds. Logits of a real model stay below 1e4. A bias adds at most 100, the repetition penalty
multiplies by at most 10, and the other penalties subtract at most 2 and 2 for each occurrence: so scores stay below
1e7, where float32 still represents every integer. Temperature divides the distance to the largest score, so the largest
is 0, and a score that overflows has probability zero. A row with NaN or infinite scores is refused
(`core.exact.sampling.log_probs`, `workers.engine.target`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from core.ranges import Range, check, check_parameters, parameter

MODEL_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters for which a model may have its own defaults."""
BIAS = Range(-100.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """Sampling parameters as a caller gives them. None takes the model's default."""

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


GIVEN_SAMPLING = tuple(each.name for each in fields(SamplingFields))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that turn the target's logits into p, and the seed of the sampling noise.

    Raises: InvalidRequest for a value outside its range. Checks that need the model are made at admission.
    """

    temperature: float = parameter(1.0, Range(0.001, 100.0, zero="greedy"), "Sampling temperature")
    """Values between 0 and the range are refused; they do not mean greedy."""
    top_k: int = parameter(
        0, Range(1, 2**31 - 1, zero="keeps all", is_whole=True), "Sample from the N likeliest tokens"
    )
    top_p: float = parameter(
        1.0, Range(0.0, 1.0, excludes_low=True), "Sample from the likeliest tokens with a total probability of P"
    )
    min_p: float = parameter(0.0, Range(0.0, 1.0), "Sample from tokens at least P times as likely as the likeliest")
    repetition_penalty: float = parameter(1.0, Range(0.1, 10.0), "Make tokens of prompt and output less likely")
    """Keskar et al. 2019, section 4.1."""
    presence_penalty: float = parameter(0.0, Range(-2.0, 2.0), "Make tokens of the output less likely")
    frequency_penalty: float = parameter(
        0.0, Range(-2.0, 2.0), "Make tokens of the output less likely, for each occurrence"
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = parameter(0, Range(0, 2**31 - 1, is_whole=True))
    """Number of output tokens before `suppressed_ids` may appear."""
    suppressed_ids: tuple[int, ...] = ()
    """Token ids that end the output. They are masked for the first `min_tokens` tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """All other ids are masked; () allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences that the output must not contain. The last id of each is masked wherever the output ends in the ids
    before it."""
    seed: int = parameter(0, Range(0, 2**64 - 1, is_whole=True), "The same seed gives the same tokens")

    def __post_init__(self) -> None:
        check_parameters(self)
        for token_id, bias in self.logit_bias:
            check(f"logit_bias[{token_id}]", bias, BIAS)

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
