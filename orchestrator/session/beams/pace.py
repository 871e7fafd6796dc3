"""Whether a beam search should draft, by measurement."""

from __future__ import annotations

TRY_ROUNDS = 16
"""Rounds after which the slower way is tried again."""
SHARE = 0.3
"""Weight of the newest round in the estimate of a way."""


class Pace:
    """Seconds per token with and without a draft, by measurement: the quicker way is taken, the other one tried now
    and then."""

    def __init__(self, is_fixed: bool) -> None:
        """`is_fixed`: whether to draft always, whatever it costs."""
        self._is_fixed = is_fixed
        self._seconds: dict[bool, float] = {}
        self._num_rounds = 0
        self._has_drafted = False

    @property
    def is_drafting(self) -> bool:
        """Whether to draft in the next round."""
        if self._is_fixed or len(self._seconds) < 2:
            return self._is_fixed or True not in self._seconds
        is_quicker = self._seconds[True] < self._seconds[False]
        return is_quicker != (self._num_rounds % TRY_ROUNDS == 0)

    def observe(self, is_drafted: bool, seconds: float, num_tokens: int) -> None:
        self._num_rounds += 1
        if is_drafted and not self._has_drafted:  # this round had the draft's prefill
            self._has_drafted = True
            return
        now = seconds / max(num_tokens, 1)
        before = self._seconds.get(is_drafted, now)
        self._seconds[is_drafted] = before + SHARE * (now - before)
