"""What an engine holds of each session: its tokens, guesses below them, the KV of both, and how to sample for it.

Knows how KV follows what `core.protocol` decides. Must not know when rows are computed or what they are for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.protocol import EndedSessions, HeldTokens, Rebased
from core.records import SequenceSpec
from core.text import BlockHash, block_hashes
from workers.step import KVCache, SequenceKV


@dataclass(eq=False, slots=True)
class HeldSequence(HeldTokens):
    """One session's tokens, the tree of guesses below them, and the KV of both, in this order.

    Invariant between steps: `len(log) + len(tree) == kv.num_tokens`.
    """

    session: str = field(kw_only=True)
    kv: SequenceKV = field(kw_only=True)
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the first blocks of the log, as far as somebody has asked."""
    last_used_s: float = 0.0


class SequenceStore:
    """All sessions of one engine, oldest first."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._held: OrderedDict[str, HeldSequence] = OrderedDict()
        self._ended = EndedSessions()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldSequence]:
        return iter(self._held.values())

    def find(self, session: str) -> HeldSequence | None:
        return self._held.get(session)

    def open(self, session: str, spec: SequenceSpec) -> HeldSequence:
        """The session's sequence; a new and empty one if it has none. What was guessed by another spec is forgotten."""
        held = self._held.get(session)
        if held is None:
            held = self._held[session] = HeldSequence(spec, session=session, kv=self._cache.new_sequence())
        held.take_spec(spec)
        self._cache.truncate(held.kv, len(held.log) + len(held.tree))
        return held

    def has_ended(self, session: str) -> bool:
        """Whether a message for this session is an echo from before its end."""
        return session in self._ended

    def follow(self, held: HeldSequence, rebased: Rebased) -> Rebased:
        """Let KV follow what a message has left of the sequence; the same again."""
        self._follow(held, rebased.num_tokens, rebased.guesses)
        return rebased

    def num_adoptable(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks others have left, from the first on."""
        return self._cache.num_published(hashes)

    def adopt(self, held: HeldSequence, hashes: Sequence[BlockHash], tokens: Sequence[int]) -> int:
        """Begin an empty sequence with what others have computed of `tokens`; of how many of them the KV is there."""
        num_tokens = self._cache.adopt(held.kv, hashes)
        held.log.extend(tokens[:num_tokens])
        return num_tokens

    def publish(self, held: HeldSequence) -> None:
        """Let others begin with this sequence's tokens. The model must have said something sound after the last."""
        block_tokens = self._cache.block_tokens
        if len(held.log) // block_tokens > len(held.hashes):
            held.hashes = block_hashes(held.log.tokens, block_tokens, held.hashes)
            self._cache.publish(held.kv, held.hashes)

    def step_back(self, held: HeldSequence) -> list[int]:
        """Forget the last token, which is to be computed again for its logits; that token."""
        pending = held.step_back()
        self._follow(held, len(held.log))
        return pending

    def truncate(self, held: HeldSequence, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens and their KV."""
        held.truncate(num_tokens)
        self._follow(held, num_tokens)

    def forget_guesses(self, held: HeldSequence) -> None:
        """Keep the tokens, and of what was computed below them nothing."""
        self.truncate(held, len(held.log))

    def drop(self, session: str) -> None:
        """Free a session's KV; it may come back with its whole prefix (this is preemption, too)."""
        if (held := self._held.pop(session, None)) is not None:
            self._cache.free(held.kv)

    def release(self, session: str) -> None:
        """Free a session's KV for good: a message that was overtaken by its end must not bring it back."""
        self.drop(session)
        self._ended.add(session)

    def _follow(self, held: HeldSequence, num_tokens: int, guesses: Sequence[int] = ()) -> None:
        """Keep the KV of the first `num_tokens` rows and of these guesses behind them."""
        del held.hashes[num_tokens // self._cache.block_tokens :]
        self._cache.compact(held.kv, num_tokens, guesses)

    def check_integrity(self) -> None:
        """Raises: AssertionError unless tokens and KV agree for every session."""
        self._cache.check_integrity()
        for held in self:
            assert len(held.log) + len(held.tree) == held.kv.num_tokens, (
                f"{held.session}: {held.log} and {len(held.tree)} guesses but {held.kv.num_tokens} rows of KV"
            )
            tokens = held.log.tokens[: len(held.hashes) * self._cache.block_tokens]
            assert held.hashes == block_hashes(tokens, self._cache.block_tokens), f"{held.session}: a hash is stale"
