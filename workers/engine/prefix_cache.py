"""Prefix caching: a new sequence begins with KV that others have computed for the same tokens.

Decides which sequence adopts which blocks, and which one waits for another that is computing the same prefix. Must not
know where KV is stored (`workers.step.kv_cache`) or how it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from core.text import BlockHash, block_hashes
from workers.engine.jobs import Job
from workers.engine.sequences import SequenceStore

WORTH_WAITING: Final = 0.5
"""A sequence waits for another one that is computing at least this share of its missing tokens."""
MIN_AWAITED_TOKENS: Final = 64
"""Smallest number of tokens worth waiting for: computing fewer takes less time than another step."""


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
            if job.pending and job.wants_logits:  # without logits that are checked, blocks are not published
                coming.update(job.prompt_hashes)
            ready.append(job)
        return ready

    def _look_at(self, job: Job[Any]) -> None:
        """Hash the job's tokens, without the last one: its logits are needed."""
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
