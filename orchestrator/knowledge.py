"""What the pilots of one orchestrator know in common: costs, what guesses are worth, how many they are.

Knows estimates; must not know what is decided with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from core.costs import EngineCost
from core.economy import SHARED_SESSIONS, Economy
from core.estimators import ConfidenceFit, RankProfile, Rate

PRIOR_VERIFY_S = 0.025
PRIOR_DRAFT_S = 0.003
Later = Callable[[Callable[[], None]], None]
"""Has something done when nobody waits for it."""
GRAIN = 0.08
"""Share by which costs may drift before what was worked out from them is worked out anew."""
BRANCHES = 3.0
"""Of a block, when what they cost is looked at."""
USUAL_ROUNDS = 64.0
"""Over which it is averaged what a round is like."""
LOAD_CHANGE = 1.15
"""Factor by which the number of sessions that share an engine has to change for that."""


def at_once(act: Callable[[], None]) -> None:
    """Where nobody ever waits."""
    act()


@dataclass(slots=True)
class Lookups:
    """What became of guesses that were looked up in the text, by depth."""

    rates: list[Rate] = field(default_factory=lambda: [Rate(0.5, weight=4.0, window=200.0) for _ in range(16)])

    def see(self, num_guesses: int, num_accepted: int) -> None:
        for depth in range(min(num_accepted + 1, num_guesses, len(self.rates))):
            self.rates[depth].see(depth < num_accepted)

    def survival(self, num_tokens: int) -> list[float]:
        """Chance that each of `num_tokens` guesses in a row is accepted, with those before it."""
        return list(accumulate(self.chances(num_tokens), mul))

    def chances(self, num_tokens: int) -> list[float]:
        """The same, given that those before it are accepted."""
        found, before = [], self.rates[0].prior
        for depth in range(num_tokens):
            before = self.rates[min(depth, len(self.rates) - 1)].mean(before)
            found.append(before)
        return found


@dataclass(frozen=True, slots=True)
class Doing:
    """How far is guessed at present."""

    draft_tokens: int = 0
    block_tokens: int = 0


class Knowledge:
    """Shared by all pilots of an orchestrator; each adds what it sees."""

    def __init__(self, max_depth: int, num_targets: float, num_drafts: float, later: Later = at_once) -> None:
        self.later = later
        self._num_targets = num_targets
        self._num_drafts = num_drafts
        self.verify = EngineCost(PRIOR_VERIFY_S)
        self.draft = EngineCost(PRIOR_DRAFT_S)
        self.lookups = Lookups()
        self.hits = Rate(0.8, weight=1.0)
        self.num_sessions = 0
        self._max_depth = max_depth
        self._profiles: dict[str, RankProfile] = {}
        self._fits: dict[Hashable, ConfidenceFit] = {}
        self._economy: Economy | None = None
        self._rounds: dict[str, tuple[float, float]] = {}
        self._trying: Hashable | None = None
        self.doing = Doing()
        self.num_changes = 0
        self.reason = ""

    def __repr__(self) -> str:
        return f"<Knowledge of {self.num_sessions} sessions, {self._profiles}, {self.verify}, {self.draft}>"

    def profile(self, kind: str) -> RankProfile:
        """Acceptance of this kind of verification."""
        if kind not in self._profiles:
            self._profiles[kind] = RankProfile(self._max_depth)
        return self._profiles[kind]

    def fit(self, kind: Hashable) -> ConfidenceFit:
        """What confidences of this kind are worth."""
        return self._fits.setdefault(kind, ConfidenceFit())

    def most_used_profile(self) -> RankProfile | None:
        """Of the kind of verification that most has been seen of."""
        return max(self._profiles.values(), key=lambda profile: profile.num_seen, default=None)

    def usual_round(self, kind: str, prior_tokens: float) -> tuple[float, float]:
        """Tokens and seconds of a round of any session of this kind, before one has rounds of its own."""
        if kind not in self._rounds:
            return prior_tokens, self.lately.verify_s(0.0)
        return self._rounds[kind]

    def saw_interval(self, kind: str, num_tokens: int, elapsed_s: float) -> None:
        """A round of one of the sessions, from verdict to verdict."""
        tokens, seconds = self.usual_round(kind, num_tokens)
        share = 1.0 / USUAL_ROUNDS
        self._rounds[kind] = tokens + (num_tokens - tokens) * share, seconds + (elapsed_s - seconds) * share

    def may_try(self, session: Hashable) -> bool:
        """Whether this session may draft in order to learn whether it pays; nobody else does then."""
        if self._trying is None:
            self._trying = session
        return self._trying is session

    def tried(self, session: Hashable) -> None:
        """It has learned enough, or has ended."""
        if self._trying is session:
            self._trying = None

    def begin(self, doing: Doing, reason: str) -> None:
        """A first choice, and why."""
        self.doing, self.reason = doing, reason

    def change(self, doing: Doing, reason: str = "") -> None:
        """What is done from now on; and why, where that is something else than before."""
        self.doing = doing
        if reason:
            self.num_changes += 1
            self.reason = reason

    @property
    def num_sharing(self) -> float:
        """Sessions that share a pass of the target, when none of them is late for it."""
        return max(1.0, self.num_sessions / self._num_targets)

    @property
    def num_sharing_drafts(self) -> float:
        """The same of a draft."""
        return max(1.0, self.num_sessions / self._num_drafts)

    @property
    def lately(self) -> Economy:
        """Costs as they were believed to be when somebody looked last, for as many sessions as there are now."""
        known = self._economy
        return self.economy() if known is None or self._is_other_load(known.num_verifying) else known

    def economy(self) -> Economy:
        """Costs as they were when they last had drifted noticeably: what was worked out for them holds a while."""
        loads = self.num_sharing, max(1.0, self.num_sessions / self._num_drafts)
        now = self._economy
        if now is None or self._is_other_load(now.num_verifying) or self._has_drifted(now):
            verify_wire_s, draft_wire_s = self._wires_s()
            now = self._economy = Economy(
                verify_pass_s=self.verify.passes.curve(),
                draft_pass_s=self.draft.passes.curve(),
                verify_wire_s=verify_wire_s,
                draft_wire_s=draft_wire_s,
                num_verifying=loads[0],
                num_drafting=loads[1],
                branch_s=self.verify.passes.branch_s,
            )
        return now

    def _wires_s(self) -> tuple[float, float]:
        """Of target and draft. Where passes are shared, what a call waits for the others' is a cost of the passes."""
        if self.num_sharing < SHARED_SESSIONS:
            return self.verify.wire_s, self.draft.wire_s
        return self.verify.hop_s, self.draft.hop_s

    def _is_other_load(self, num_then: float) -> bool:
        now = self.num_sharing
        return max(now, num_then) > LOAD_CHANGE * min(now, num_then)

    def _has_drifted(self, then: Economy) -> bool:
        verify_wire_s, draft_wire_s = self._wires_s()
        return (
            abs(verify_wire_s - then.verify_wire_s) + abs(draft_wire_s - then.draft_wire_s) > GRAIN * then.verify_s(0.0)
            or BRANCHES * abs(self.verify.passes.branch_s - then.branch_s) > GRAIN * then.verify_s(0.0)
            or self.verify.passes.curve().differs(then.verify_pass_s, GRAIN)
            or self.draft.passes.curve().differs(then.draft_pass_s, GRAIN)
        )
