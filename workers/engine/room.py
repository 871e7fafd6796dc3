"""Room for the KV of a step: where it is short, the newest sessions are preempted.

An idle session is dropped, and gets `Missing` as the answer to its next message; a session in progress begins again.
Knows jobs and blocks; must not know models, nor what the jobs are for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from workers.engine.jobs import Job
from workers.engine.scheduler import Share
from workers.engine.sequences import HeldSequence, SequenceStore
from workers.step import KVCache, OutOfBlocks

logger = logging.getLogger(__name__)

AnyJob = TypeVar("AnyJob", bound=Job[Any])


class Room:
    """The room for KV of one engine."""

    def __init__(self, store: SequenceStore, cache: KVCache, lose_idle: Callable[[str], None]) -> None:
        """`lose_idle` is called with the name of each idle session that is dropped."""
        self._store = store
        self._cache = cache
        self._lose_idle = lose_idle
        self.num_preemptions = 0

    def make(self, shares: Sequence[tuple[AnyJob, Share]], jobs: Sequence[AnyJob]) -> list[tuple[AnyJob, Share]]:
        """The shares that have room for their KV, in order. `jobs`: all jobs of the engine, in this step or not."""
        if self._reserve_all(shares):
            return list(shares)
        waiting = {job.held.session: job for job in jobs}
        work: list[tuple[AnyJob, Share]] = []
        admitted: set[str] = set()
        for job, share in shares:
            is_as_planned = share.num_tokens <= len(job.pending) and share.is_last == (
                share.num_tokens == len(job.pending)
            )
            if not is_as_planned:  # it was just preempted for an earlier share
                continue
            admitted.add(job.held.session)
            if self._reserve(job, share, admitted, waiting):
                work.append((job, share))
        return work

    def _reserve_all(self, shares: Sequence[tuple[AnyJob, Share]]) -> bool:
        """Reserve blocks for all shares at once, if there are enough."""
        try:
            self._cache.reserve_all((job.held.kv, _num_kv_rows(job, share)) for job, share in shares)
        except OutOfBlocks:
            return False
        return True

    def _reserve(self, job: AnyJob, share: Share, admitted: set[str], waiting: Mapping[str, AnyJob]) -> bool:
        while True:
            try:
                self._cache.reserve(job.held.kv, _num_kv_rows(job, share))
            except OutOfBlocks:
                if not self._preempt_newest(admitted, waiting):
                    return False
            else:
                return True

    def _preempt_newest(self, protected: set[str], waiting: Mapping[str, AnyJob]) -> bool:
        """Drop KV of the newest session outside `protected`, idle ones first; returns whether there was one.

        Idle sessions first give up the KV of their guesses.
        """
        candidates = [held for held in self._store if held.session not in protected and held.kv.num_tokens]
        idle = [held for held in candidates if held.session not in waiting]
        guessed = [held for held in idle if len(held.tree)]
        if guessed:
            self._store.forget_guesses(guessed[-1])
        elif candidates:
            self.preempt(idle[-1] if idle else candidates[-1], waiting)
        return bool(candidates)

    def preempt(self, victim: HeldSequence, waiting: Mapping[str, AnyJob]) -> None:
        """Drop all KV of this session."""
        if victim.session in waiting:
            waiting[victim.session].begin_again()
            self._store.truncate(victim, 0)
        else:
            self._store.drop(victim.session)
            self._lose_idle(victim.session)
        self.num_preemptions += 1
        logger.info("KV is full: session %s was preempted", victim.session)


def _num_kv_rows(job: Job[Any], share: Share) -> int:
    """Number of rows of KV that its sequence has after this share."""
    return job.held.kv.num_tokens + share.num_tokens + (job.num_tree_rows if share.is_last else 0)
