"""Common prefixes are computed once: a new sequence begins with the KV of others.

Decides which sequence adopts which blocks, and which one waits for another that computes the same prefix. Must not know
where KV lies (`workers.step.kv_cache`) or how it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from core.text import BlockHash, block_hashes
from workers.engine.jobs import Job
from workers.engine.sequences import SequenceStore

WORTH_WAITING: Final = 0.5
"""Share of its missing tokens that another sequence must be computing for a sequence to wait for it."""
MIN_AWAITED_TOKENS: Final = 64
"""Fewest tokens that are worth waiting for: fewer are computed sooner than a further step."""


class Prefixes:
    """Common prefixes of the sequences of one engine."""

    def __init__(self, store: SequenceStore, block_tokens: int) -> None:
        self._store = store
        self._block_tokens = block_tokens
        self.num_adopted_tokens = 0

    def ready(self, jobs: Sequence[Job[Any]]) -> list[Job[Any]]:
        """The jobs that should run now; empty sequences first adopt what they can."""
        coming: set[BlockHash] = set()
        ready = []
        for job in jobs:
            if not job.held.kv.num_tokens and job.may_adopt:
                self._look_at(job)
                if self._should_wait(job, coming):
                    continue
                self._adopt(job)
            if job.pending and job.wants_logits:  # later ones are not published: their logits have not been checked
                coming.update(job.prompt_hashes)
            ready.append(job)
        return ready

    def _look_at(self, job: Job[Any]) -> None:
        """The last token stays with the job, since its logits are wanted."""
        if not job.prompt_hashes:
            job.prompt_hashes = block_hashes(job.pending[:-1], self._block_tokens)

    def _should_wait(self, job: Job[Any], coming: set[BlockHash]) -> bool:
        lacking = job.prompt_hashes[self._store.num_adoptable(job.prompt_hashes) :]
        num_coming = next((count for count, lacked in enumerate(lacking) if lacked not in coming), len(lacking))
        is_long = num_coming * self._block_tokens >= MIN_AWAITED_TOKENS
        return is_long and num_coming >= WORTH_WAITING * len(lacking)

    def _adopt(self, job: Job[Any]) -> None:
        num_tokens = self._store.adopt(job.held, job.prompt_hashes)
        job.has_kv_of(num_tokens)
        job.num_adopted = num_tokens  # one that begins again adopts again, and has nothing of what it had before
        self.num_adopted_tokens += num_tokens
