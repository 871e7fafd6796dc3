"""KV memory of a step: which sessions may start, and which are preempted when memory is short.

Knows jobs and blocks; must not know models or the purpose of jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from math import inf
from time import monotonic
from typing import Any, Final

from workers.engine.jobs import Job, Share
from workers.engine.sequences import HeldSequence, SequenceStore
from workers.step import KVCache, OutOfBlocks

logger = logging.getLogger(__name__)

SILENT_S: Final = 5.0
"""Seconds without a message after which an idle session may be preempted, even by a newer one. The pause between two
rounds is a small fraction of this."""


class KVRoom:
    """KV memory of a draft, which never makes a session wait.

    An idle session is dropped if any running session needs memory; its next message is answered by `Missing`. A running
    session that is preempted starts over. The newest sessions are preempted first.
    """

    def __init__(self, store: SequenceStore, cache: KVCache, lose: Callable[[str], None]) -> None:
        """`lose` receives the name of each session that lost its KV and whose messages need an answer."""
        self._store = store
        self._cache = cache
        self._lose = lose
        self.num_preemptions = 0

    def begin_step(self, jobs: Sequence[Job[Any]]) -> None:
        """Called with all jobs of the engine, before the calls of `may_begin` for the step."""

    def start_order(self, job: Job[Any]) -> float:  # noqa: ARG002
        """Sort key for starting jobs; equal keys keep the order of arrival of the messages."""
        return 0

    def may_begin(self, job: Job[Any]) -> bool:  # noqa: ARG002
        """Whether a job without KV may start in this step."""
        return True

    def begin(self, job: Job[Any]) -> None:
        """Called when the job starts in this step, after it has adopted cached blocks."""

    def reserve(self, shares: Sequence[Share], jobs: Sequence[Job[Any]]) -> list[Share]:
        """Reserve KV for the shares; return those that fit, in order. `jobs`: all jobs of the engine."""
        return list(shares) if self._reserve_all(shares) else self._reserve_in_turn(shares, jobs)

    def _reserve_in_turn(self, shares: Sequence[Share], jobs: Sequence[Job[Any]]) -> list[Share]:
        waiting = {job.held.session: job for job in jobs}
        work: list[Share] = []
        admitted: set[str] = set()
        for share in shares:
            if not share.is_as_planned:  # the job was just preempted for an earlier share
                continue
            admitted.add(share.job.held.session)
            has_room = self._reserve_all([share])
            while not has_room and self._preempt_newest(admitted, waiting):
                has_room = self._reserve_all([share])
            if has_room:
                work.append(share)
        return work

    def _reserve_all(self, shares: Sequence[Share]) -> bool:
        """Reserve blocks for all of these shares, or for none if there are too few."""
        try:
            self._cache.states.reserve_all((share.job.held.kv, share.num_states) for share in shares)
            self._cache.reserve_all((share.job.held.kv, share.num_kv_rows) for share in shares)
        except OutOfBlocks:
            return False
        return True

    def _preempt_newest(self, protected: set[str], waiting: Mapping[str, Job[Any]]) -> bool:
        """Drop KV of the newest session outside `protected`, idle ones first; return whether there was one.

        Guesses of idle sessions are dropped first.
        """
        candidates = [held for held in self._store if held.session not in protected and held.kv.num_tokens]
        idle = [held for held in candidates if held.session not in waiting]
        guessed = [held for held in idle if len(held.tree)]
        if guessed:
            self._store.forget_guesses(guessed[-1])
        elif candidates:
            self.preempt(idle[-1] if idle else candidates[-1], waiting)
        return bool(candidates)

    def preempt(self, victim: HeldSequence, waiting: Mapping[str, Job[Any]]) -> None:
        if victim.session in waiting:
            waiting[victim.session].restart()
            self._store.truncate(victim, 0)
        else:
            self._store.drop(victim.session)
            self._lose(victim.session)
        self._count(victim)

    def _count(self, victim: HeldSequence) -> None:
        self.num_preemptions += 1
        logger.info("KV is full: session %s was preempted", victim.session)


class FirstComeKVRoom(KVRoom):
    """KV memory of a target: first come, first served (docs/adr/kv).

    A session starts when its whole text fits; later sessions wait behind the first that does not fit. If memory runs
    short afterwards, the newest session is preempted and keeps its place in the queue. So the oldest session always
    proceeds, and no session is evicted for a newer one, unless it has been silent for `SILENT_S`.
    """

    _busy: Set[str] = frozenset()
    """Sessions with a job, in this step or not."""
    _first_waiting: float = inf
    """Arrival of the first waiting session; later sessions may not start before it."""

    def begin_step(self, jobs: Sequence[Job[Any]]) -> None:
        """Record the sessions that have a job, and the recently preempted ones that are expected to return."""
        self._busy = {job.held.session for job in jobs}
        back = [held for held in self._store if held.was_preempted and held.session not in self._busy]
        self._first_waiting = min((held.arrival for held in back if not _is_silent(held)), default=inf)

    def start_order(self, job: Job[Any]) -> float:
        """Running jobs first, then waiting jobs by arrival."""
        return job.held.arrival if not job.held.kv.blocks else -1

    def may_begin(self, job: Job[Any]) -> bool:
        """Whether the job's whole text and block fit, and no earlier session is waiting."""
        if job.held.arrival > self._first_waiting:
            return False
        while not self._has_room(job):
            if (silent := self._most_silent()) is None:
                self._first_waiting = job.held.arrival
                return False
            self.preempt(silent, {})
        return True

    def _has_room(self, job: Job[Any]) -> bool:
        # one more, because the state that it adopts may count as free
        if 2 + job.num_tree_rows + self._num_spare_states > self._cache.states.num_free:
            return False
        hashes = job.prompt_hashes if job.may_adopt else ()
        return self._cache.has_room(hashes, len(job.pending) + job.num_tree_rows, self._num_spare)

    @property
    def _num_spare(self) -> int:
        """Blocks that running sessions need for another round like their last.

        Without this reserve, a new session would soon be preempted. Guesses occupy blocks only during a round, so the
        number of free blocks does not account for them.
        """
        rows = ((held.kv, held.kv.num_tokens + 1 + held.num_guesses) for held in self._store if held.kv.blocks)
        return sum(max(0, self._cache.num_blocks_for(num_rows) - len(kv.blocks)) for kv, num_rows in rows)

    @property
    def _num_spare_states(self) -> int:
        """Like `_num_spare`, for states of recurrent layers."""
        running = (held for held in self._store if held.kv.blocks)
        return sum(max(0, 1 + held.num_guesses - len(held.kv.spare_states)) for held in running)

    def begin(self, job: Job[Any]) -> None:
        """Reserve blocks for the job's whole text and its block of guesses."""
        job.held.was_preempted = False
        self._cache.states.reserve_all([(job.held.kv, 1 + job.num_tree_rows)])
        self._cache.reserve(job.held.kv, job.held.kv.num_tokens + len(job.pending) + job.num_tree_rows)

    def _reserve_in_turn(self, shares: Sequence[Share], jobs: Sequence[Job[Any]]) -> list[Share]:
        """Oldest session first. A session without blocks afterwards was preempted, by an older one or by itself."""
        waiting = {job.held.session: job for job in jobs}
        self._busy = waiting.keys()
        for share in sorted(shares, key=lambda share: share.job.held.arrival):
            while share.job.held.kv.blocks and not self._reserve_all([share]):
                self.preempt(self._most_silent() or self._newest(), waiting)
        return [share for share in shares if share.job.held.kv.blocks]

    def preempt(self, victim: HeldSequence, waiting: Mapping[str, Job[Any]]) -> None:
        """Drop all KV of this session; it keeps its place in the queue.

        A job that contains its whole text restarts. Any other job may share its call with older sessions, whose replies
        must not wait for it, so it is answered by `Missing`.
        """
        job = waiting.get(victim.session)
        if job is not None and job.request.base.num_tokens == 0:
            job.restart()
        else:
            self._lose(victim.session)
        victim.was_preempted = True
        self._store.truncate(victim, 0)
        self._count(victim)

    def _newest(self) -> HeldSequence:
        return next(held for held in reversed(self._store) if held.kv.blocks)

    def _most_silent(self) -> HeldSequence | None:
        silent = [
            held for held in self._store if held.kv.blocks and held.session not in self._busy and _is_silent(held)
        ]
        return min(silent, key=lambda held: held.last_used_s, default=None)


def _is_silent(held: HeldSequence) -> bool:
    return held.last_used_s < monotonic() - SILENT_S
