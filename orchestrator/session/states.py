"""The coupled state machines of a session, each in one table. No transition is made anywhere else.

A session drives a target and, if it has one, a draft. The target's machine is the round: idle between decisions,
verifying a block, or waiting for the draft before the next block. The draft's machine says whether the draft grows a
tree for the session. The session couples the two: in every state of the target the draft may be absent or late, and
the round goes on.

docs/states.md has diagrams of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


class Target(StrEnum):
    """State of the round."""

    NOT_LEASED = "not leased"
    """No lease on a target: at the start, or after a lease was lost."""
    IDLE = "idle"
    """Leased, nothing in flight. Left again within the same event."""
    AWAITING_BLOCK = "awaiting block"
    VERIFYING = "verifying"
    """A block, possibly empty, is at the target. Prefill is the verification of an empty block after a long suffix."""
    CLOSED = "closed"


class Growing(StrEnum):
    """Whether the draft grows a tree for the session."""

    ABSENT = "absent"
    READY = "ready"
    """Leased, but no request was sent yet."""
    GROWING = "growing"
    CLOSED = "closed"


class Trigger(StrEnum):
    """Input of a state machine."""

    LEASED = "leased"
    DRAFT = "draft"
    GROW = "grow"
    VERIFY = "verify"
    VERDICT = "verdict"
    MISSING = "missing"
    """The engine does not hold the message's base. The message is sent again, starting from the tokens it holds."""
    LOST = "lost"
    END = "end"


TARGET_TABLE: Mapping[Target, Mapping[Trigger, Target]] = {
    Target.NOT_LEASED: {
        Trigger.LEASED: Target.IDLE,
        Trigger.END: Target.CLOSED,
    },
    Target.IDLE: {
        Trigger.DRAFT: Target.AWAITING_BLOCK,
        Trigger.VERIFY: Target.VERIFYING,
        Trigger.LOST: Target.NOT_LEASED,
        Trigger.END: Target.CLOSED,
    },
    Target.AWAITING_BLOCK: {
        Trigger.VERIFY: Target.VERIFYING,
        Trigger.LOST: Target.NOT_LEASED,
        Trigger.END: Target.CLOSED,
    },
    Target.VERIFYING: {
        Trigger.VERDICT: Target.IDLE,
        Trigger.MISSING: Target.IDLE,
        Trigger.LOST: Target.NOT_LEASED,
        Trigger.END: Target.CLOSED,
    },
    Target.CLOSED: {},
}

GROWING_TABLE: Mapping[Growing, Mapping[Trigger, Growing]] = {
    Growing.ABSENT: {Trigger.LEASED: Growing.READY, Trigger.END: Growing.CLOSED},
    Growing.READY: {Trigger.GROW: Growing.GROWING, Trigger.LOST: Growing.ABSENT, Trigger.END: Growing.CLOSED},
    Growing.GROWING: {Trigger.GROW: Growing.GROWING, Trigger.LOST: Growing.ABSENT, Trigger.END: Growing.CLOSED},
    Growing.CLOSED: {},
}

S = TypeVar("S", bound=StrEnum)


class Machine(Generic[S]):
    """A state, and the table of its transitions."""

    def __init__(self, table: Mapping[S, Mapping[Trigger, S]], state: S) -> None:
        self._table = table
        self.state = state

    def __repr__(self) -> str:
        return f"<{type(self.state).__name__} {self.state}>"

    def can(self, trigger: Trigger) -> bool:
        return trigger in self._table[self.state]

    def fire(self, trigger: Trigger) -> None:
        """Make a transition. A missing entry is a bug in this program, never caused by a client."""
        row = self._table[self.state]
        assert trigger in row, f"{type(self.state).__name__} {self.state!r} has no {trigger!r}"
        self.state = row[trigger]
