"""Runs a program for a step: its rows, what each of them reads, and the memory of all registers.

Knows steps and the KV cache; must not know modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.native import machine
from workers.native.attention.rows import SPARE, num_scratch
from workers.native.ranks.shared import ALONE, Exchange
from workers.native.team import Team
from workers.runtime.program.program import Program
from workers.runtime.program.recorder import NUM_ROWS
from workers.runtime.program.values import Register
from workers.step import KVCache, Span, Step
from workers.step.readers import ancestor_bits

TABLE_STEP = 1024
"""Positions are looked up in tables that grow by this number."""


class Execution:
    """A program, its threads and its memory."""

    def __init__(
        self, program: Program, cache: KVCache, team: Team, max_context_tokens: int, exchange: Exchange = ALONE
    ) -> None:
        """`exchange`: what this rank shares with the model's other ranks."""
        self._program, self._cache, self._team, self._exchange = program, cache, team, exchange
        self._max_context = max_context_tokens
        self._memory: NDArray[np.float32] = np.zeros(0, np.float32)
        self._tables: list[Tensor] = []
        self._num_positions = 0
        self._scratch: list[Tensor] = []
        self._num_scratch = self._num_kv = 0
        self._work: list[tuple[Any, Any]] = []
        codes = program.codes
        self._stages = program.stages
        for index, matrix in program.products:
            codes[index, 5:14] = matrix.code
        self._largest_inputs = max(matrix.padded_inputs for _, matrix in program.products)
        heads = [codes[index, 16:18] for index, _ in program.attended]
        self._head_widths = [int(max(widths)) for widths in zip(*heads, strict=True)] or [0, 0]
        for index, layer in program.attended:
            codes[index, 8:10] = cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()

    def run(self, step: Step, given: Tensor | None = None) -> tuple[NDArray[np.float32], Sequence[NDArray[np.float32]]]:
        """Write the step's KV. Returns logits of its wanted rows and hidden states of all rows, as long as nothing else
        is run. `given`: what the program reads beside tokens.

        # [W, vocab], [T, hidden] each
        """
        asked = step.asked
        num_rows, num_wanted = sum(span.num_rows for span in step.spans), len(asked)
        self._reserve(num_rows, num_wanted, max(step.positions) + 1, max(span.num_kv for span in step.spans))
        program = self._program
        first = len(program.constants)
        counts = np.array([num_rows, num_wanted, first, first + program.widths[0] * num_rows], np.int64)
        ids, positions, wanted = (np.array(each, np.int64) for each in (step.ids, step.positions, asked))
        if program.rows_of_ids is not None:
            ids = program.rows_of_ids[ids]
        slots, reads, blocks, nodes = _reads(step.spans, self._cache)
        team, memory, exchange = self._team, self._memory, self._exchange
        if program.given is not None and given is not None:
            torch.from_numpy(self._rows_of(program.given, counts)).copy_(given)

        def work(thread: int) -> None:
            offsets, scores = self._work[thread]
            machine.run(
                thread, team.num_threads, team.counter.ctypes.data, self._stages, program.codes, memory,
                memory.ctypes.data, counts, ids, positions, wanted, slots, reads, blocks, nodes, offsets, scores,
                self._scratch[thread].data_ptr(), exchange.numbers, exchange.state,
            )  # fmt: skip

        team.run(work)
        logits = self._rows_of(program.logits, counts)[:, : program.vocab_size]
        states = (self._rows_of(each.register, counts)[:, each.start :][:, : each.width] for each in program.states)
        return logits, [*states]

    def _rows_of(self, register: Register, counts: NDArray[np.int64]) -> NDArray[np.float32]:
        """A register of all rows that have it, in place."""
        count, base = int(counts[register.space]), int(counts[2 + register.space])
        start = base + register.offset * count
        return self._memory[start : start + register.width * count].reshape(count, register.width)

    def _reserve(self, num_rows: int, num_wanted: int, num_positions: int, num_kv: int) -> None:
        """Make room for a step."""
        program = self._program
        needed = len(program.constants) + program.widths[0] * num_rows + program.widths[1] * num_wanted
        if needed > len(self._memory):
            self._memory = np.zeros(needed, np.float32)
            self._memory[: len(program.constants)] = program.constants
        if num_positions > self._num_positions:
            self._extend_tables(num_positions)
        if num_rows > self._num_scratch or num_kv > self._num_kv:
            self._num_scratch = max(num_rows, self._num_scratch)
            self._num_kv = num_kv = -(-max(num_kv, self._num_kv) // TABLE_STEP) * TABLE_STEP
            threads = range(self._team.num_threads)
            shorts = self._num_scratch * self._largest_inputs
            self._scratch = [torch.zeros(shorts, dtype=torch.int16) for _ in threads]
            scores = num_scratch(num_kv, *self._head_widths)
            self._work = [(np.zeros(2 * (num_kv + SPARE), np.int64), np.zeros(scores, np.float32)) for _ in threads]

    def _extend_tables(self, num_positions: int) -> None:
        """Compute what depends on positions alone by the recorded operations, a few positions at a time."""
        program = self._program
        count = min(-(-num_positions // TABLE_STEP) * TABLE_STEP, max(self._max_context, num_positions))
        parts = [_of_positions(program, first, count - 1) for first in range(self._num_positions, count, NUM_ROWS)]
        new = [torch.cat(columns) for columns in zip(*parts, strict=True)]
        kept = [table[: self._num_positions] for table in self._tables] or [each[:0] for each in new]
        self._tables = [torch.cat(pair)[:count].contiguous() for pair in zip(kept, new, strict=True)]
        self._num_positions = count
        for (index, _, _), table in zip(program.tables, self._tables, strict=True):
            program.codes[index, 8] = table.data_ptr()


@torch.no_grad()
def _of_positions(program: Program, first: int, last: int) -> list[Tensor]:
    """Rows of all tables, from a position on; those after the last repeat it.  # [NUM_ROWS, width] each"""
    positions = torch.arange(first, first + NUM_ROWS).clamp(max=last)  # learned positions end at the longest context
    found: dict[int, Any] = {id(program.positions): positions}
    for operation in program.of_positions:
        result = operation.function(*_replaced(operation.args, found), **operation.kwargs)
        _note(operation.result, result, found)
    tensors = [found[id(tensor)].movedim(dim, 0).reshape(NUM_ROWS, -1).float() for _, tensor, dim in program.tables]
    return tensors or [torch.zeros(NUM_ROWS, 0)]


def _replaced(values: Any, found: dict[int, Any]) -> list[Any]:
    return [
        _replaced(value, found) if isinstance(value, (list, tuple)) else found.get(id(value), value) for value in values
    ]


def _note(recorded: Any, result: Any, found: dict[int, Any]) -> None:
    if isinstance(recorded, (list, tuple)):
        for each, other in zip(recorded, result, strict=True):
            _note(each, other, found)
    else:
        found[id(recorded)] = result


def _reads(spans: list[Span], cache: KVCache) -> tuple[NDArray[np.int64], ...]:
    """Slots to write [T], what each row reads [T, 5], and the blocks and single slots that this refers to."""
    slots: list[int] = []
    reads: list[tuple[int, int, int, int, int]] = []
    blocks: list[int] = []
    nodes: list[int] = []
    size = cache.block_tokens
    for span in spans:
        first_block = len(blocks)
        blocks += span.kv.blocks
        old = span.num_kv - span.num_rows
        slots += cache.slots(span.kv, old, span.num_kv)
        num_chain = span.num_rows if span.is_chain else span.num_chain
        reads += ((first_block, old + row + 1, 0, 0, size) for row in range(num_chain))
        if num_chain < span.num_rows:
            for node, bits in enumerate(ancestor_bits(span.parents)):
                if node >= span.num_cached_nodes:
                    path = [above for above in range(node + 1) if bits >> above & 1]
                    reads.append((first_block, span.root + 1, len(nodes), len(path), size))
                    nodes += (cache.slot(span.kv, span.root + 1 + above) for above in path)
    return (
        np.array(slots, np.int64), np.array(reads, np.int64), np.array(blocks, np.int64), np.array(nodes, np.int64),
    )  # fmt: skip
