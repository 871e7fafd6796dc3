"""Prefix caching: a new sequence reuses KV that other sequences have computed for the same tokens.

Decides which sequence adopts which blocks, and which sequence waits for another that is computing the same prefix.
Must not know where KV is stored (`workers.step.kv_cache`) or how it is used.
"""

from __future__ import annotations

from typing import Any, Final

from core.text import BlockHash
from workers.engine.jobs import Job
from workers.engine.sequences import HeldSequence, SequenceStore
from workers.step import KVCache

WORTH_WAITING: Final = 0.5
"""A sequence waits for another that is computing at least this share of its missing tokens."""
MIN_AWAITED_TOKENS: Final = 64
"""Minimum number of tokens worth waiting for: computing fewer takes less time than another step."""


class Prefixes:
    """Prefixes shared by the sequences of one engine."""

    def __init__(self, store: SequenceStore, cache: KVCache, *, is_shared: bool) -> None:
        """`is_shared`: whether sequences may reuse each other's KV."""
        self._store = store
        self._is_shared = cache.states.is_shared = is_shared
        self._cache = cache
        self.num_adopted_tokens = 0
        self._coming: set[BlockHash] = set()
        """Hashes of blocks that jobs of this step are computing."""

    def begin_step(self) -> None:
        self._coming.clear()

    def should_wait(self, job: Job[Any]) -> bool:
        """Whether a job without KV should wait for a job of this step, to adopt the blocks that it computes."""
        if not (self._is_shared and job.may_adopt):
            return False
        if not job.prompt_hashes:  # excludes the last token, whose logits are needed
            adoptable = job.pending[: -1 - job.num_recomputed]
            job.prompt_hashes = job.held.block_hashes(adoptable, self._cache.block_tokens)
        lacking = job.prompt_hashes[self._cache.num_published(job.prompt_hashes) :]
        num_coming = next((count for count, lacked in enumerate(lacking) if lacked not in self._coming), len(lacking))
        is_long = num_coming * self._cache.block_tokens >= MIN_AWAITED_TOKENS
        return is_long and num_coming >= WORTH_WAITING * len(lacking)

    def mark_running(self, job: Job[Any]) -> None:
        """Record that the job runs in this step and will publish its blocks."""
        if job.pending:
            self._coming.update(job.prompt_hashes)

    def adopt(self, job: Job[Any]) -> None:
        """Start the job's sequence with published blocks."""
        if not job.may_adopt:
            return
        num_tokens = self._cache.adopt(job.held.kv, job.prompt_hashes)
        job.advance(num_tokens)
        job.num_adopted = num_tokens  # assigned, not added: a restarted job keeps nothing of its earlier KV
        self.num_adopted_tokens += num_tokens

    def publish(self, held: HeldSequence) -> None:
        """Publish the computed prefix of this sequence, once the logits after it are known to be finite."""
        if self._is_shared:
            self._store.publish(held)
