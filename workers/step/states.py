"""Slots for the states of recurrent layers, and the order in which a pass computes them.

A recurrent layer cannot drop rows from its state, so a sequence rolls back to a state that was kept: one for its last
row, one for the row before, and one for each guess, whose state follows from that of its parent. All recurrent layers
use the same slot for the same row. Must not know layers, or what a state is (`workers.recurrent`).

Sequences share states as they share full blocks of KV: a state at the end of a block is published under the hash of its
whole prefix. A published state without users stays until its slot is needed; the least recently used goes first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.records import max_guesses
from core.speculation import ROOT
from core.text import BlockHash

if TYPE_CHECKING:
    from workers.step.kv_cache import SequenceKV
    from workers.step.readers import Span

INITIAL = 0
"""Slot of the state before the first row: zeros, never written."""
MAX_BORDERS = 8
"""Number of states at ends of blocks that a sequence keeps until they are published; the newest ones."""
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

    def __init__(self, num_states: int = 0, block_tokens: int = 1) -> None:
        self.num_states = num_states
        self.is_shared = False
        """Whether states are kept at ends of blocks, to be published."""
        self._block_tokens = block_tokens
        self._free = list(range(num_states, INITIAL, -1))
        self._num_users: Counter[int] = Counter()
        self._published: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._unused: dict[int, None] = {}
        """Published slots without users, least recently used first."""

    @property
    def is_used(self) -> bool:
        """Whether the model has recurrent layers."""
        return self.num_states > 0

    @property
    def num_free(self) -> int:
        """Number of slots that can be taken: blank and unused ones. Taking an unused one drops its state."""
        return len(self._free) + len(self._unused) if self.is_used else UNLIMITED

    def max_guesses(self, num_sequences: int = 1) -> int:
        """Number of guesses for which each sequence has room, if all have as many."""
        return max_guesses(self.num_states, num_sequences) if self.is_used else UNLIMITED

    def reserve_all(self, wanted: Iterable[tuple[SequenceKV, int]]) -> None:
        """Reserve slots for each sequence's next rows; all or none. Raises: OutOfBlocks."""
        if not self.is_used:
            return
        lacking = [(seq, max(0, num_states - len(seq.spare_states))) for seq, num_states in wanted]
        num_needed = sum(count for _, count in lacking)
        if num_needed > self.num_free:
            raise OutOfBlocks(f"{num_needed} states needed, {self.num_free} free")
        for seq, count in lacking:
            seq.spare_states += [self._allocate() for _ in range(count)]

    def publish(self, seq: SequenceKV, hashes: Sequence[BlockHash]) -> None:
        """Publish the states of a sequence at the ends of its first blocks, one hash each."""
        for num_rows, slot in seq.states.items():
            block, rest = divmod(num_rows, self._block_tokens)
            if rest or not 0 < block <= len(hashes) or slot in self._hash_of or hashes[block - 1] in self._published:
                continue
            self._published[hashes[block - 1]] = slot
            self._hash_of[slot] = hashes[block - 1]

    def num_adoptable(self, hashes: Sequence[BlockHash]) -> int:
        """Number of these leading blocks that a new sequence can begin with: up to the last published state."""
        if not self.is_used:
            return len(hashes)
        return next((num for num in range(len(hashes), 0, -1) if hashes[num - 1] in self._published), 0)

    def adopt(self, seq: SequenceKV, hashes: Sequence[BlockHash]) -> None:
        """Start an empty sequence with the published state after these blocks."""
        if self.is_used and hashes:
            slot = seq.states[len(hashes) * self._block_tokens] = self._published[hashes[-1]]
            self._unused.pop(slot, None)
            self._num_users[slot] += 1

    def resumable(self, seq: SequenceKV) -> int:
        """Largest number of rows, at most `seq.num_tokens`, after which the sequence can go on."""
        if not self.is_used:
            return seq.num_tokens
        return max((num_rows for num_rows in seq.states if num_rows <= seq.num_tokens), default=0)

    def truncate(self, seq: SequenceKV, num_tokens: int) -> None:
        """Release the states after more than `num_tokens` rows, and all reserved slots."""
        if self.is_used:
            self._drop(seq, [num_rows for num_rows in seq.states if num_rows > num_tokens])
            self._release(seq.spare_states)
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
            row, level = span.first_row, 0
            for num_rows, source, target in self._stretches(span) if span.num_chain else ():
                rows = range(row, row := row + num_rows)
                if is_chunk:
                    calls.append(StateRows(list(rows), [source], [target], is_chunk=True))
                    continue
                for each in rows:
                    steps[level].add(each, source, target)
                    source, level = target, level + 1
            self._add_nodes(span, row, level, steps)
        return calls + [steps[level] for level in sorted(steps)]

    def end_step(self, spans: Sequence[Span]) -> None:
        """Release the states that no verdict returns to: all but the last before each span's last token."""
        for span in spans:
            self.drop_early(span.kv, span.root + 1)

    def drop_early(self, seq: SequenceKV, num_committed: int) -> None:
        """Release the states before that of the last but one of `num_committed` rows. Those to be published stay."""
        if self.is_used:
            early = sorted(num_rows for num_rows in seq.states if num_rows < num_committed - 1)
            borders = [num_rows for num_rows in early if self._awaits_publishing(num_rows, seq.states[num_rows])]
            self._drop(seq, [num_rows for num_rows in early if num_rows not in borders[-MAX_BORDERS:]])

    def _awaits_publishing(self, num_rows: int, slot: int) -> bool:
        has_room = self.num_free > self.num_states // 2
        return has_room and self.is_shared and num_rows % self._block_tokens == 0 and slot not in self._hash_of

    def _stretches(self, span: Span) -> list[tuple[int, int, int]]:
        """Numbers of tokens of the span's chain that end in one slot, each with the slots to read and to write.

        A chain over the end of a block has a slot there, too, if one is free.
        """
        first, end = span.kv.num_tokens, span.root + 1
        border = (end - 1) // self._block_tokens * self._block_tokens
        source = span.kv.states[first] if first else INITIAL
        target = self._take(span, end)
        if not (self.is_shared and first < border and self.num_free > self.num_states // 2):
            return [(end - first, source, target)]
        between = span.kv.states[border] = self._allocate()
        return [(border - first, source, between), (end - border, between, target)]

    def _add_nodes(self, span: Span, row: int, level: int, steps: defaultdict[int, StateRows]) -> None:
        """Add the span's new nodes, whose first row is `row`; the root's state is there after `level` steps."""
        levels, above = {ROOT: level}, span.root + 2  # number of rows up to node 0, including it
        for node, parent in enumerate(span.parents):
            if node < span.num_cached_nodes:
                levels[node] = 0
                continue
            steps[levels[parent]].add(row, span.kv.states[above + parent], self._take(span, above + node))
            row, levels[node] = row + 1, levels[parent] + 1

    @staticmethod
    def _take(span: Span, num_rows: int) -> int:
        """Assign a reserved slot to the state after `num_rows` rows."""
        slot = span.kv.states[num_rows] = span.kv.spare_states.pop()
        return slot

    def _drop(self, seq: SequenceKV, keys: Sequence[int]) -> None:
        self._release([seq.states.pop(num_rows) for num_rows in keys])

    def _allocate(self) -> int:
        """Take a slot for one user."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = next(iter(self._unused))
            del self._unused[slot], self._published[self._hash_of.pop(slot)]
        self._num_users[slot] = 1
        return slot

    def _release(self, slots: Iterable[int]) -> None:
        """Remove a user of each slot. Without users, a published slot keeps its state."""
        for slot in slots:
            self._num_users[slot] -= 1
            if self._num_users[slot]:
                continue
            del self._num_users[slot]
            if slot in self._hash_of:
                self._unused[slot] = None
            else:
                self._free.append(slot)

    def check_integrity(self, sequences: Iterable[SequenceKV]) -> None:
        """Raises: AssertionError unless every slot is accounted for once."""
        users = Counter(slot for seq in sequences for slot in (*seq.states.values(), *seq.spare_states))
        assert users == +self._num_users, "a state's users are miscounted"
        assert {slot for slot, count in users.items() if count > 1} <= self._hash_of.keys(), "a state has two owners"
        every = sorted([*self._free, *self._unused, *users])
        assert every == list(range(INITIAL + 1, self.num_states + 1)), "a state is lost"
        assert {slot: name for name, slot in self._published.items()} == self._hash_of, "a hash leads elsewhere"
