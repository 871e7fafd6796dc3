"""One plan for all sessions of a kind: those that share engines wait for each other, so they had better act alike.

Knows estimates, plans and decisions, and connects them; must not know tokens. What a single session's text is like
shows in its tables and in how much of a block it has verified; the number and width of passes are common.
"""

from __future__ import annotations

from collections.abc import Hashable

from core.control import Decision, Observation, State, decide
from core.estimators import RankProfile, rounded_level
from core.planning import PLAIN, Bounds, Plan
from core.search import Outlook
from core.shapes import RankLaw
from orchestrator.knowledge import Doing, Knowledge

DECISION_ROUNDS = 4
"""Rounds of each session between decisions, of those that have any: others may be waiting for their prompts."""
MAX_IDLE_DECISIONS = 3
"""A session whose draft has not answered for so many decisions does not go on trying."""


class Course:
    """What the sessions of one kind do at present, and why."""

    def __init__(self, kind: str, profile: RankProfile, bounds: Bounds, known: Knowledge) -> None:
        self.kind = kind
        self.bounds = bounds
        self.just_in_time = PLAIN
        """What to draft on a miss."""
        self._profile = profile
        self._known = known
        self._levels: dict[Hashable, float] = {}
        self._level = 0.0
        self._trying: Hashable | None = None
        self._num_tried = 0
        self._num_idle = 0
        """Decisions since the trial last made progress."""
        self._num_rounds = 0
        self._seen: set[Hashable] = set()
        self._is_deciding = False
        self._num_planned = known.num_sharing
        self._patience = 1
        self._state = State()
        self._begin()

    def __repr__(self) -> str:
        return f"<Course of {len(self._levels)} sessions, {self.kind}: {self._state}>"

    @property
    def plan(self) -> Plan:
        """What is done by all; during a trial only by the one that tries."""
        return self._state.plan

    @property
    def max_nodes(self) -> int:
        """Of a block that is verified: as large as it is good, where a draft chooses; trials stay small."""
        return self._state.plan.block_nodes if self._state.is_trial else self.bounds.max_block_tokens

    def block_price(self, num_nodes: int, num_branches: int) -> float:
        """Tokens that verifying a block of so many nodes costs. In a trial nothing: it is to learn."""
        if self._state.is_trial:
            return 0.0
        return self._economy.block_price(self._rate, self._usual_nodes, num_nodes, num_branches)

    def pass_price(self, num_rows: int) -> float:
        """Tokens that it costs to draft for one pass more while the target waits. In a trial nothing, as above."""
        return 0.0 if self._state.is_trial else self._economy.pass_price(self._rate, num_rows)

    def plan_of(self, session: Hashable) -> Plan:
        """What this session does."""
        return PLAIN if self._state.is_trial and session != self._trying else self._state.plan

    def join(self, session: Hashable) -> None:
        self._levels[session] = self._level

    def leave(self, session: Hashable) -> None:
        self._levels.pop(session, None)
        self._seen.discard(session)
        if session == self._trying:
            self._trying = None

    def saw_round(self, session: Hashable, level: float) -> None:
        """A verdict; `level` is how much easier than most this session's text is, in logits."""
        self._levels[session] = level
        if self._state.is_trial and self._trying is None:
            self._trying = session
        self._num_rounds += 1
        self._seen.add(session)
        is_due = self._num_rounds >= self._patience * len(self._seen) or self._known.is_crowded(self._num_planned)
        if is_due and not self._is_deciding:
            self._is_deciding = True
            self._known.later(lambda: self._decide(session))

    def saw_answer(self, session: Hashable) -> None:
        """The draft has answered this session, or failed to."""
        if session == self._trying:
            self._num_tried += 1
            self._num_idle = 0

    def law(self) -> RankLaw:
        """Acceptance in the text of all sessions at the moment."""
        if self._levels:
            self._level = rounded_level(sum(self._levels.values()) / len(self._levels), self._level)
        return self._profile.law(self._level)

    def _begin(self) -> None:
        outlook = self._outlook()
        best = outlook.best()
        self._state = State(plan=best.plan)
        self._take(outlook)
        reason = f"{self.kind}: gamma {best.plan.gamma}, first choice: {_figures(outlook, best.plan)}"
        self._known.begin(self._known.doing, reason)

    def _decide(self, session: Hashable) -> None:
        self._is_deciding = False
        self._num_rounds = 0
        self._seen.clear()
        self._patience = min(self._patience + 1, DECISION_ROUNDS)  # the first rounds tell most
        self._num_planned = self._known.num_sharing
        self._hand_over()
        outlook = self._outlook()
        before = self._state
        decision, self._state = decide(self._observation(outlook), before)
        if before.is_trial != self._state.is_trial:
            self._trying = session if self._state.is_trial and session in self._levels else None
            self._num_tried = self._num_idle = 0
            if self._state.is_trial:
                self._profile.doubt()
        self._take(outlook, self._reason(outlook, before.plan, decision) if decision.is_change else "")

    def _hand_over(self) -> None:
        """A session that has no draft cannot try: then the next one does."""
        self._num_idle += 1
        if self._state.is_trial and self._num_idle > MAX_IDLE_DECISIONS:
            self._trying, self._num_idle = None, 0

    def _outlook(self) -> Outlook:
        return self._known.outlook(self.law(), self.bounds, self._state.plan)

    def _observation(self, outlook: Outlook) -> Observation:
        return Observation(
            plain=outlook.forecast(PLAIN).rate,
            current=outlook.forecast(self.plan).rate,
            best=outlook.best(),
            num_tried=self._num_tried,
            is_pipelined=self.bounds.is_pipelined,
        )

    def _take(self, outlook: Outlook, reason: str = "") -> None:
        """Act by the present plan, and say so."""
        expected = outlook.forecast(self.plan)
        self._economy, self._rate, self._usual_nodes = outlook.economy, expected.rate, expected.block_tokens
        self.just_in_time = PLAIN
        if self.plan.num_passes and not self._state.is_trial:  # a trial tries nothing else
            self.just_in_time = outlook.just_in_time(self.plan)
        self._known.change(Doing(self.plan.gamma, self.plan.block_nodes, expected.table_tokens), reason)

    def _reason(self, outlook: Outlook, before: Plan, decision: Decision) -> str:
        """The change with the figures that decided it: of the plan that guesses, where only one of the two does."""
        judged = before if decision.plan.is_plain else decision.plan
        change = f"gamma {before.gamma} -> {decision.plan.gamma}, {decision.why}"
        return f"{self.kind}: {change}: {_figures(outlook, judged)}"


def _figures(outlook: Outlook, plan: Plan) -> str:
    """What speaks for and against `plan`."""
    economy, expected = outlook.economy, outlook.forecast(plan)
    num = economy.num_verifying
    rows = num * (expected.block_tokens + 1.0)
    wide_ms, plain_ms = 1e3 * economy.verify_s(expected.block_tokens), 1e3 * economy.verify_s(0.0)
    gain = expected.rate / outlook.forecast(PLAIN).rate
    return (
        f"{num:.1f} sessions, verify of {rows:.0f} rows {wide_ms:.1f} ms against {plain_ms:.1f} ms for {num:.0f}, "
        f"{1e3 * economy.branch_s:.1f} ms a branch, "
        f"{expected.tokens:.2f} tokens in {1e3 * expected.round_s:.1f} ms; {gain:.2f}x of plain"
    )
