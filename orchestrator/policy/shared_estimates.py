"""What the pilots of one orchestrator know in common: costs, what guesses are worth, how many they are.

Knows estimates; must not know what is decided with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from core.costs import Economy, EngineCost
from core.speculation import ConfidenceFit, DepthRates, Rate

PRIOR_VERIFY_S = 0.025
PRIOR_DRAFT_S = 0.003
PRIOR_ACCEPTANCE = 0.7
Later = Callable[[Callable[[], None]], None]
"""Has something done when nobody waits for it."""
LOOK_ROUNDS = 8
"""Of all sessions, after which costs are looked at anew, and with them all that was worked out from them."""
USUAL_ROUNDS = 64.0
"""Over which it is averaged what a round is like."""


def at_once(act: Callable[[], None]) -> None:
    """Where nobody ever waits."""
    act()


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
        self.lookups = DepthRates(0.5, weight=4.0, window=200.0)
        """What became of guesses that were looked up in the text."""
        self.hits = Rate(0.8, weight=1.0)
        self.num_sessions = 0
        self._max_depth = max_depth
        self._accepted: dict[str, DepthRates] = {}
        self._fits: dict[Hashable, ConfidenceFit] = {}
        self._economy: Economy | None = None
        self._num_verdicts = 0
        self._rounds: dict[str, tuple[float, float]] = {}
        self._trying: Hashable | None = None
        self.doing = Doing()
        self.num_changes = 0
        self.reason = ""

    def __repr__(self) -> str:
        return f"<Knowledge of {self.num_sessions} sessions, {self._accepted}, {self.verify}, {self.draft}>"

    def accepted(self, kind: str) -> DepthRates:
        """Of the draft's first candidates, in this kind of verification."""
        if kind not in self._accepted:
            self._accepted[kind] = DepthRates(PRIOR_ACCEPTANCE, weight=12.0, window=600.0, depth=self._max_depth)
        return self._accepted[kind]

    def fit(self, kind: Hashable) -> ConfidenceFit:
        """What confidences of this kind are worth."""
        return self._fits.setdefault(kind, ConfidenceFit())

    def most_accepted(self) -> DepthRates | None:
        """Of the kind of verification that most has been seen of."""
        return max(self._accepted.values(), key=lambda accepted: accepted.rates[0].seen, default=None)

    def usual_round(self, kind: str) -> tuple[float, float]:
        """Tokens and seconds of a round of any session of this kind; before there was one a plain step's."""
        return self._rounds.get(kind) or (1.0, self.lately.verify_s(0.0))

    def saw_interval(self, kind: str, num_tokens: int, elapsed_s: float) -> None:
        """A round of one of the sessions, from verdict to verdict."""
        tokens, seconds = self.usual_round(kind)
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

    def saw_verdict(self) -> None:
        """Of any session."""
        self._num_verdicts += 1
        if self._num_verdicts % LOOK_ROUNDS == 0:
            self._economy = None

    @property
    def lately(self) -> Economy:
        """Costs as they were believed to be when somebody looked last, for as many sessions as there are now."""
        known = self._economy
        if known is None or known.num_verifying != self.num_sharing:
            known = self._economy = Economy(
                verify_pass_s=self.verify.passes.curve(),
                draft_pass_s=self.draft.passes.curve(),
                verify_wire_s=self.verify.wire_s,
                draft_wire_s=self.draft.wire_s,
                num_verifying=self.num_sharing,
                num_drafting=self.num_sharing_drafts,
                branch_s=self.verify.passes.branch_s,
            )
        return known
