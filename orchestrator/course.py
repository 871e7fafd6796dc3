"""One plan for all sessions of a kind: those that share engines wait for each other, so they had better act alike.

Knows estimates, plans and decisions, and connects them; must not know tokens. What a single session's text is like
shows in its tables and in how much of a block it has verified; depth and width are common.
"""

from __future__ import annotations

from collections.abc import Hashable

from core.control import Observation, State, decide
from core.economy import Economy
from core.estimators import RankProfile, rounded_level
from core.planning import PLAIN, Forecast, Plan, best_plan, forecast
from core.shapes import RankLaw
from orchestrator.knowledge import Doing, Knowledge

DECISION_ROUNDS = 4
"""Rounds of each session between decisions, of those that have any: others may be waiting for their prompts."""
MAX_IDLE_DECISIONS = 3
"""A session whose draft has not answered for so many decisions does not go on trying."""


class Course:
    """What the sessions of one kind do at present, and why."""

    def __init__(self, kind: str, profile: RankProfile, max_depth: int, table_tokens: int, known: Knowledge) -> None:
        """`table_tokens`: that may be prepared while the target works; 0 where drafting and verification alternate."""
        self.kind = kind
        self._max_depth = max_depth
        self._table_tokens = table_tokens
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
        self._economy: Economy
        self._expected: Forecast
        self._begin()

    def __repr__(self) -> str:
        return f"<Course of {len(self._levels)} sessions, {self.kind}: {self._state}>"

    @property
    def plan(self) -> Plan:
        """What is done by all; during a trial only by the one that tries."""
        return self._state.plan

    @property
    def waits_on_a_miss(self) -> bool:
        """Whether a block is drafted while the target waits. Who shares its passes goes on with the others."""
        return self.plan.rows_per_pass == 0 or not (self._economy.is_shared or self._state.is_trial)

    @property
    def rate(self) -> float:
        """Tokens a second that the plan promises. In a trial 0: it is to learn, whatever it costs."""
        return 0.0 if self._state.is_trial else self._expected.rate

    @property
    def is_trial(self) -> bool:
        return self._state.is_trial

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
        best = self._best()
        self._state = State(plan=best.plan)
        self._take(best)
        reason = f"{self.kind}: gamma {best.plan.depth}, first choice: {self._figures(best)}"
        self._known.begin(self._known.doing, reason)

    def _decide(self, session: Hashable) -> None:
        self._is_deciding = False
        self._num_rounds = 0
        self._seen.clear()
        self._patience = min(self._patience + 1, DECISION_ROUNDS)  # the first rounds tell most
        self._num_planned = self._known.num_sharing
        self._hand_over()
        before, best = self._state, self._best()
        decision, self._state = decide(self._observation(best), before)
        if before.is_trial != self._state.is_trial:
            self._trying = session if self._state.is_trial and session in self._levels else None
            self._num_tried = self._num_idle = 0
            if self._state.is_trial:
                self._profile.doubt()
        expected = self._forecast(decision.plan)
        reason = ""
        if decision.is_change:
            judged = self._forecast(before.plan) if decision.plan.is_plain else expected
            change = f"gamma {before.plan.depth} -> {decision.plan.depth}, {decision.why}"
            reason = f"{self.kind}: {change}: {self._figures(judged)}"
        self._take(expected, reason)

    def _hand_over(self) -> None:
        """A session that has no draft cannot try: then the next one does."""
        self._num_idle += 1
        if self._state.is_trial and self._num_idle > MAX_IDLE_DECISIONS:
            self._trying, self._num_idle = None, 0

    def _best(self) -> Forecast:
        self._economy = self._known.economy()
        return best_plan(self.law(), self._economy, self._max_depth, self._table_tokens, self._state.plan)

    def _forecast(self, plan: Plan) -> Forecast:
        return forecast(plan, self.law(), self._economy, self._table_tokens)

    def _observation(self, best: Forecast) -> Observation:
        return Observation(
            plain=self._forecast(PLAIN).rate,
            current=self._forecast(self.plan).rate,
            best=best,
            num_tried=self._num_tried,
            is_pipelined=self._table_tokens > 0,
        )

    def _take(self, expected: Forecast, reason: str = "") -> None:
        """Act by the present plan, and say so."""
        self._expected = expected
        self._known.change(Doing(self.plan.depth, self.plan.depth, expected.table_tokens), reason)

    def _figures(self, expected: Forecast) -> str:
        """What speaks for and against a plan."""
        economy, depth = self._economy, expected.plan.depth
        num = economy.num_verifying
        wide_ms, plain_ms = 1e3 * economy.verify_s(depth), 1e3 * economy.verify_s(0.0)
        gain = expected.rate / self._forecast(PLAIN).rate
        return (
            f"{num:.1f} sessions, verify of {num * (depth + 1):.0f} rows {wide_ms:.1f} ms against {plain_ms:.1f} ms "
            f"for {num:.0f}, {expected.tokens:.2f} tokens in {1e3 * expected.round_s:.1f} ms; {gain:.2f}x of plain"
        )
