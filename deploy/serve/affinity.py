"""Which replicas have lately computed the beginning of a prompt, and whether they may take one session more.

Pure: knows names, hashes and counts, and no Serve. It is one orchestrator's memory: what another has sent somewhere, or
what a replica has had to forget, is not in it. A guess that is wrong costs a prefill, and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, Generic, TypeVar

from core.text import BlockHash, block_hashes

STRIDE_TOKENS: Final = 64
"""Beginnings are compared in steps of so many tokens; shorter ones are not worth a detour."""
MAX_STRIDES: Final = 256
MAX_REMEMBERED: Final = 65_536
"""Beginnings; the least recently used are forgotten."""
MAX_OVERLOAD: Final = 1.25
"""Times the mean number of sessions that a replica may have and still be preferred: consistent hashing with bounded
loads (Mirrokni, Thorup, Zadimoghaddam 2016) has the same bound."""

Name = TypeVar("Name")


def beginnings(tokens: Sequence[int]) -> tuple[BlockHash, ...]:
    """Names of the beginnings of a prompt, the shortest first."""
    return tuple(block_hashes(tokens[: MAX_STRIDES * STRIDE_TOKENS], STRIDE_TOKENS))


class Affinity(Generic[Name]):
    """Where prompts have been sent."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[BlockHash, set[Name]] = OrderedDict()
        self._num_sessions: Counter[Name] = Counter()

    def warm(self, prefix: Sequence[BlockHash], among: Collection[Name]) -> set[Name]:
        """Those that have computed the longest of these beginnings and have not too many sessions for one more."""
        for beginning in reversed(prefix):
            if found := self._replicas.get(beginning, set()).intersection(among):
                return {name for name in found if self._has_place(name, among)}
        return set()

    def began(self, prefix: Sequence[BlockHash], name: Name) -> None:
        """A session with this prompt has been sent there."""
        self._num_sessions[name] += 1
        for beginning in prefix:
            self._replicas.setdefault(beginning, set()).add(name)
            self._replicas.move_to_end(beginning)
        while len(self._replicas) > MAX_REMEMBERED:
            self._replicas.popitem(last=False)

    def ended(self, name: Name) -> None:
        """One of its sessions has."""
        self._num_sessions[name] -= 1
        if self._num_sessions[name] <= 0:
            del self._num_sessions[name]

    def _has_place(self, name: Name, among: Collection[Name]) -> bool:
        num_sessions = 1 + sum(self._num_sessions[other] for other in among)
        return self._num_sessions[name] < math.ceil(MAX_OVERLOAD * num_sessions / len(among))
