"""Shared estimates of one orchestrator's policies: costs, acceptance, number of sessions.

Knows estimates; must not know decisions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from core.costs import NUM_RECENT, CostModel, EngineCost
from core.records import Timing
from core.speculation import PRIOR, Average, Calibration, SourcePrecision
from orchestrator.policy.depth_acceptance import DepthAcceptance
from orchestrator.policy.mode_choice import ModeChoice

PRIOR_VERIFY_S, PRIOR_DRAFT_S = 0.025, 0.0005
"""Assumed seconds of a pass before any was observed. With too high a prior, a draft would never be tried."""
REFRESH_ROUNDS = 8
"""Number of observations, over all sessions, after which costs and derived values are recomputed."""
ASKING_TRIAL_ROUNDS = 32
"""Length in rounds of a trial after a time without questions: the window fills within a few rounds, n-grams come
later."""
TRIAL_SHARE = 0.02
"""Maximum cost of a trial, as a share of the tokens of the rounds between trials."""
MAX_HELD = 1 << 16
"""Maximum plausible number of sessions on an engine. Larger reports are ignored."""


@dataclass(slots=True)
class QuestionValue:
    """Whether guessers' questions pay: accepted guesses per round, against the price of the rows."""

    tokens: Average = field(default_factory=lambda: Average(1.0, prior_weight=8.0))
    """Accepted guesses per round from guessers that ask. Too optimistic a prior costs 2% of a service's first
    rounds."""
    num_trials: int = 0
    """Number of rounds left in which questions are asked whatever they cost, in order to learn."""
    unasked_rounds: int = 0

    def are_worth_asking(self, price: float) -> bool:
        """Whether to ask in this round, for rows worth `price` tokens. Trials cost at most `TRIAL_SHARE`."""
        if self.num_trials > 0 or self.tokens.value > price:
            self.unasked_rounds = 0
            return True
        self.unasked_rounds += 1
        if self.unasked_rounds * TRIAL_SHARE > ASKING_TRIAL_ROUNDS * price:
            self.num_trials = ASKING_TRIAL_ROUNDS
        return False

    def observe(self, num_accepted: int) -> None:
        """Record a round with questions."""
        self.tokens.observe(num_accepted)
        self.num_trials -= self.num_trials > 0


@dataclass(slots=True)
class Learned:
    """Estimates of one kind of verification."""

    accepted: Average = field(default_factory=lambda: Average(PRIOR))
    """Acceptance of the draft's first candidates."""
    late_hits: Average = field(default_factory=lambda: Average(PRIOR))
    """Chance that the draft proposes the next token after a miss, and no guesser does."""
    calibration: Calibration = field(default_factory=Calibration)
    """Calibration of the draft's margin."""
    sources: SourcePrecision = field(default_factory=SourcePrecision)
    """Worth of the guessers."""
    answers: QuestionValue = field(default_factory=QuestionValue)
    """Worth of the target's answers to guessers' questions."""
    depth_acceptance: DepthAcceptance = field(default_factory=DepthAcceptance)
    """Depth reached in blocks that were drafted in turn."""
    untried_rounds: int = 0
    """Number of rounds, over all sessions, since a session last drafted in turn for a trial."""
    idle_rounds: int = 0
    """Number of consecutive rounds, over all sessions, without guesses to verify."""
    tokens: Average = field(default_factory=lambda: Average(1.0))
    """Average tokens per round, over all sessions."""
    seconds: Average | None = None
    """Average seconds per round, over all sessions; None before the first round."""
    choice: ModeChoice = field(default_factory=ModeChoice)
    """Mode of all sessions of one kind, by measured speed."""


@dataclass(slots=True)
class Sharing:
    """Number of sessions that share an engine, relative to the sessions of this orchestrator.

    The ratio is below 1 with several engines of the kind, and above 1 if other orchestrators use them, too.
    """

    ratio: float = 1.0
    """Sessions that an engine holds, divided by the sessions of this orchestrator."""
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def of(self, num_sessions: int) -> float:
        """Return the number of sessions that share an engine while this orchestrator has `num_sessions`."""
        return float(min(max(1, round(num_sessions * self.ratio)), MAX_HELD))

    def observe(self, num_held: int, num_sessions: int) -> None:
        """Record that an engine holds `num_held` sessions (0 if unknown), while `num_sessions` of this orchestrator use
        engines of this kind."""
        if 0 < num_held <= MAX_HELD and num_sessions > 0:
            self._ratios.append(num_held / num_sessions)
            self.ratio = median(self._ratios)


class SharedEstimates:
    """Estimates shared by all policies of an orchestrator. Each policy adds its observations."""

    def __init__(self, target_times_s: Sequence[tuple[int, float]] = ()) -> None:
        """`target_times_s`: (rows, seconds) of the target's passes, measured when it started."""
        self._of_targets, self._of_drafts = Sharing(), Sharing()
        self.verify = EngineCost(PRIOR_VERIFY_S)
        for rows, seconds in target_times_s:
            self.verify.passes.observe(rows, seconds)
        self.draft = EngineCost(PRIOR_DRAFT_S)
        self.hits = Average(PRIOR)
        self.kinds: dict[str, Learned] = defaultdict(Learned)
        self.num_sessions = 0
        self.num_with_draft = 0
        """Number of sessions that hold a lease on a draft."""
        self._costs: CostModel | None = None
        self._num_verdicts = 0
        self.depth = self.nodes = 0
        """Depth and number of nodes of the blocks of the session that changed last."""
        self.reason = ""
        self.num_changes = 0

    def __repr__(self) -> str:
        return f"<SharedEstimates of {self.num_sessions} sessions, {dict(self.kinds)}, {self.verify}, {self.draft}>"

    def acceptance(self) -> float:
        """Return the acceptance estimate of the kind of verification with the most observations."""
        accepted = (each.accepted for each in self.kinds.values())
        return max(accepted, key=lambda average: average.num_seen, default=Average(PRIOR)).value

    def rate(self, kind: str) -> float:
        """Return the current tokens per second of a session of this kind; at least the rate of plain decoding."""
        learned = self.kinds[kind]
        return max(self.costs.plain_rate, learned.tokens.value / learned.seconds.value if learned.seconds else 0.0)

    def observe_interval(self, kind: str, num_tokens: int, elapsed_s: float) -> None:
        """Record the tokens and seconds of a round, from verdict to verdict."""
        learned = self.kinds[kind]
        if learned.seconds is None:
            learned.seconds = Average(self.costs.verify_s(0))
        learned.tokens.observe(num_tokens)
        learned.seconds.observe(elapsed_s)

    def max_plain_rate(self) -> float:
        """Return a session's tokens per second in plain decoding, by the fastest pass observed."""
        return 1.0 / self.verify.passes.min_s(self.num_sharing)

    def note(self, reason: str, depth: int, nodes: int, *, is_change: bool = True) -> None:
        """Record the current choice, and the reason."""
        self.reason, self.depth, self.nodes = reason, depth, nodes
        self.num_changes += is_change

    def observe_verdict(self, timing: Timing | None) -> None:
        """Record a verdict of any session."""
        if timing is not None:
            self._of_targets.observe(timing.num_sessions, self.num_sessions)
        self._num_verdicts += 1
        if self._num_verdicts % REFRESH_ROUNDS == 0:
            self._costs = None

    def observe_growth(self, timing: Timing) -> None:
        """Record a draft pass of any session."""
        self._of_drafts.observe(timing.num_sessions, self.num_with_draft)

    @property
    def num_sharing(self) -> float:
        """Number of sessions that share a pass of the target, if none is late."""
        return self._of_targets.of(self.num_sessions)

    @property
    def costs(self) -> CostModel:
        """Costs as of the last computation, for the current number of sessions."""
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
                guessing_s=self.verify.guessing_s,
            )
        return known
