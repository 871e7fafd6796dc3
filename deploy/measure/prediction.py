"""Predicts the gain of a measured agreement on hardware whose pass times are known: the best draft length by
number of streams.

Knows acceptance by depth and pass times; must not know where they come from. Transport to engines takes no time here;
`outrider simulate` models it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from core.theory import chain_tokens

STREAMS = (1, 2, 4, 8, 16, 32)
WORTH_IT = 1.03
"""The least factor with which drafting pays: below it the service stops drafting for a while (docs/control.md)."""

PassTime = Callable[[int], float]
"""Seconds of a pass, by its number of rows."""


@dataclass(frozen=True, slots=True)
class Timing:
    name: str
    target: PassTime
    draft: PassTime | None = None

    @property
    def c(self) -> float:
        """Duration of a draft pass over that of a target pass, with one row each; 0 without a draft."""
        return self.draft(1) / self.target(1) if self.draft is not None else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best draft length at a number of streams, and the speed with it over that of plain decoding."""

    num_streams: int
    gamma: int
    factor: float


def predict(
    rates: Sequence[float], timing: Timing, guess_s: float | None = None, *, is_pipelined: bool
) -> list[Prediction]:
    """The prediction for each number of streams.

    `rates`: acceptance by depth, over all positions; a missing guess counts as rejected. `guess_s`: seconds of a
    proposal; None for a draft, which takes a pass for each guess. `is_pipelined`: the draft has a device of its own,
    and the next block is ready when a verdict comes.
    """
    return [_best(rates, timing, guess_s, num_streams, is_pipelined) for num_streams in STREAMS]


def pays_up_to(predictions: Iterable[Prediction]) -> int:
    """The largest number of streams up to which drafting always pays; 0 if it never does."""
    most = 0
    for each in predictions:
        if each.factor < WORTH_IT:
            break
        most = each.num_streams
    return most


def _best(
    rates: Sequence[float], timing: Timing, guess_s: float | None, num_streams: int, is_pipelined: bool
) -> Prediction:
    plain_s = timing.target(num_streams)

    def factor(gamma: int) -> float:
        if not gamma:
            return 1.0
        verify_s = timing.target(num_streams * (gamma + 1))
        draft_s = _draft_s(timing, guess_s, num_streams, gamma)
        round_s = max(verify_s, draft_s) if is_pipelined else verify_s + draft_s
        return chain_tokens(rates[:gamma]) * plain_s / round_s

    gamma = max(range(len(rates) + 1), key=factor)
    return Prediction(num_streams, gamma, factor(gamma))


def _draft_s(timing: Timing, guess_s: float | None, num_streams: int, gamma: int) -> float:
    if guess_s is not None:
        return num_streams * guess_s
    assert timing.draft is not None, "a draft's guesses take passes"
    return gamma * timing.draft(num_streams)
