"""The shared estimates of one orchestrator's policies: costs, acceptance, number of sessions.

Knows estimates; must not know decisions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from core.costs import NUM_RECENT, CostModel, EngineCost
from core.records import Timing
from core.speculation import PRIOR, Average, Calibration, SourceWorth
from orchestrator.policy.drafting_pause import DraftingPause
from orchestrator.policy.reach import Reach

PRIOR_VERIFY_S, PRIOR_DRAFT_S = 0.025, 0.0005
"""Seconds of a pass before any was observed. A draft that is thought too dear would never be tried."""
REFRESH_ROUNDS = 8
"""Observations of all sessions after which costs, and everything derived from them, are computed anew."""
ASKING_TRIAL_ROUNDS = 32
"""Rounds that ask the target after a time without questions: a window is full after a few, its n-grams come after."""
TRIAL_SHARE = 0.02
"""Of the tokens of the rounds in between, what a trial may cost."""
MAX_HELD = 1 << 16
"""No engine holds more sessions; one that says so is not believed."""


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


@dataclass(slots=True)
class Sharing:
    """How many sessions share an engine, by how many this orchestrator has.

    Fewer than these where there are several engines of the kind, more where other orchestrators use them, too.
    """

    ratio: float = 1.0
    """Of the sessions that an engine holds to those of this orchestrator."""
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def of(self, num_sessions: int) -> float:
        """The number that share an engine while this orchestrator has `num_sessions`."""
        return float(min(max(1, round(num_sessions * self.ratio)), MAX_HELD))

    def observe(self, num_held: int, num_sessions: int) -> None:
        """An engine says that it holds `num_held`, 0 where it does not say; `num_sessions` of this orchestrator use
        engines of the kind.
        """
        if 0 < num_held <= MAX_HELD and num_sessions > 0:
            self._ratios.append(num_held / num_sessions)
            self.ratio = median(self._ratios)


class SharedEstimates:
    """Shared by all policies of an orchestrator; each adds what it sees."""

    def __init__(self) -> None:
        self._of_targets, self._of_drafts = Sharing(), Sharing()
        self.verify = EngineCost(PRIOR_VERIFY_S)
        self.draft = EngineCost(PRIOR_DRAFT_S)
        self.hits = Average(PRIOR)
        self.pause = DraftingPause()
        self.kinds: dict[str, Learned] = defaultdict(Learned)
        self.num_sessions = 0
        self.num_with_draft = 0
        """Of these, the sessions that hold a lease on a draft."""
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

    def observe_verdict(self, timing: Timing | None) -> None:
        """Of any session."""
        if timing is not None:
            self._of_targets.observe(timing.num_sessions, self.num_sessions)
        self._num_verdicts += 1
        if self._num_verdicts % REFRESH_ROUNDS == 0:
            self._costs = None

    def observe_growth(self, timing: Timing) -> None:
        """Of any session's draft."""
        self._of_drafts.observe(timing.num_sessions, self.num_with_draft)

    @property
    def num_sharing(self) -> float:
        """Number of sessions that share a pass of the target when none is late for it."""
        return self._of_targets.of(self.num_sessions)

    @property
    def costs(self) -> CostModel:
        """The costs as of the last computation, for the present number of sessions."""
        known, num_verifying, num_drafting = self._costs, self.num_sharing, self._of_drafts.of(self.num_sessions)
        if known is None or (known.num_verifying, known.num_drafting) != (num_verifying, num_drafting):
            known = self._costs = CostModel(
                verify_pass_s=self.verify.passes.curve(),
                draft_pass_s=self.draft.passes.curve(),
                verify_wire_s=self.verify.wire_s,
                draft_wire_s=self.draft.wire_s,
                num_verifying=num_verifying,
                num_drafting=num_drafting,
                branch_s=self.verify.passes.branch_s,
            )
        return known
