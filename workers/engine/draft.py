"""The draft engine: catches up with the committed tokens, then grows draft trees below them.

Fed nodes are kept until they are known to be wrong, so that nodes below a verdict are not computed twice. Guesses
affect only the speed of the output, never its tokens. The draft uses the target's sampling parameters and, in coupled
mode, the target's noise, because these give the best guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice
from time import monotonic
from typing import cast

from core.config import EngineConfig
from core.protocol import ENDED, OVERTAKEN
from core.records import DraftReply, DraftRequest, DraftUpdate, EngineStats, Missing, Refused
from core.speculation import EMPTY_BLOCK, Candidates, TokenTree, TreeSpec, add_candidates, feed_likeliest
from core.text import TokenLog
from workers.engine.base import AnyRuntime, Engine
from workers.engine.draft_growth import TreeJob
from workers.engine.jobs import Job
from workers.engine.sequences import HeldSequence
from workers.parallel import Rank, load_runtime, log_rank_lost
from workers.runtime import Scores, load_head_runtime
from workers.sampling import DraftRow, propose
from workers.step import Readback


class DraftEngine(Engine[DraftRequest, DraftReply]):
    """Guesses tokens for many sessions at once: each step feeds the frontiers of all growing trees."""

    def __init__(self, runtime: AnyRuntime, config: EngineConfig, epoch: int, q_top_tokens: int) -> None:
        super().__init__(runtime, config, epoch)
        self._q_top_tokens = q_top_tokens
        self._growing_jobs: dict[str, TreeJob] = {}
        """Jobs by session that grow until the session's next message, or until no node is worth a row."""
        self._since_s: float | None = None
        """End time of the previous step, if the next one follows immediately."""

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        epoch: int,
        q_top_tokens: int,
        progress: Callable[[str], None],
        rank: Rank | None = None,
        on_loss: Callable[[str], None] = log_rank_lost,
    ) -> DraftEngine:
        """Like `TargetEngine.load`; `q_top_tokens` is the setting of that name. Raises: StartupError."""
        if config.head is not None:
            # a head's KV depends on features that its messages bring, not on tokens alone
            own = replace(config, share_prefixes=False)
            return cls(load_head_runtime(config, progress), own, epoch, q_top_tokens)
        return cls(load_runtime(config, progress, rank, on_loss), config, epoch, q_top_tokens)

    @property
    def has_work(self) -> bool:
        is_pending = any(job.pending for job in self._growing_jobs.values())
        return super().has_work or is_pending or self._num_growth_rows(self._growing()) > 0

    def stats(self) -> EngineStats:
        """Like `Engine.stats`; continuous growth counts as a job."""
        return replace(super().stats(), num_jobs=len(self._jobs) + len(self._growing_jobs))

    def step(self) -> list[DraftReply]:
        """Like `Engine.step`; continuous growth fills the rest of the pass, the most probable nodes of all sessions
        first."""
        self._plan_turns()
        self._plan_growth()
        self._plan_ahead()
        replies = super().step()
        for job in self._trees:
            job.builder.put_back()
        self._jobs = [job for job in self._trees if job.ends]
        self._since_s = monotonic() if self.has_work else None
        return replies

    def num_shared(self, session: str, log: TokenLog) -> int:
        """Number of tokens that are computed for this session and begin `log`, at most; 0 if others are."""
        held = self._store.find(session)
        base = log.base(0 if held is None else min(len(held.log), len(log)))
        return base.num_tokens if held is not None and held.log.holds(base) else 0

    def release(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._end_tree(session, ENDED)
        super().release(sessions)

    def expire(self) -> list[str]:
        silent = super().expire()
        for session in silent:
            self._end_tree(session, "the session sent no message for too long")
        return silent

    def _supersede(self, held: HeldSequence) -> None:
        super()._supersede(held)
        self._end_tree(held.session, OVERTAKEN)

    def _end_tree(self, session: str, reason: str) -> None:
        if (job := self._growing_jobs.pop(session, None)) is not None:
            self._replies.append(Refused(job.request.stamp, reason))

    def _lose(self, session: str) -> None:
        if (job := self._growing_jobs.pop(session, None)) is not None:
            self._replies.append(Missing(job.request.stamp, 0))

    @property
    def _trees(self) -> list[TreeJob]:
        """All jobs of the engine, by their only type."""
        return cast("list[TreeJob]", self._jobs)

    def _growing(self) -> list[TreeJob]:
        return [job for job in self._growing_jobs.values() if job.may_feed and self._states_left(job) > 0]

    def _states_left(self, job: TreeJob) -> int:
        """Number of nodes that the job may still hold: sessions share the states of recurrent layers equally, because
        guesses of one session must not keep another from guessing at all."""
        return self._runtime.cache.states.max_guesses(len(self._store)) - len(job.held.tree)

    def _num_growth_rows(self, growing: Sequence[TreeJob]) -> int:
        """Number of nodes that fit into the next pass beside the tokens that a round waits for.

        Assumes the worst case: each session starts a new KV block.
        """
        cache = self._runtime.cache
        waiting = [*self._jobs, *(job for job in self._growing_jobs.values() if job.pending)]
        num_free = cache.num_free_blocks - sum(cache.num_blocks_for(len(job.pending)) + 1 for job in waiting)
        num_fitting = max(num_free, (num_free - len(growing)) * cache.block_tokens)
        num_fitting = min(num_fitting, cache.states.num_free - len(waiting))
        num_wanted = max((job.tree_spec.rows_per_pass for job in growing), default=0)
        return max(0, min(num_wanted, num_fitting, self._limit.rows))

    def _plan_growth(self) -> None:
        """Choose the growing jobs of the next pass, and their nodes."""
        for job in self._growing_jobs.values():
            if job.has_lost_root:  # its guesses were dropped to free memory
                job.builder.begin()
                job.pending = self._store.step_back(job.held)
        growing = self._growing()
        min_path_prob = min((job.tree_spec.min_path_prob for job in growing), default=0.0)
        rooms = [self._states_left(job) for job in growing]
        feed_likeliest([job.builder for job in growing], self._num_growth_rows(growing), rooms, min_path_prob)
        for job in growing:
            job.builder.put_back(job.tree_spec.min_path_prob)
        self._jobs += [job for job in self._growing_jobs.values() if job.pending or job.builder.feeding]

    def _plan_turns(self) -> None:
        """Choose the next nodes of bounded growth; growth that has no room ends."""
        for job in [job for job in self._trees if not job.pending]:
            num_rows = self.info.kv_cache_tokens - job.request.num_committed - len(job.held.tree)
            num_rows = min(num_rows, self._states_left(job))
            job.choose(min(num_rows, self._limit.rows))
            if not job.builder.feeding:
                self._answer(job, job.last_update())

    def _plan_ahead(self) -> None:
        """Add rows for tokens guessed ahead of the draft by lookup, in space that no other job needs."""
        if not self._config.cascade_tokens:
            return
        cache, jobs = self._runtime.cache, self._trees
        num_rows = self._limit.rows - sum(len(job.pending) + job.num_fed for job in jobs)
        num_blocks = cache.num_free_blocks - sum(
            cache.num_blocks_for(len(job.pending) + job.num_fed) + 1 for job in jobs
        )
        num_states = cache.states.num_free - sum(1 + job.num_fed for job in jobs)
        room = min(num_rows, num_blocks * cache.block_tokens, num_states)
        for job in jobs:
            job.look_ahead(min(room, self._states_left(job) - job.num_fed, self._config.cascade_tokens))
            room -= len(job.ahead)

    def _begin(self, request: DraftRequest, held: HeldSequence, arrived_s: float) -> None:
        rebased = held.rebase_to_grow(request, self._within_context(request, held))
        self._store.keep_rows(held, rebased.num_tokens, rebased.guesses)
        self._runtime.cache.states.drop_early(held.kv, len(held.log))
        job = TreeJob(request, held, [*self._store.rewind(held), *rebased.pending], arrived_s)
        if job.ends:
            self._jobs.append(job)
            self._answer_if_done(job)
            return
        self._growing_jobs[held.session] = job
        self._tell(job, job.pass_update())

    def _tell(self, job: TreeJob, update: DraftUpdate) -> None:
        """Report continuous growth. The job ends when it is over, or has no room left: nobody then waits for more."""
        if not job.pending and self._states_left(job) <= 0:
            update = replace(update, is_over=True)
        self._replies.append(update)
        if update.is_over:
            del self._growing_jobs[job.held.session]

    def _within_context(self, request: DraftRequest, held: HeldSequence) -> TreeSpec:
        """The request's tree spec, with its depth limited by the model's context, or by what a head can guess. The
        deepest nodes are reported but not fed."""
        num_left = self._text_limit(request, held) - request.num_committed
        return replace(request.growth, max_depth=min(request.growth.max_depth, num_left + 1, self._runtime.max_depth))

    def _needed_guesses(self, request: DraftRequest) -> TokenTree:  # noqa: ARG002
        return EMPTY_BLOCK  # a tree grows only as far as memory allows

    def _finish(self, jobs: Sequence[TreeJob], scores: Scores) -> bool:
        if jobs:
            self._grow(jobs, scores)
        for job in jobs:
            if job.ends:
                self._answer_if_done(job)
            elif job.held.session in self._growing_jobs:
                self._tell(job, job.pass_update(self._since_s))
        return bool(jobs)

    def _propose(self, scores: Scores, rows: Sequence[Sequence[DraftRow]]) -> list[list[Candidates | None]]:
        """Candidates for the rows of each job; None for a row whose scores are NaN or infinite."""
        readback = Readback()
        draft_rows = list(chain.from_iterable(rows))
        found = propose(scores.logits, draft_rows, self._q_top_tokens, readback, scores.tokens)
        readback.wait()
        candidates = iter(found())
        return [list(islice(candidates, len(of_job))) for of_job in rows]

    def _end_unsound(self, job: TreeJob) -> None:
        """End growth whose logits are NaN or infinite.

        Earlier draws are still reported. Later logits depend on them, so omitting them would select draws by their
        values (docs/exactness.md, section 4).
        """
        reason = "NaN or infinite scores of the draft for this sequence"
        is_kept = job.held.spec.needs_q and job.builder.has_root
        self._answer(job, job.last_update() if is_kept else Refused(job.request.stamp, reason))
        self._store.forget_guesses(job.held)
        self._growing_jobs.pop(job.held.session, None)

    def _refuse(self, job: Job[DraftRequest], reason: str) -> None:
        super()._refuse(job, reason)
        self._growing_jobs.pop(job.held.session, None)

    def _answer_if_done(self, job: TreeJob) -> None:
        if job.is_done and job in self._jobs:
            self._answer(job, job.last_update())

    def _grow(self, jobs: Sequence[TreeJob], scores: Scores) -> None:
        """Give each job the candidates of its rows; refuse jobs whose logits are NaN or infinite."""
        proposals = self._propose(scores, [job.draft_rows() for job in jobs])
        sound = [job for job, each in zip(jobs, proposals, strict=True) if job.take_proposals(each)]
        for job, each in zip(jobs, proposals, strict=True):
            if None in each:  # rows ahead included
                self._runtime.cache.mark_nan(job.held.kv)
        for job in jobs:
            if job not in sound:
                self._end_unsound(job)
                continue
            self._prefixes.publish(job.held)
        taking = [(job, job.hold_fed()) for job in sound]
        while taking:
            add_candidates([job.builder for job, _ in taking], [each for _, each in taking])
            taking = [(job, held) for job, _ in taking if (held := job.hold_next())]
        for job in sound:
            if job.ahead:
                self._store.drop_rows_ahead(job.held)
