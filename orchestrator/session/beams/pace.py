"""Whether beam searches should draft, by measurement."""

from __future__ import annotations

MIN_WAIT, MAX_WAIT = 16, 1024
"""Least and most rounds after which the slower way is tried again. Each trial in vain doubles them."""
SHARE = 0.3
"""Weight of the newest round in the estimate of a way."""


class Pace:
    """Seconds per token with and without a draft, of all searches of one width: the quicker way is taken, the other one
    tried now and then."""

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}
        self._num_rounds = 0
        self._wait = self._next_try = MIN_WAIT

    @property
    def is_drafting(self) -> bool:
        """Whether to draft in the next round."""
        if len(self._seconds) < 2:
            return True not in self._seconds
        return self._is_quicker != (self._num_rounds >= self._next_try)

    @property
    def _is_quicker(self) -> bool:
        return self._seconds[True] < self._seconds[False]

    def observe(self, is_drafted: bool, seconds: float, num_tokens: int) -> None:
        """Record a round of a search."""
        usual = self._is_quicker if len(self._seconds) == 2 else None
        now = seconds / max(num_tokens, 1)
        before = self._seconds.get(is_drafted, now)
        self._seconds[is_drafted] = before + SHARE * (now - before)
        self._num_rounds += 1
        if usual is not None and is_drafted != usual and self._num_rounds > self._next_try:
            is_in_vain = self._is_quicker == usual
            self._wait = min(2 * self._wait, MAX_WAIT) if is_in_vain else MIN_WAIT
            self._next_try = self._num_rounds + self._wait


class SearchPace:
    """Whether one search drafts in its next round; what its rounds take is shared with all searches of its width."""

    def __init__(self, shared: Pace, *, is_always_drafted: bool) -> None:
        self._shared = shared
        self._is_always_drafted = is_always_drafted
        self._last_s: float | None = None
        """Time of the last scores, in seconds."""
        self._has_drafted = False

    @property
    def is_drafting(self) -> bool:
        return self._is_always_drafted or self._shared.is_drafting

    def target_lost(self) -> None:
        """Leave out the round that is under way, since another target reads the whole text first."""
        self._last_s = None

    def round_ended(self, now_s: float, num_tokens: int, *, is_drafted: bool) -> None:
        """Record a round, but for the search's first and its first with a draft, which read the prompt."""
        if self._last_s is not None and (self._has_drafted or not is_drafted):
            self._shared.observe(is_drafted, now_s - self._last_s, num_tokens)
        self._has_drafted |= is_drafted
        self._last_s = now_s
