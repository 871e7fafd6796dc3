"""What an engine holds of each session: its tokens, their KV, and how to sample for it.

Knows how a message's base and suffix meet what is held. Must not know when rows are computed or what they are for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.records import Base, SequenceSpec
from core.token_log import TokenLog
from workers.kv_cache import KVCache, SequenceKV

MAX_TOMBSTONES = 4096


@dataclass(eq=False, slots=True)
class HeldSequence:
    """One session's tokens and their KV. Invariant between steps: `len(log) == kv.num_tokens`."""

    session: str
    spec: SequenceSpec
    kv: SequenceKV
    log: TokenLog = field(default_factory=TokenLog)
    last_round: int = -1
    last_used_s: float = 0.0


class SequenceStore:
    """All sessions of one engine, oldest first."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._held: OrderedDict[str, HeldSequence] = OrderedDict()
        self._released: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldSequence]:
        return iter(self._held.values())

    def find(self, session: str) -> HeldSequence | None:
        return self._held.get(session)

    def open(self, session: str, spec: SequenceSpec) -> HeldSequence:
        """The session's sequence; a new and empty one if it has none."""
        held = self._held.get(session)
        if held is None:
            held = self._held[session] = HeldSequence(session, spec, self._cache.new_sequence())
        held.spec = spec
        return held

    def was_released(self, session: str) -> bool:
        """Whether a message for this session is an echo from before its end."""
        return session in self._released

    def extend(self, held: HeldSequence, base: Base, suffix: Sequence[int]) -> list[int]:
        """Roll back to what agrees with base and suffix; the rest of the suffix, which is still to be computed.

        Guesses that turned out right are kept: they agree. The last token is always computed again, for its logits.
        """
        num_agreeing = held.log.common_prefix_len(base.num_tokens, suffix)
        num_kept = min(num_agreeing, len(suffix) - 1)
        self.truncate(held, base.num_tokens + num_kept)
        return list(suffix[num_kept:])

    def truncate(self, held: HeldSequence, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens and their KV."""
        held.log.truncate(num_tokens)
        self._cache.truncate(held.kv, num_tokens)

    def drop(self, session: str) -> None:
        """Free a session's KV; it may come back with its whole prefix (this is preemption, too)."""
        if (held := self._held.pop(session, None)) is not None:
            self._cache.free(held.kv)

    def release(self, session: str) -> None:
        """Free a session's KV for good: a message that was overtaken by its end must not bring it back."""
        self.drop(session)
        self._released[session] = None
        if len(self._released) > MAX_TOMBSTONES:
            self._released.popitem(last=False)

    def check_integrity(self) -> None:
        """Raises: AssertionError unless tokens and KV agree for every session."""
        self._cache.check_integrity()
        for held in self:
            assert len(held.log) == held.kv.num_tokens, (
                f"{held.session}: {held.log} but {held.kv.num_tokens} rows of KV"
            )
