"""Decides by measurement what sessions guess with: the draft, the target's head, other guessers alone, or nothing.

Knows tokens and seconds; must not know costs. The cost model sees passes of engines. It does not see that a round with
guesses takes the orchestrator longer, that the target waits for a message which plain decoding does not need, or that a
draft slows down what shares its processors. So the clock decides, and what is tried may lose little time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean

WINDOW_ROUNDS = 8
PLAIN_ROUNDS = 3
"""Rounds of each session over which a rate is measured: `WINDOW_ROUNDS` with guesses, `PLAIN_ROUNDS` without, because
each of these yields one token."""
MIN_ROUNDS, MIN_PLAIN_ROUNDS = 32, 8
"""Minimum number of rounds of all sessions together, with guesses and without, whose durations vary less."""
SETTLING_ROUNDS = 2
"""Rounds of each session that are not measured at the start, when others' prompts share the passes, and after a change:
passes are still in progress, and drafts must catch up."""
MAX_WINDOWS = 32
"""Maximum number of windows between two trials of one mode. It begins at 1 and doubles with each trial in vain."""
MAX_LOST_TOKENS = 2.0
"""Tokens of a session that guesses may cost, compared with plain decoding, before plain decoding is tried, and that a
trial may cost before it ends. Fewer would end trials by bad luck, since rounds with guesses vary."""
TRUSTED_LOST_TOKENS = 8.0
"""The first of these limits where guesses gained in the window before. A few bad rounds in a row are no change then."""
TRIAL_SHARE = 0.01
"""Maximum share of the time that trials may cost. With `MAX_LOST_TOKENS`, a request of 200 tokens sees one or none."""
MIN_GAIN = 1.05
"""Minimum ratio of rates for guesses to be used again, since a window's rate varies as much on a busy machine. Plain
decoding needs no more than to be faster."""
MAX_SESSION_RATIO = 1.5
"""Maximum ratio of numbers of sessions for two rates to be comparable."""


class Mode(IntEnum):
    """Sources of a session's guesses. Each mode includes those before it."""

    PLAIN = 0
    """Nothing. The target continues by itself."""
    GUESSERS = 1
    HEAD = 2
    """The head in the target's engine, for which each verdict takes longer."""
    DRAFT = 3


WAYS = {
    Mode.PLAIN: "without guesses",
    Mode.GUESSERS: "with guessers alone",
    Mode.HEAD: "with the target's head",
    Mode.DRAFT: "with drafting",
}


@dataclass(frozen=True, slots=True)
class MeasuredRound:
    """One round of a session, from verdict to verdict."""

    num_tokens: int
    elapsed_s: float
    is_alone: bool = False
    """Whether the target continued by itself, without guesses."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of a session in one window."""

    tokens_per_s: float
    num_tokens: float
    """Tokens of one session in the window."""
    num_sessions: int

    def is_comparable(self, num_sessions: int) -> bool:
        fewer, more = sorted((num_sessions, self.num_sessions))
        return more <= MAX_SESSION_RATIO * fewer

    def joined(self, other: Rate | None) -> Rate:
        """Both windows as one, if they are comparable."""
        if other is None or not other.is_comparable(self.num_sessions) or not self.tokens_per_s * other.tokens_per_s:
            return self
        num_tokens = self.num_tokens + other.num_tokens
        seconds = self.num_tokens / self.tokens_per_s + other.num_tokens / other.tokens_per_s
        return Rate(num_tokens / seconds, num_tokens, self.num_sessions)

    def lost_tokens(self, tokens_per_s: float) -> float:
        """Tokens that another mode, of this speed, would have made beyond those of this window."""
        return self.num_tokens * (tokens_per_s / self.tokens_per_s - 1.0) if self.tokens_per_s > 0.0 else 0.0


class ModeChoice:
    """The mode of all sessions of one kind. Trials of other modes decide.

    Sessions that lack a draft or guessers use the next lower mode; their rounds count only for that one.
    """

    def __init__(self) -> None:
        self.limit = Mode.DRAFT
        """Sessions guess with this mode at most."""
        self._modes: AbstractSet[Mode] = frozenset({Mode.PLAIN})
        """Modes that sessions have."""
        self._usual: Mode | None = None
        """Mode before the trial in progress; None between trials."""
        self._rates: dict[Mode, Rate] = {}
        """Last measured rate of each mode."""
        self._num_wanted: dict[Mode, int] = defaultdict(lambda: 1)
        """Number of windows between two trials of a mode."""
        self._num_windows = 0
        """Number of windows since the last trial."""
        self._since_s = 0.0
        """Seconds since the last trial."""
        self._spent_s = 0.0
        """Seconds that each session lost in the worse of the last two modes."""
        self._num_settling: int | None = None
        """Number of rounds left that are not measured; None before the first round."""
        self._settling_lost_s = 0.0
        """Seconds that a session lost in the trial's unmeasured rounds, compared with the usual mode."""
        self._num_others = 0
        """Number of rounds in a row of sessions that lack the mode."""
        self._tokens: list[int] = []
        """Tokens of each round, in this window and the one before."""
        self._seconds: list[float] = []

    def __repr__(self) -> str:
        rates = ", ".join(f"{mode.name} {rate.tokens_per_s:.1f} tokens/s" for mode, rate in self._rates.items())
        return f"<ModeChoice {self._mode.name}{' (trial)' if self._usual is not None else ''}: {rates}>"

    @property
    def _mode(self) -> Mode:
        return self._mode_of(self._modes)

    def _mode_of(self, modes: AbstractSet[Mode]) -> Mode:
        """The mode of a session that has these."""
        return max(mode for mode in modes if mode <= self.limit)

    def observe_round(
        self, round_: MeasuredRound, num_sessions: int, modes: AbstractSet[Mode], max_plain_rate: Callable[[], float]
    ) -> str:
        """Record one round of a session that has these modes. Return the reason of a change, empty for none.

        `max_plain_rate`: upper bound of a session's tokens per second in plain decoding. It is used until plain
        decoding was measured, and guesses that exceed it need no trial.
        """
        self._since_s += round_.elapsed_s / num_sessions
        if not modes <= self._modes:
            self._have(self._modes | modes)
        if self._mode_of(modes) is not self._mode:
            self._observe_other(modes, num_sessions)
            return ""
        self._num_others = 0
        if self._num_settling is None:
            self._num_settling = SETTLING_ROUNDS * num_sessions
        if self._num_settling > 0:
            is_earlier = round_.is_alone and self._mode is not Mode.PLAIN  # offered before the change
            if not is_earlier:
                self._num_settling -= 1
                self._settling_lost_s += self._lost_in_trial_s(round_) / num_sessions
            return ""
        self._tokens.append(round_.num_tokens)
        self._seconds.append(round_.elapsed_s)
        if self._usual is not None:
            return self._try(self._usual, num_sessions)
        self._go_on(num_sessions, max_plain_rate)
        return ""

    def _have(self, modes: AbstractSet[Mode]) -> None:
        """Sessions have these modes from now on. A window of another mode is dropped."""
        before, self._modes = self._mode, modes
        if self._mode is not before:
            self._clear()

    def _observe_other(self, modes: AbstractSet[Mode], num_sessions: int) -> None:
        """Record a round of a session that lacks the mode. If all do, as when drafts are gone, the mode is given up."""
        self._num_others += 1
        if self._num_others < max(MIN_ROUNDS, WINDOW_ROUNDS * num_sessions):
            return
        self._num_others = 0
        if self._usual is not None:
            self._end_in_vain(self._usual, num_sessions)
        self._have(modes)

    def _is_full(self, num_sessions: int, *, is_trial: bool) -> bool:
        if self._mode is not Mode.PLAIN:
            return len(self._seconds) >= max(MIN_ROUNDS, WINDOW_ROUNDS * num_sessions)
        return len(self._seconds) >= max(MIN_PLAIN_ROUNDS if is_trial else MIN_ROUNDS, PLAIN_ROUNDS * num_sessions)

    # Between trials

    def _go_on(self, num_sessions: int, max_plain_rate: Callable[[], float]) -> None:
        rate = self._rate(num_sessions)
        if self._mode is not Mode.PLAIN and self._is_behind(rate, max_plain_rate):
            self._begin(Mode.PLAIN, rate.joined(self._rates.get(self._mode)))  # a window that is bad by luck ends early
        elif self._is_full(num_sessions, is_trial=False):
            self._end_window(rate, max_plain_rate)

    def _is_behind(self, rate: Rate, max_plain_rate: Callable[[], float]) -> bool:
        """Whether guesses have cost so much in this window that plain decoding is to be tried at once."""
        plain = self._rates.get(Mode.PLAIN)
        if plain is not None and not plain.is_comparable(rate.num_sessions):
            return False
        plain_rate = plain.tokens_per_s if plain is not None else max_plain_rate()
        before = self._rates.get(self._mode)
        has_gained = before is not None and before.is_comparable(rate.num_sessions) and before.tokens_per_s > plain_rate
        lost, most = rate.lost_tokens(plain_rate), TRUSTED_LOST_TOKENS if has_gained else MAX_LOST_TOKENS
        return lost > most and (self._is_paid or lost > most + self._spent_s * plain_rate)

    def _end_window(self, rate: Rate, max_plain_rate: Callable[[], float]) -> None:
        self._rates[self._mode] = rate
        self._tokens, self._seconds = self._tokens[-len(self._seconds) :], []
        self._num_windows += 1
        if not self._is_paid or (self._mode is not Mode.PLAIN and rate.tokens_per_s >= max_plain_rate()):
            return
        others = [mode for mode in self._modes if mode is not self._mode]
        tried = min(others, key=lambda mode: (self._num_wanted[mode], mode is Mode.GUESSERS), default=None)
        if tried is not None and self._num_windows >= self._num_wanted[tried]:
            self._begin(tried, rate)

    @property
    def _is_paid(self) -> bool:
        """Whether the last trial has cost no more than its share of the time since."""
        return self._since_s * TRIAL_SHARE >= self._spent_s

    # Trials

    def _begin(self, mode: Mode, usual: Rate) -> None:
        self._rates[self._mode] = usual
        self._usual = self._mode
        self._change(mode, usual.num_sessions)

    def _try(self, usual: Mode, num_sessions: int) -> str:
        """Go on with a trial. It ends when its window is full, or when it has cost too much."""
        rate, usual_rate = self._rate(num_sessions), self._rates[usual]
        is_lost = rate.lost_tokens(usual_rate.tokens_per_s) > MAX_LOST_TOKENS
        if not (is_lost or self._is_full(num_sessions, is_trial=True)):
            return ""
        self._rates[self._mode] = rate
        min_gain = MIN_GAIN if self._mode > usual else 1.0
        is_better = rate.tokens_per_s > min_gain * usual_rate.tokens_per_s
        if not (is_better and usual_rate.is_comparable(num_sessions)):
            self._end_in_vain(usual, num_sessions, self._settling_lost_s + _lost_s(rate, usual_rate))
            return ""
        self._end_trial(_lost_s(usual_rate, rate))
        self._num_wanted.clear()
        self._tokens, self._seconds = self._tokens[-len(self._seconds) :], []
        return (
            f"sessions made {rate.tokens_per_s:.1f} tokens/s {WAYS[self._mode]}, "
            f"{usual_rate.tokens_per_s:.1f} {WAYS[usual]}"
        )

    def _lost_in_trial_s(self, round_: MeasuredRound) -> float:
        """Seconds by which a round took longer than its tokens do in the usual mode."""
        usual = self._rates[self._usual].tokens_per_s if self._usual is not None else 0.0
        return round_.elapsed_s - (round_.num_tokens / usual if usual else 0.0)

    def _end_in_vain(self, usual: Mode, num_sessions: int, lost_s: float = 0.0) -> None:
        self._num_wanted[self._mode] = min(2 * self._num_wanted[self._mode], MAX_WINDOWS)
        self._end_trial(lost_s)
        self._change(usual, num_sessions)

    def _end_trial(self, lost_s: float) -> None:
        self._usual, self._num_windows = None, 0
        self._spent_s, self._since_s = max(0.0, lost_s), 0.0

    def _change(self, mode: Mode, num_sessions: int) -> None:
        self.limit = Mode.DRAFT if mode is max(self._modes) else mode
        self._num_settling, self._settling_lost_s = SETTLING_ROUNDS * num_sessions, 0.0
        self._clear()

    def _clear(self) -> None:
        self._tokens, self._seconds = [], []

    def _rate(self, num_sessions: int) -> Rate:
        """The rate in this window so far."""
        seconds, tokens = usual_s(self._seconds), fmean(self._tokens)
        rate = tokens / seconds if seconds > 0.0 else 0.0
        return Rate(rate, tokens * len(self._seconds) / num_sessions, num_sessions)


def _lost_s(slower: Rate, faster: Rate) -> float:
    """Seconds by which a window took longer than its tokens do at another rate."""
    return slower.lost_tokens(faster.tokens_per_s) / faster.tokens_per_s if faster.tokens_per_s > 0.0 else 0.0


def usual_s(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half, to ignore rounds that a prefill has lengthened."""
    cut = len(seconds) // 4
    return fmean(sorted(seconds)[cut : len(seconds) - cut])
