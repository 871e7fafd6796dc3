"""When to change how far a session guesses, when to rest, and when to try again: `(observation, state) -> decision`.

Knows forecasts; must not know how they were made, nor clocks. A change has to promise a few percent, going to rest has
to be the better choice several times in a row, and a session at rest tries drafting again after pauses that grow: so
noise in the estimates cannot make it flap, and what has changed for the better is found out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.planning import PLAIN, Forecast, Plan

CHANGE_GAIN = 1.03
"""Another plan must promise so many times the rate of the present one."""
REST_GAIN = 1.03
"""Drafting that promises less than this over plain decoding is evidence for rest: forecasts leave out what is small."""
RESUME_GAIN = 1.08
"""A session at rest begins again when so much is promised: after a trial, or at once where the load has changed."""
REST_EVIDENCE = 3
"""Decisions in a row that must speak for rest,"""
REST_AT_ONCE = 0.8
"""unless the present plan yields less than this of plain decoding."""
FIRST_PAUSE = 10
"""Decisions between going to rest and the first trial; doubles with each trial in vain."""
MAX_PAUSE = 80
TRIAL_TOKENS = 2
"""A trial is to learn, not to gain: its blocks are as short as tells."""
TRIAL_ROWS = 4
TRIAL_DRAFTS = 6
"""Answers of the draft, or failures to answer, that make a trial."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What is believed at the time of a decision."""

    plain: float
    """Tokens a second without guesses."""
    current: float
    """With the present plan."""
    best: Forecast
    num_tried: int
    """Answers of the draft, or failures to answer, since the present trial began."""
    is_pipelined: bool = True
    """Whether a trial may be prepared while the target works."""


@dataclass(frozen=True, slots=True)
class State:
    """What a decision depends on beside the observation."""

    plan: Plan = PLAIN
    evidence: int = 0
    """Decisions in a row that spoke for rest."""
    num_rested: int = 0
    """Decisions since the session went to rest or tried last; counts only while the plan is plain."""
    pause: int = FIRST_PAUSE
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do from now on."""

    plan: Plan
    why: str = ""
    """Empty when nothing has changed."""

    @property
    def is_change(self) -> bool:
        return bool(self.why)


def decide(seen: Observation, state: State) -> tuple[Decision, State]:
    """What to do from now on, and what to remember. Pure."""
    if state.is_trial:
        return _judge_trial(seen, state)
    if state.plan.is_plain:
        return _at_rest(seen, state)
    return _drafting(seen, state)


def _drafting(seen: Observation, state: State) -> tuple[Decision, State]:
    if seen.best.rate < REST_GAIN * seen.plain:
        state = replace(state, evidence=state.evidence + 1)
        is_clear = state.evidence >= REST_EVIDENCE or seen.current < REST_AT_ONCE * seen.plain
        return _change(state, PLAIN, "drafting does not pay") if is_clear else _stay(state)
    if seen.best.rate > CHANGE_GAIN * seen.current:
        return _change(state, seen.best.plan, "better")
    return _stay(replace(state, evidence=0))


def _at_rest(seen: Observation, state: State) -> tuple[Decision, State]:
    if seen.best.rate > RESUME_GAIN * seen.plain:
        return _change(replace(state, pause=FIRST_PAUSE), seen.best.plan, "drafting pays again")
    if state.num_rested + 1 < state.pause:
        return _stay(replace(state, num_rested=state.num_rested + 1))
    return _change(replace(state, is_trial=True), trial(is_pipelined=seen.is_pipelined), "a trial after rest")


def _judge_trial(seen: Observation, state: State) -> tuple[Decision, State]:
    """A trial ends when the draft has answered a few times, or failed to; one that is away costs nothing."""
    if seen.num_tried < TRIAL_DRAFTS:
        return _stay(state)
    if seen.best.rate >= RESUME_GAIN * seen.plain:
        return _change(replace(state, is_trial=False, pause=FIRST_PAUSE), seen.best.plan, "a trial paid")
    pause = min(2 * state.pause, MAX_PAUSE)
    return _change(replace(state, is_trial=False, pause=pause), PLAIN, "a trial did not pay")


def trial(*, is_pipelined: bool) -> Plan:
    """Short blocks; prepared while the target works, where that can be, so that no round waits for them."""
    return Plan(TRIAL_TOKENS, rows_per_pass=TRIAL_ROWS if is_pipelined else 0)


def _stay(state: State) -> tuple[Decision, State]:
    return Decision(state.plan), state


def _change(state: State, plan: Plan, why: str) -> tuple[Decision, State]:
    return Decision(plan, why), replace(state, plan=plan, evidence=0, num_rested=0)
