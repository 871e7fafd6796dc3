"""A draft engine without a model: it grows trees by the real engine's rules, with a law's time for each pass.

In rejection and block mode it samples by itself, and its sample is the target's token as often as real verification
would accept it: the acceptance test runs here, so that the target's text stays the output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import WorkerLost
from core.protocol import HeldTokens
from core.records import DraftDone, DraftReply, DraftRequest, DraftUpdate, Timing, Verification
from core.speculation import MAX_TOLD, Candidates, TreeBuilder, TreeSpec, feed_likeliest
from simulation.engines.base import Job, SimEngine
from simulation.engines.hardware import EngineLaw
from simulation.engines.texts import Place, Text


@dataclass(eq=False)
class TreeJob(Job[DraftRequest, DraftReply]):
    """The growth of a session, until its next message."""

    had_part: bool = False
    """In the pass under way, or in the last."""

    @property
    def ends(self) -> bool:
        """Whether growth ends by itself."""
        return self.tree_spec.ends

    @property
    def may_feed(self) -> bool:
        return not self.pending and self.held.builder.best_path_prob > 0.0

    def grown(self, now_s: float) -> DraftDone:
        """All grown nodes, after the end of the growth."""
        return DraftDone(self.request.stamp, self.held.builder.report(), self.request.num_committed, self.timing(now_s))

    @property
    def tree_spec(self) -> TreeSpec:
        return self.request.growth


class SimDraft(SimEngine[DraftRequest, DraftReply]):
    """Guesses by the text's law of agreement."""

    def __init__(self, engine_id: str, epoch: int, text: Text, law: EngineLaw, *, has_noise: bool = True) -> None:
        """`has_noise`: it ranks its candidates with the noise that it shares with the target."""
        super().__init__(engine_id, epoch, text, law)
        self._has_noise = has_noise
        self._feeding: list[HeldTokens] = []
        """In the pass under way."""

    def _begin(
        self, request: DraftRequest, held: HeldTokens, now_s: float, answer: asyncio.Future[DraftReply | WorkerLost]
    ) -> TreeJob | DraftDone:
        job = TreeJob(request, held, held.rebase_to_grow(request, request.growth).pending, now_s, answer)
        if job.ends:
            return job.grown(now_s) if not job.pending and held.builder.has_ended else job
        self._tell(job)
        return job

    def _has_work(self) -> bool:
        return any(not isinstance(job, TreeJob) or job.pending or job.may_feed for job in self._jobs)

    def _plan(self) -> list[tuple[Job[DraftRequest, DraftReply], int, int]]:
        """Continuous growth shares the rows of a pass, the likeliest nodes of all sessions first."""
        growing = [job for job in self._jobs if isinstance(job, TreeJob)]
        _feed([job for job in growing if job.may_feed])
        self._feeding = [job.held for job in growing if job.held.builder.feeding]
        idle = [job for job in growing if not job.pending and not job.held.builder.feeding]
        for job in growing:
            job.had_part = job not in idle
        jobs, self._jobs = self._jobs, [job for job in self._jobs if job not in idle]
        try:
            return super()._plan()
        finally:
            self._jobs = jobs

    def _num_guesses(self, job: Job[DraftRequest, DraftReply]) -> int:
        return len(job.held.builder.feeding)

    def _end_pass(self, jobs: Sequence[Job[DraftRequest, DraftReply]], now_s: float) -> None:  # noqa: ARG002
        for job in jobs:
            self._advance(job)

    def _advance(self, job: Job[DraftRequest, DraftReply]) -> None:
        """The last committed token was computed."""
        if not job.held.builder.has_root:
            self._take_nodes(job.held)

    async def _step(self) -> tuple[float, float]:
        """The results of nodes that were pruned meanwhile are dropped."""
        num_before = self.num_rows
        began_s, ended_s = await super()._step()
        for held in self._feeding:
            if held.builder.feeding:
                self._take_nodes(held)
        timing = Timing(0.0, ended_s - began_s, 1, self.num_rows - num_before, len(self._sessions))
        for job in [job for job in self._jobs if isinstance(job, TreeJob) and not job.pending and job.had_part]:
            job.held.builder.made_pass()
            if not job.ends:
                self._tell(job, timing)
            elif job.held.builder.has_ended:
                self._conclude(job, job.grown(ended_s))
        return began_s, ended_s

    def _take_nodes(self, held: HeldTokens) -> None:
        """The draft's candidates after each of the nodes that are being fed."""
        builder, places = held.builder, {0: self._text.place(held.log, held.spec)}
        said = [self._says(held, node, self._place_of(builder, node, places)) for node in builder.being_fed]
        held.hold(said)
        builder.take(said)

    def _says(self, held: HeldTokens, node: int, place: Place) -> Candidates:
        if not held.spec.needs_q:
            return self._text.coupled(place, MAX_TOLD + 1, has_noise=self._has_noise)
        is_right, depth = self._text.is_accepted(place), held.builder.depths[node]
        if held.spec.verification is Verification.BLOCK:
            start, length = place.index - depth, held.builder.tree_spec.num_passes
            if (num_accepted := self._text.law.num_accepted_of_block(place.seed, start, length)) is not None:
                is_right = depth < num_accepted
        return self._text.sampled(place, is_right=is_right)

    def _place_of(self, builder: TreeBuilder, node: int, known: dict[int, Place]) -> Place:
        if node not in known:
            known[node] = self._text.after(self._place_of(builder, builder.parents[node], known), builder.tokens[node])
        return known[node]

    def _tell(self, job: TreeJob, timing: Timing | None = None) -> None:
        new_nodes = job.held.builder.report()
        if (listener := self._listeners.get(job.request.stamp)) is not None:
            num_held = job.request.num_committed - len(job.pending)
            is_over = not job.pending and job.held.builder.has_fed_all
            listener(DraftUpdate(job.request.stamp, new_nodes, num_held, timing, is_over))


def _feed(jobs: Sequence[TreeJob]) -> None:
    """The nodes of the next pass: all of growth that ends by itself, and the likeliest of the others."""
    for job in jobs:
        if job.ends:
            job.held.builder.feed_pass(job.tree_spec.rows_per_pass)
    others = [job for job in jobs if not job.ends]
    num_rows = max((job.tree_spec.rows_per_pass for job in others), default=0)
    feed_likeliest([job.held.builder for job in others], num_rows)
