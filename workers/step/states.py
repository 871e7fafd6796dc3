"""Slots for the states of recurrent layers, and the order in which a pass computes them.

A recurrent layer cannot drop rows from its state, so a sequence rolls back to a state that was kept: one for its last
row, one for the row before, and one for each guess, whose state follows from that of its parent. All recurrent layers
use the same slot for the same row. Must not know layers, or what a state is (`workers.recurrent`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.speculation import ROOT

if TYPE_CHECKING:
    from workers.step.kv_cache import SequenceKV
    from workers.step.readers import Span

INITIAL = 0
"""Slot of the state before the first row: zeros, never written."""
NUM_OWN_STATES = 2
"""Number of states of a sequence without guesses: after its last row, and after the row before."""
UNLIMITED = 1 << 31
"""Number of slots of a model without recurrent layers."""


class OutOfBlocks(Exception):
    """The pool has too few free blocks or states; nothing was changed."""


@dataclass(slots=True)
class StateRows:
    """Rows of a pass that a layer computes in one call, and the slots that they read and write."""

    rows: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    is_chunk: bool = False
    """Whether the rows are consecutive rows of one sequence, with one slot each to read and write. Otherwise each row
    is of another sequence or branch, and has slots of its own."""

    def add(self, row: int, source: int, target: int) -> None:
        self.rows.append(row)
        self.sources.append(source)
        self.targets.append(target)


class StateSlots:
    """Slots of the states of all sequences; none for a model without recurrent layers."""

    def __init__(self, num_states: int = 0) -> None:
        self.num_states = num_states
        self._free = list(range(num_states, INITIAL, -1))

    @property
    def is_used(self) -> bool:
        """Whether the model has recurrent layers."""
        return self.num_states > 0

    @property
    def num_free(self) -> int:
        return len(self._free) if self.is_used else UNLIMITED

    @property
    def max_guesses(self) -> int:
        """Number of guesses of one sequence that have room if no other sequence has states."""
        return self.num_states - NUM_OWN_STATES if self.is_used else UNLIMITED

    def reserve_all(self, wanted: Iterable[tuple[SequenceKV, int]]) -> None:
        """Reserve slots for each sequence's next rows; all or none. Raises: OutOfBlocks."""
        if not self.is_used:
            return
        lacking = [(seq, max(0, num_states - len(seq.spare_states))) for seq, num_states in wanted]
        num_needed = sum(count for _, count in lacking)
        if num_needed > self.num_free:
            raise OutOfBlocks(f"{num_needed} states needed, {self.num_free} free")
        for seq, count in lacking:
            seq.spare_states += [self._free.pop() for _ in range(count)]

    def resumable(self, seq: SequenceKV) -> int:
        """Largest number of rows, at most `seq.num_tokens`, after which the sequence can go on."""
        if not self.is_used:
            return seq.num_tokens
        return max((num_rows for num_rows in seq.states if num_rows <= seq.num_tokens), default=0)

    def truncate(self, seq: SequenceKV, num_tokens: int) -> None:
        """Release the states after more than `num_tokens` rows, and all reserved slots."""
        if self.is_used:
            self._drop(seq, [num_rows for num_rows in seq.states if num_rows > num_tokens])
            self._free += seq.spare_states
            seq.spare_states.clear()

    def compact(self, seq: SequenceKV, base_tokens: int, path: Sequence[int]) -> None:
        """Keep the states up to `base_tokens` rows, and those of the rows at offsets `path` right after them."""
        if self.is_used:
            kept = {base_tokens + 1 + row: base_tokens + 1 + offset for row, offset in enumerate(path)}
            moved = {new: seq.states.pop(old) for new, old in kept.items()}
            self._drop(seq, [num_rows for num_rows in seq.states if num_rows > base_tokens])
            seq.states |= moved

    def plan(self, spans: Sequence[Span], max_stepped: int | None) -> list[StateRows]:
        """Assign slots to the rows of a step. Returns the calls that compute them, in order.

        More than `max_stepped` tokens of a sequence are one call; otherwise each row is a step after its parent's row,
        and one call computes a row of each branch. None: all rows are steps.
        """
        if not self.is_used:
            return []
        calls: list[StateRows] = []
        steps: defaultdict[int, StateRows] = defaultdict(StateRows)
        for span in spans:
            self._drop(span.kv, [num_rows for num_rows in span.kv.states if num_rows > span.kv.num_tokens])
            is_chunk = max_stepped is not None and span.num_chain > max_stepped
            calls += [self._chunk(span)] if is_chunk else []
            self._add_steps(span, steps, is_chunk=is_chunk)
        return calls + [steps[level] for level in sorted(steps)]

    def end_step(self, spans: Sequence[Span]) -> None:
        """Release the states that no verdict returns to: all but the last before each span's last token."""
        for span in spans if self.is_used else ():
            self._drop(span.kv, [num_rows for num_rows in span.kv.states if num_rows < span.root])

    def _chunk(self, span: Span) -> StateRows:
        source, target = self._last(span), self._take(span, span.root + 1)
        return StateRows(list(range(span.first_row, span.first_row + span.num_chain)), [source], [target], True)

    def _add_steps(self, span: Span, steps: defaultdict[int, StateRows], *, is_chunk: bool) -> None:
        row, levels = span.first_row, {ROOT: 0}
        if is_chunk:
            row += span.num_chain
        elif span.num_chain:
            source, target = self._last(span), self._take(span, span.root + 1)
            for level in range(span.num_chain):
                steps[level].add(row, source, target)
                row, source = row + 1, target
            levels[ROOT] = span.num_chain
        above = span.root + 2  # number of rows up to node 0, including it
        for node, parent in enumerate(span.parents):
            if node < span.num_cached_nodes:
                levels[node] = 0
                continue
            steps[levels[parent]].add(row, span.kv.states[above + parent], self._take(span, above + node))
            row, levels[node] = row + 1, levels[parent] + 1

    @staticmethod
    def _last(span: Span) -> int:
        """Slot of the state that the span's first token goes on from."""
        return span.kv.states[span.kv.num_tokens] if span.kv.num_tokens else INITIAL

    @staticmethod
    def _take(span: Span, num_rows: int) -> int:
        """Assign a reserved slot to the state after `num_rows` rows."""
        slot = span.kv.states[num_rows] = span.kv.spare_states.pop()
        return slot

    def _drop(self, seq: SequenceKV, keys: Sequence[int]) -> None:
        self._free += [seq.states.pop(num_rows) for num_rows in keys]

    def check_integrity(self, sequences: Iterable[SequenceKV]) -> None:
        """Raises: AssertionError unless every slot is free or belongs to one sequence."""
        owned = [slot for seq in sequences for slot in (*seq.states.values(), *seq.spare_states)]
        assert sorted([*self._free, *owned]) == list(range(INITIAL + 1, self.num_states + 1)), "a state is lost"
