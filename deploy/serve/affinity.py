"""Finds replicas that have recently computed a prefix of a prompt and have room for one more session.

Knows names, hashes and counts; must not know Serve. Each orchestrator has its own instance, which sees neither the
sessions of other orchestrators nor the prefixes that a replica has dropped. A wrong choice costs one prefill.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, Generic, TypeVar

from core.text import BlockHash, block_hashes

STRIDE_TOKENS: Final = 64
"""Prefixes are compared in multiples of this number of tokens; shorter ones do not affect routing."""
MAX_STRIDES: Final = 256
MAX_REMEMBERED: Final = 65_536
"""Number of remembered prefixes; the least recently used are dropped."""
MAX_OVERLOAD: Final = 1.25
"""Multiple of the mean number of sessions up to which a replica is preferred: consistent hashing with bounded loads
(Mirrokni, Thorup, Zadimoghaddam 2016) has the same bound."""

Name = TypeVar("Name")


def prefix_hashes(tokens: Sequence[int], root: bytes = b"") -> tuple[BlockHash, ...]:
    """Hashes of the prefixes of a prompt, the shortest first; `root` as in `block_hashes`."""
    return tuple(block_hashes(tokens[: MAX_STRIDES * STRIDE_TOKENS], STRIDE_TOKENS, root=root))


class Affinity(Generic[Name]):
    """Remembers to which replicas prompts were sent."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[BlockHash, set[Name]] = OrderedDict()
        self._num_sessions: Counter[Name] = Counter()

    def with_prefix(self, prefix: Sequence[BlockHash], among: Collection[Name]) -> set[Name]:
        """The replicas that have the longest known prefix of these, and have room for one more session."""
        for prefix_hash in reversed(prefix):
            if found := self._replicas.get(prefix_hash, set()).intersection(among):
                return {name for name in found if self._has_room(name, among)}
        return set()

    def began(self, prefix: Sequence[BlockHash], name: Name) -> None:
        """Note that a session with this prompt went to a replica."""
        self._num_sessions[name] += 1
        for prefix_hash in prefix:
            self._replicas.setdefault(prefix_hash, set()).add(name)
            self._replicas.move_to_end(prefix_hash)
        while len(self._replicas) > MAX_REMEMBERED:
            self._replicas.popitem(last=False)

    def ended(self, name: Name) -> None:
        """Note the end of a session on a replica."""
        self._num_sessions[name] -= 1
        if self._num_sessions[name] <= 0:
            del self._num_sessions[name]

    def _has_room(self, name: Name, among: Collection[Name]) -> bool:
        num_sessions = 1 + sum(self._num_sessions[other] for other in among)
        return self._num_sessions[name] < math.ceil(MAX_OVERLOAD * num_sessions / len(among))
