"""A draft engine without a model. It grows trees by the real engine's rules and takes pass times from a law.

In rejection and block mode it samples. The acceptance test of verification runs here, before the sample is sent: the
sample equals the target's token if the test passes, and is another token otherwise. The output is thus always the
target's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from core.protocol import HeldTokens, Rebased
from core.records import DraftReply, DraftRequest, DraftUpdate, Timing, Verification
from core.speculation import MAX_REPORTED, Candidates, TreeBuilder, feed_likeliest
from simulation.engines.base import Job, SimEngine
from simulation.engines.features import FEATURE_WIDTH, problem_of_features
from simulation.engines.hardware import EngineLaw
from simulation.engines.texts import Text, TextPosition

GrowthJob: TypeAlias = Job[DraftRequest]
"""The growth of a session, until its next message."""


class SimDraft(SimEngine[DraftRequest, DraftReply]):
    """A draft that guesses by the text's law of agreement."""

    def __init__(self, engine_id: str, epoch: int, text: Text, law: EngineLaw, *, has_noise: bool = True) -> None:
        """`has_noise`: whether the draft ranks candidates with the noise that it shares with the target."""
        super().__init__(engine_id, epoch, text, law)
        self._has_noise = has_noise
        self._growing: list[GrowthJob] = []
        """Jobs in the current pass, or in the last one."""
        self._feeding: list[HeldTokens] = []
        """Sequences with nodes in that pass."""

    def _begin(self, request: DraftRequest, held: HeldTokens, now_s: float) -> GrowthJob | DraftUpdate | None:
        rebased = self._rebase(request, held)
        job: GrowthJob = Job(request, held, rebased.pending, now_s)
        if request.growth.ends:
            return _done(job, now_s) if not job.pending and held.builder.has_ended else job
        return None if self._report(job) else job

    def _rebase(self, request: DraftRequest, held: HeldTokens) -> Rebased:
        return held.rebase_to_grow(request, request.growth)

    def _has_work(self) -> bool:
        return any(job.pending or job.held.builder.best_path_prob > 0.0 for job in self._jobs)

    def _ready(self) -> list[GrowthJob]:
        """Jobs of the next pass. Continuous growth shares its rows: the likeliest nodes of all sessions first."""
        _feed([job for job in self._jobs if not job.pending and job.held.builder.best_path_prob > 0.0])
        self._feeding = [job.held for job in self._jobs if job.held.builder.feeding]
        self._growing = [job for job in self._jobs if job.pending or job.held.builder.feeding]
        return self._growing

    def _num_guesses(self, job: GrowthJob) -> int:
        return len(job.held.builder.feeding)

    def _end_pass(self, jobs: Sequence[GrowthJob], now_s: float) -> None:  # noqa: ARG002
        for job in jobs:
            if not job.held.builder.has_root:
                self._take_nodes(job.held)

    async def _step(self) -> tuple[float, float]:
        """Run one pass. Results of nodes that were pruned during it are dropped."""
        num_before = self.num_rows
        began_s, ended_s = await super()._step()
        for held in self._feeding:
            if held.builder.feeding:
                self._take_nodes(held)
        timing = Timing(0.0, ended_s - began_s, 1, self.num_rows - num_before, len(self._sessions))
        for job in [job for job in self._growing if job in self._jobs and not job.pending]:
            job.held.builder.count_pass()
            if not job.request.growth.ends:
                if self._report(job, timing):
                    self._jobs.remove(job)
            elif job.held.builder.has_ended:
                self._conclude(job, _done(job, ended_s))
        return began_s, ended_s

    def _take_nodes(self, held: HeldTokens) -> None:
        """Compute the candidates after each node being fed."""
        builder, positions = held.builder, {0: self._text.position(held.log, held.spec)}
        candidates = [
            self._candidates_after(held, node, self._position_of(builder, node, positions))
            for node in builder.being_fed
        ]
        held.hold(candidates)
        builder.take(candidates)

    def _candidates_after(self, held: HeldTokens, node: int, position: TextPosition) -> Candidates:
        if not held.spec.needs_q:
            return self._text.coupled(position, MAX_REPORTED + 1, has_noise=self._has_noise)
        is_right, depth = self._text.is_accepted(position), held.builder.depths[node]
        if held.spec.verification is Verification.BLOCK:
            start, length = position.index - depth, held.builder.tree_spec.num_passes
            if (num_accepted := self._text.law.num_accepted_of_block(position.seed, start, length)) is not None:
                is_right = depth < num_accepted
        return self._text.sampled(position, is_right=is_right)

    def _position_of(self, builder: TreeBuilder, node: int, known: dict[int, TextPosition]) -> TextPosition:
        if node not in known:
            known[node] = self._text.after(
                self._position_of(builder, builder.parents[node], known), builder.tokens[node]
            )
        return known[node]

    def _report(self, job: GrowthJob, timing: Timing | None = None) -> bool:
        """Report continuous growth. Return whether it is over."""
        num_held = job.request.num_committed - len(job.pending)
        is_over = not job.pending and job.held.builder.has_fed_all
        self._reply(DraftUpdate(job.request.stamp, job.held.builder.report(), num_held, timing, is_over))
        return is_over


class SimHead(SimDraft):
    """A draft that reads the target's features. It guesses like any other, and reports features that are wrong."""

    feature_width = FEATURE_WIDTH

    def __init__(self, engine_id: str, epoch: int, text: Text, law: EngineLaw, breaches: list[AssertionError]) -> None:
        """`breaches` gets what no orchestrator may send."""
        super().__init__(engine_id, epoch, text, law)
        self._breaches = breaches

    def _rebase(self, request: DraftRequest, held: HeldTokens) -> Rebased:
        rebased = super()._rebase(request, held)
        assert request.features is not None, "a message without features is refused"
        problem = problem_of_features(request.features, [*held.log.tokens, *rebased.pending])
        if rebased.guesses or held.tree.tokens:
            problem = "a head keeps rows of its guesses, which come from its own features"
        if problem is not None:
            self._breaches.append(AssertionError(f"{self!r}, {request.stamp}: {problem}"))
        return rebased


def _done(job: GrowthJob, now_s: float) -> DraftUpdate:
    """All grown nodes, after the end of the growth."""
    stamp, num_held = job.request.stamp, job.request.num_committed
    return DraftUpdate(stamp, job.held.builder.report(), num_held, job.timing(now_s), is_over=True)


def _feed(jobs: Sequence[GrowthJob]) -> None:
    """Choose the nodes of the next pass: all nodes of growth that ends by itself, and the likeliest of continuous
    growth."""
    for job in jobs:
        if job.request.growth.ends:
            job.held.builder.feed_pass(job.request.growth.rows_per_pass)
    endless = [job for job in jobs if not job.request.growth.ends]
    num_rows = max((job.request.growth.rows_per_pass for job in endless), default=0)
    feed_likeliest([job.held.builder for job in endless], num_rows)
