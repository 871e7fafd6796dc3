"""Rank 0's commands to its followers, as integers: edits of the KV, steps to run, backends to build, adapters to read.

Followers have no block tables. Only rank 0 decides which block belongs to which sequence, and what is accepted or
rolled back. Followers erase, copy and compute as commanded, on their own KV heads. A rollback needs no command.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from core.records import Adapter
from workers.step import KVCache, SequenceKV, Span, Step


class Command(IntEnum):
    """The first integer of each message."""

    STOP = 0
    """The last command."""
    STEP = 1
    """Edits and a step follow (`pack_step`)."""
    BUILD_BACKEND = 2
    """Build the next backend, with all other ranks."""
    DROP_BACKEND = 3
    """Remove the backend that was built last: rank 0's self-test has found it wrong."""
    ADD_ADAPTER = 4
    """A number and an adapter follow (`pack_adapter`): each rank reads its part."""
    DROP_ADAPTER = 5
    """The number of the adapter follows."""
    CHECK_ADAPTER = 6
    """The number of the adapter follows: each rank names the modules that its last step did not call."""
    BUILD_PART = 7
    """The number of a part of the fastest backend follows: build it, with all other ranks."""


@dataclass(frozen=True, slots=True)
class KVEdit:
    """Copies slots `sources` to slots `targets`; without sources, erases blocks `targets`."""

    sources: Sequence[int]
    targets: Sequence[int]

    def apply(self, cache: KVCache) -> None:
        if self.sources:
            cache.move(self.sources, self.targets)
        else:
            cache.erase(self.targets)


def pack_step(edits: Sequence[KVEdit], step: Step) -> list[int]:
    """Pack all edits since the last step, in order, then the step; as lists, each preceded by its length."""
    parts: list[Sequence[int]] = [(len(edits), len(step.spans))]
    for edit in edits:
        parts += [edit.sources, edit.targets]
    parts += [step.ids, step.positions, step.wanted]
    for span in step.spans:
        numbers = (span.first_row, span.num_chain, span.num_cached_nodes, span.adapter, span.kv.num_tokens)
        parts += [numbers, span.parents]
        parts.append(span.kv.blocks)
    return [value for part in parts for value in (len(part), *part)]


def unpack_step(values: Iterable[int]) -> tuple[list[KVEdit], Step]:
    """Inverse of `pack_step`."""
    parts = _lists(iter(values))
    num_edits, num_spans = next(parts)
    edits = [KVEdit(next(parts), next(parts)) for _ in range(num_edits)]
    step = Step(next(parts), next(parts), next(parts), [])
    step.spans.extend(_span(*islice(parts, 3)) for _ in range(num_spans))
    return edits, step


def pack_adapter(number: int, adapter: Adapter) -> list[int]:
    return [number, *json.dumps([adapter.name, adapter.path, adapter.digest]).encode()]


def unpack_adapter(values: Sequence[int]) -> tuple[int, Adapter]:
    """Inverse of `pack_adapter`."""
    number, *text = values
    return number, Adapter(*json.loads(bytes(text)))


def _lists(values: Iterator[int]) -> Iterator[list[int]]:
    for length in values:
        yield list(islice(values, length))


def _span(numbers: list[int], parents: list[int], blocks: list[int]) -> Span:
    first_row, num_chain, num_cached_nodes, adapter, num_tokens = numbers
    return Span(SequenceKV(blocks, num_tokens), first_row, num_chain, tuple(parents), num_cached_nodes, adapter)
