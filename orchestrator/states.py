"""The coupled machines of a session, each in one table; no transition is made anywhere else.

A session drives a target and, when it has one, a draft. The target's machine is the round: it is idle between
decisions, verifies a block, or waits for the draft to say which is next. The draft's machine says whether the draft can
be asked, and what it is busy with. They are coupled by the session's decisions, so the draft may be absent, busy or
late in any state of the target, and the round goes on. A draft that grows steadily is never asked, and has a machine of
its own in place of the draft's.

`python -m orchestrator.states` prints the diagram that docs/states.md holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


class Target(StrEnum):
    """Where the round stands."""

    UNPLACED = "unplaced"
    """No lease on a target: at the start, and after one was lost."""
    IDLE = "idle"
    """Leased, nothing in flight; left again within the same event."""
    AWAITING_TABLE = "awaiting table"
    """The verdict came before the table that may hold the next block."""
    AWAITING_BLOCK = "awaiting block"
    VERIFYING = "verifying"
    """A block, perhaps an empty one, is at the target. Prefill is verifying an empty block after a long suffix."""
    CLOSED = "closed"


class Draft(StrEnum):
    """Whether the draft can be asked."""

    ABSENT = "absent"
    """No lease: none wanted, none granted yet, or lost. The session goes on without."""
    READY = "ready"
    CATCHING_UP = "catching up"
    """A prefill is in flight; nobody waits for it."""
    DRAFTING = "drafting"
    """A request for a block is in flight."""
    PREPARING = "preparing"
    """A request for an outcome table is in flight."""
    CLOSED = "closed"


class Growing(StrEnum):
    """Whether the draft grows for the session."""

    ABSENT = "absent"
    READY = "ready"
    """Leased, and not told yet."""
    GROWING = "growing"
    CLOSED = "closed"


class Trigger(StrEnum):
    """What moves a machine."""

    PLACED = "placed"
    DRAFT = "draft"
    GROW = "grow"
    PREPARE = "prepare"
    CATCH_UP = "catch up"
    VERIFY = "verify"
    AWAIT_TABLE = "await table"
    TABLE = "table"
    BLOCK = "block"
    NO_BLOCK = "no block"
    """The draft is late, lost, or answered nonsense: this round goes on without guesses."""
    VERDICT = "verdict"
    DRAFTED = "drafted"
    MISSING = "missing"
    """The engine does not hold the base of the message; it is sent again from what the engine holds."""
    LOST = "lost"
    END = "end"


TARGET_TABLE: Mapping[Target, Mapping[Trigger, Target]] = {
    Target.UNPLACED: {
        Trigger.PLACED: Target.IDLE,
        Trigger.END: Target.CLOSED,
    },
    Target.IDLE: {
        Trigger.AWAIT_TABLE: Target.AWAITING_TABLE,
        Trigger.DRAFT: Target.AWAITING_BLOCK,
        Trigger.VERIFY: Target.VERIFYING,
        Trigger.LOST: Target.UNPLACED,
        Trigger.END: Target.CLOSED,
    },
    Target.AWAITING_TABLE: {
        Trigger.TABLE: Target.IDLE,
        Trigger.NO_BLOCK: Target.IDLE,
        Trigger.LOST: Target.UNPLACED,
        Trigger.END: Target.CLOSED,
    },
    Target.AWAITING_BLOCK: {
        Trigger.BLOCK: Target.IDLE,
        Trigger.NO_BLOCK: Target.IDLE,
        Trigger.LOST: Target.UNPLACED,
        Trigger.END: Target.CLOSED,
    },
    Target.VERIFYING: {
        Trigger.VERDICT: Target.IDLE,
        Trigger.MISSING: Target.IDLE,
        Trigger.LOST: Target.UNPLACED,
        Trigger.END: Target.CLOSED,
    },
    Target.CLOSED: {},
}

DRAFT_TABLE: Mapping[Draft, Mapping[Trigger, Draft]] = {
    Draft.ABSENT: {
        Trigger.PLACED: Draft.READY,
        Trigger.END: Draft.CLOSED,
    },
    Draft.READY: {
        Trigger.CATCH_UP: Draft.CATCHING_UP,
        Trigger.DRAFT: Draft.DRAFTING,
        Trigger.PREPARE: Draft.PREPARING,
        Trigger.LOST: Draft.ABSENT,
        Trigger.END: Draft.CLOSED,
    },
    Draft.CATCHING_UP: {
        Trigger.DRAFTED: Draft.READY,
        Trigger.MISSING: Draft.READY,
        Trigger.LOST: Draft.ABSENT,
        Trigger.END: Draft.CLOSED,
    },
    Draft.DRAFTING: {
        Trigger.DRAFTED: Draft.READY,
        Trigger.MISSING: Draft.READY,
        Trigger.LOST: Draft.ABSENT,
        Trigger.END: Draft.CLOSED,
    },
    Draft.PREPARING: {
        Trigger.DRAFTED: Draft.READY,
        Trigger.MISSING: Draft.READY,
        Trigger.LOST: Draft.ABSENT,
        Trigger.END: Draft.CLOSED,
    },
    Draft.CLOSED: {},
}

GROWING_TABLE: Mapping[Growing, Mapping[Trigger, Growing]] = {
    Growing.ABSENT: {Trigger.PLACED: Growing.READY, Trigger.END: Growing.CLOSED},
    Growing.READY: {Trigger.GROW: Growing.GROWING, Trigger.LOST: Growing.ABSENT, Trigger.END: Growing.CLOSED},
    Growing.GROWING: {Trigger.GROW: Growing.GROWING, Trigger.LOST: Growing.ABSENT, Trigger.END: Growing.CLOSED},
    Growing.CLOSED: {},
}

S = TypeVar("S", bound=StrEnum)


class IllegalTransition(AssertionError):
    """A trigger that the table does not allow: a defect of ours, never a client's doing."""


class Machine(Generic[S]):
    """One machine: a state, and the table that alone can change it."""

    def __init__(self, table: Mapping[S, Mapping[Trigger, S]], state: S) -> None:
        self._table = table
        self.state = state

    def __repr__(self) -> str:
        return f"<{type(self.state).__name__} {self.state}>"

    def can(self, trigger: Trigger) -> bool:
        return trigger in self._table[self.state]

    def fire(self, trigger: Trigger) -> None:
        """Raises: IllegalTransition when the table has no such entry."""
        try:
            self.state = self._table[self.state][trigger]
        except KeyError:
            raise IllegalTransition(f"{type(self.state).__name__} {self.state!r} has no {trigger!r}") from None


def diagram() -> str:
    """All tables as Mermaid state diagrams."""
    diagrams = (
        _diagram("Target", TARGET_TABLE),
        _diagram("Draft", DRAFT_TABLE),
        _diagram("Draft that grows steadily", GROWING_TABLE),
    )
    return "\n\n".join(diagrams)


def _diagram(title: str, table: Mapping[S, Mapping[Trigger, S]]) -> str:
    start = next(iter(table))
    lines = ["```mermaid", "---", f"title: {title}", "---", "stateDiagram-v2", f"    [*] --> {_node(start)}"]
    for state, row in table.items():
        lines += [f"    {_node(state)} --> {_node(after)}: {trigger}" for trigger, after in row.items()]
    return "\n".join([*lines, f"    {_node(list(table)[-1])} --> [*]", "```"])


def _node(state: StrEnum) -> str:
    return state.value.replace(" ", "_")


if __name__ == "__main__":
    print(diagram())  # noqa: T201  the program's one output
