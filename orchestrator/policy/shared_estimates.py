"""The shared estimates of one orchestrator's policies: costs, acceptance, number of sessions.

Knows estimates; must not know decisions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from core.costs import CostModel, EngineCost
from core.speculation import PRIOR, Average, Calibration, SourceWorth
from orchestrator.policy.pause import DraftingPause
from orchestrator.policy.reach import Reach

PRIOR_VERIFY_S, PRIOR_DRAFT_S = 0.025, 0.0005
"""Seconds of a pass before any was observed. A draft that is thought too dear would never be tried."""
REFRESH_ROUNDS = 8
"""Observations of all sessions after which costs, and everything derived from them, are computed anew."""
ASKING_TRIAL_ROUNDS = 32
"""Rounds that ask the target after a time without questions: a window is full after a few, its n-grams come after."""
TRIAL_SHARE = 0.02
"""Of the tokens of the rounds in between, what a trial may cost."""


@dataclass(slots=True)
class AnswersWorth:
    """Whether the questions of guessers pay: accepted guesses of theirs a round, against the price of the rows."""

    tokens: Average = field(default_factory=lambda: Average(1.0, prior_weight=8.0))
    """Accepted guesses of theirs a round. Hope for too long costs 2% of a service's first rounds."""
    num_trials: int = 0
    """Rounds that still ask whatever it costs, to learn."""
    unasked_rounds: int = 0

    def are_worth(self, price: float) -> bool:
        """Whether to ask in this round, for rows that are worth `price` tokens; trials cost `TRIAL_SHARE` at most."""
        if self.num_trials > 0 or self.tokens.value > price:
            self.unasked_rounds = 0
            return True
        self.unasked_rounds += 1
        if self.unasked_rounds * TRIAL_SHARE > ASKING_TRIAL_ROUNDS * price:
            self.num_trials = ASKING_TRIAL_ROUNDS
        return False

    def observe(self, num_accepted: int) -> None:
        """One round that asked."""
        self.tokens.observe(num_accepted)
        self.num_trials -= self.num_trials > 0


@dataclass(slots=True)
class Learned:
    """Of one kind of verification."""

    accepted: Average = field(default_factory=lambda: Average(PRIOR))
    """Of the draft's first candidates."""
    late_hits: Average = field(default_factory=lambda: Average(PRIOR))
    """How often the next token is among what the draft tells after a miss, and no guesser tells of it."""
    calibration: Calibration = field(default_factory=Calibration)
    """Of the draft's margin."""
    sources: SourceWorth = field(default_factory=SourceWorth)
    """What guessers have been worth."""
    answers: AnswersWorth = field(default_factory=AnswersWorth)
    """What the target's answers to guessers have been worth."""
    reach: Reach = field(default_factory=Reach)
    """Of blocks that were drafted in turn."""
    untried_rounds: int = 0
    """Of all sessions, since one of them drafted in turn for a trial."""
    idle_rounds: int = 0
    """Of all sessions in a row, in which none of them had anything verified."""
    tokens: Average = field(default_factory=lambda: Average(1.0))
    """Of a round of any session."""
    seconds: Average | None = None
    """The same; None before there was one."""


class SharedEstimates:
    """Shared by all policies of an orchestrator; each adds what it sees."""

    def __init__(self, num_targets: float = 1.0, num_drafts: float = 1.0) -> None:
        """`num_targets` and `num_drafts`: engines over orchestrators, among which the sessions spread evenly."""
        self._num_targets = num_targets
        self._num_drafts = num_drafts
        self.verify = EngineCost(PRIOR_VERIFY_S)
        self.draft = EngineCost(PRIOR_DRAFT_S)
        self.hits = Average(PRIOR)
        self.pause = DraftingPause()
        self.kinds: dict[str, Learned] = defaultdict(Learned)
        self.num_sessions = 0
        self._costs: CostModel | None = None
        self._num_verdicts = 0
        self.depth = self.nodes = 0
        """Depth of the blocks of the session that changed last."""
        self.reason = ""
        self.num_changes = 0

    def __repr__(self) -> str:
        return f"<SharedEstimates of {self.num_sessions} sessions, {dict(self.kinds)}, {self.verify}, {self.draft}>"

    def most_accepted(self) -> float:
        """Under the kind of verification with the most observations."""
        accepted = (each.accepted for each in self.kinds.values())
        return max(accepted, key=lambda average: average.num_seen, default=Average(PRIOR)).value

    def rate(self, kind: str) -> float:
        """Present tokens a second of a session of this kind, and at least those of plain decoding."""
        learned = self.kinds[kind]
        return max(self.costs.least_rate, learned.tokens.value / learned.seconds.value if learned.seconds else 0.0)

    def observe_interval(self, kind: str, num_tokens: int, elapsed_s: float) -> None:
        """Seconds of a round, from verdict to verdict; before the first one, those of a plain round."""
        learned = self.kinds[kind]
        if learned.seconds is None:
            learned.seconds = Average(self.costs.verify_s(0))
        learned.tokens.observe(num_tokens)
        learned.seconds.observe(elapsed_s)

    def most_plain(self) -> float:
        """Tokens a second of a session's plain decoding by the fastest pass that was seen."""
        return 1.0 / self.verify.passes.least_s(self.num_sharing)

    def note(self, reason: str, depth: int, nodes: int, *, is_change: bool = True) -> None:
        """Note the present choice, and the reason."""
        self.reason, self.depth, self.nodes = reason, depth, nodes
        self.num_changes += is_change

    def observe_verdict(self) -> None:
        """Of any session."""
        self._num_verdicts += 1
        if self._num_verdicts % REFRESH_ROUNDS == 0:
            self._costs = None

    @property
    def num_sharing(self) -> float:
        """Number of sessions that share a pass of the target when none is late for it."""
        return max(1.0, self.num_sessions / self._num_targets)

    @property
    def costs(self) -> CostModel:
        """The costs as of the last computation, for the present number of sessions."""
        known = self._costs
        if known is None or known.num_verifying != self.num_sharing:
            known = self._costs = CostModel(
                verify_pass_s=self.verify.passes.curve(),
                draft_pass_s=self.draft.passes.curve(),
                verify_wire_s=self.verify.wire_s,
                draft_wire_s=self.draft.wire_s,
                num_verifying=self.num_sharing,
                num_drafting=max(1.0, self.num_sessions / self._num_drafts),
                branch_s=self.verify.passes.branch_s,
            )
        return known
