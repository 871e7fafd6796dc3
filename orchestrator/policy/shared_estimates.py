"""What the policies of one orchestrator know in common: costs, what guesses are worth, how many they are.

Knows estimates; must not know what is decided with them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from core.costs import CostModel, EngineCost
from core.speculation import PRIOR, Average, Calibration

PRIOR_VERIFY_S, PRIOR_DRAFT_S = 0.025, 0.003
"""Of a pass, before any was seen."""
LOOK_ROUNDS = 8
"""Of all sessions, after which costs are looked at anew, and with them all that was worked out from them."""


@dataclass(slots=True)
class Learned:
    """Of one kind of verification."""

    accepted: Average = field(default_factory=lambda: Average(PRIOR))
    """Of the draft's first candidates."""
    calibration: Calibration = field(default_factory=Calibration)
    """Of the draft's margin."""
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
        self.lookups = Average(PRIOR)
        """What became of guesses that were looked up in the text."""
        self.hits = Average(PRIOR)
        self.kinds: dict[str, Learned] = defaultdict(Learned)
        self.num_sessions = 0
        self._costs: CostModel | None = None
        self._num_verdicts = 0
        self.depth = self.nodes = 0
        """Of blocks, as whoever changed something last makes them."""
        self.reason = ""
        self.num_changes = 0

    def __repr__(self) -> str:
        return f"<SharedEstimates of {self.num_sessions} sessions, {dict(self.kinds)}, {self.verify}, {self.draft}>"

    def most_accepted(self) -> float:
        """In the kind of verification that most has been seen of."""
        accepted = (each.accepted for each in self.kinds.values())
        return max(accepted, key=lambda average: average.num_seen, default=Average(PRIOR)).value

    def rate(self, kind: str) -> float:
        """Tokens a second that a session of this kind makes at the moment, and not less than plain decoding would."""
        learned = self.kinds[kind]
        return max(self.costs.least_rate, learned.tokens.value / learned.seconds.value if learned.seconds else 0.0)

    def saw_interval(self, kind: str, num_tokens: int, elapsed_s: float) -> None:
        """A round, from verdict to verdict. Before the first one came one that decoded plainly."""
        learned = self.kinds[kind]
        if learned.seconds is None:
            learned.seconds = Average(self.costs.verify_s(0))
        learned.tokens.see(num_tokens)
        learned.seconds.see(elapsed_s)

    def note(self, reason: str, depth: int, nodes: int, *, is_change: bool = True) -> None:
        """What is done from now on, and why."""
        self.reason, self.depth, self.nodes = reason, depth, nodes
        self.num_changes += is_change

    def saw_verdict(self) -> None:
        """Of any session."""
        self._num_verdicts += 1
        if self._num_verdicts % LOOK_ROUNDS == 0:
            self._costs = None

    @property
    def num_sharing(self) -> float:
        """Sessions that share a pass of the target, when none of them is late for it."""
        return max(1.0, self.num_sessions / self._num_targets)

    @property
    def costs(self) -> CostModel:
        """As they were when somebody looked last, for as many sessions as there are now."""
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
