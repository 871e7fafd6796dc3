"""State of each session on an engine: tokens, guesses after them, the KV of both, and sampling parameters.

Applies the decisions of `core.protocol` to KV. Must not know when rows are computed, or why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from core.protocol import EndedSessions, HeldTokens
from core.records import SequenceSpec, root_of
from core.text import BlockHash, block_hashes, hash_of
from workers.grammar import GrammarState, Mask
from workers.step import KVCache, SequenceKV
from workers.text_index import TextIndex


@dataclass(eq=False, slots=True)
class HeldSequence(HeldTokens):
    """One session's tokens, the tree of guesses below them, and the KV of both, in this order.

    Invariant between steps: `len(log) + len(tree) == kv.num_tokens`.
    """

    session: str = field(kw_only=True)
    kv: SequenceKV = field(kw_only=True)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the first blocks of the log, as far as computed."""
    arrival: int = 0
    """Rank among all sessions of the engine, in order of arrival."""
    was_preempted: bool = False
    """Whether it lost its KV and has not restarted since."""
    num_guesses: int = 0
    """Number of guesses in its last request that it did not hold yet; used by a target."""
    last_used_s: float = 0.0
    """Time of its last request or of the reply to it."""
    adapter: int = 0
    """Number of the adapter that its rows are computed with; 0 for none."""
    grammar: GrammarState | None = None
    """State of the output's grammar; None without one."""
    source: tuple[int, ...] = ()
    """The beginning of the log, if an encoder reads it."""
    index: TextIndex = field(default_factory=TextIndex)
    """Index of the log, for a cascade."""

    def block_hashes(self, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
        """Names of the whole blocks of a text, computed with this sequence's weights and source."""
        return block_hashes(tokens, block_tokens, root=self.root)

    @property
    def root(self) -> bytes:
        """Key of the hashes. KV of a part of a source depends on all of it."""
        weights = root_of(self.spec.adapter)
        return hash_of(self.source, weights) if self.source else weights

    @property
    def seen_tokens(self) -> Sequence[int]:
        """The log, as penalties see it: a source is no part of the decoder's text, so its tokens are replaced by the
        first one after it."""
        tokens, num_source = self.log.tokens, self.spec.num_source
        return tokens if not num_source else [tokens[num_source]] * num_source + list(tokens[num_source:])

    def masks(self, paths: Callable[[], Sequence[Sequence[int]]]) -> Sequence[Mask | None] | None:
        """Tokens that the grammar allows after each of these paths below the log; None without a grammar."""
        if self.grammar is None:
            return None
        return self.grammar.masks(self.log.tokens[self.spec.prompt_len :], paths())


class SequenceStore:
    """All sessions of one engine, oldest first."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._held: OrderedDict[str, HeldSequence] = OrderedDict()
        self._num_arrived = 0
        self._ended = EndedSessions()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldSequence]:
        return iter(self._held.values())

    def __reversed__(self) -> Iterator[HeldSequence]:
        return reversed(self._held.values())

    def find(self, session: str) -> HeldSequence | None:
        return self._held.get(session)

    def open(self, session: str, spec: SequenceSpec, source: tuple[int, ...] = ()) -> HeldSequence:
        """Return the session's sequence, new and empty if it has none. Guesses made under another spec are dropped.

        `source`: the beginning of its text that an encoder reads.
        """
        held = self._held.get(session)
        if held is None:
            self._num_arrived += 1
            held = HeldSequence(spec, session=session, kv=self._cache.new_sequence(), arrival=self._num_arrived)
            self._held[session] = held
        if held.spec.adapter != spec.adapter or held.source != source:
            self.truncate(held, 0)  # its KV was computed with other weights, or from another source
        held.source, held.kv.num_source = source, len(source)
        held.take_spec(spec)
        self._cache.truncate(held.kv, len(held.log) + len(held.tree))
        return held

    def has_ended(self, session: str) -> bool:
        """Whether this session has ended, so that any further message is late."""
        return session in self._ended

    def keep_rows(self, held: HeldSequence, num_tokens: int, guesses: Sequence[int] = ()) -> None:
        """Keep the KV of the first `num_tokens` rows and of these guesses after them."""
        del held.hashes[num_tokens // self._cache.block_tokens :]
        self._cache.compact(held.kv, num_tokens, guesses)

    def publish(self, held: HeldSequence) -> None:
        """Publish this sequence's full blocks in the prefix cache. The logits after its last token must be finite."""
        block_tokens = self._cache.block_tokens
        if len(held.log) // block_tokens > len(held.hashes):
            held.hashes = block_hashes(held.log.tokens, block_tokens, held.hashes, held.root)
            self._cache.publish(held.kv, held.hashes)

    def step_back(self, held: HeldSequence) -> list[int]:
        """Drop the last token and return it, so that it is computed again for its logits."""
        pending = held.step_back()
        self.keep_rows(held, len(held.log))
        return [*self.rewind(held), *pending]

    def rewind(self, held: HeldSequence) -> list[int]:
        """Drop the last tokens, if recurrent layers have no state after them, and return them to be computed again."""
        num_tokens = self._cache.states.resumable(held.kv)
        if num_tokens == held.kv.num_tokens:
            return []
        assert not held.tree.tokens, "guesses have states"
        pending = list(held.log.tokens[num_tokens:])
        self.truncate(held, num_tokens)
        return pending

    def truncate(self, held: HeldSequence, num_tokens: int) -> None:
        """Drop all but the first `num_tokens` tokens and their KV."""
        held.truncate(num_tokens)
        self.keep_rows(held, num_tokens)

    def forget_guesses(self, held: HeldSequence) -> None:
        """Keep the tokens and drop the guesses below them."""
        self.truncate(held, len(held.log))

    def drop_rows_ahead(self, held: HeldSequence) -> None:
        """Drop the KV of rows ahead that did not become guesses."""
        self._cache.truncate(held.kv, len(held.log) + len(held.tree))

    def drop(self, session: str) -> None:
        """Free a session's KV and tokens; the session may return with its whole prefix."""
        if (held := self._held.pop(session, None)) is not None:
            self._cache.free(held.kv)

    def release(self, session: str) -> None:
        """Free a session's KV for good; late messages cannot open the session again."""
        self.drop(session)
        self._ended.add(session)

    def check_integrity(self) -> None:
        """Raises: AssertionError unless tokens and KV agree for every session."""
        self._cache.check_integrity()
        for held in self:
            assert len(held.log) + len(held.tree) == held.kv.num_tokens, (
                f"{held.session}: {held.log} and {len(held.tree)} guesses but {held.kv.num_tokens} rows of KV"
            )
            tokens = held.log.tokens[: len(held.hashes) * self._cache.block_tokens]
            assert held.hashes == held.block_hashes(tokens, self._cache.block_tokens), (
                f"{held.session}: a hash is stale"
            )
