"""The calls of a stream to its engines, for those who ask where the time went."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.records.engine import Timing


class Call(StrEnum):
    """What an engine was asked for."""

    VERIFY = "verify"
    BLOCK = "block"
    GROWTH = "growth"
    """One pass of a draft that goes on growing."""
    PREFILL = "prefill"
    """Of the draft, so that it catches up; the target's prefill is verifying an empty block."""


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One answered call of a stream to an engine."""

    call: Call
    sent_s: float
    """Since the stream began, on the orchestrator's clock, as is `received_s`."""
    received_s: float
    num_guesses: int
    """Nodes verified, or nodes grown."""
    num_used: int = 0
    """Of the nodes verified, those accepted; of growth, those of the next block, if it was the last before that."""
    timing: Timing | None = None
