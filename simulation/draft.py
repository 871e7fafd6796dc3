"""A draft engine without a model: it grows trees by the real engine's plan, and takes its time for each pass.

In rejection and block mode it samples by itself, and its sample is the target's token as often as real verification
would accept it: the coin that a real target tosses is tossed here, so that the target's text stays the output.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.errors import WorkerLost
from core.growth import Candidates, Sprout
from core.protocol import HeldTokens
from core.records import Drafted, DraftReply, DraftRequest, GrownTree, SequenceSpec, Sprouted, Timing, Verification
from core.speculation.chances import MAX_TOLD
from core.speculation.grower import Grower, feed_likeliest
from core.trees import ROOT, Growth, Steady
from simulation.engines import Job, SimEngine
from simulation.hardware import EngineLaw
from simulation.text import Place, Text


class Says:
    """What the draft model says after each node of one request's tree."""

    def __init__(self, text: Text, root: Place, request: DraftRequest, spec: SequenceSpec, has_noise: bool) -> None:
        self.samples = spec.needs_q
        self._text = text
        self._request = request
        self._verification = spec.verification
        self._has_noise = has_noise
        self._places = {ROOT: root}
        for node, (token, parent) in enumerate(zip(request.block.tokens, request.block.parents, strict=True)):
            self._places[node] = text.after(self._places[parent], token)
        self._num_ranks = Counter(request.block.parents)  # a rank counts only tokens that are no children already
        assert isinstance(request.growth, Growth), "what grows steadily needs no plan"
        self._count_ranks(request.growth)
        self._block_lens: Mapping[int, tuple[int, int]] = _block_lens(request, request.growth)

    def after(self, node: int) -> Candidates:
        """The candidates there, as many as the growth can ask for."""
        place, num_ranks = self._places[node], self._num_ranks[node]
        if not self.samples:
            return self._text.coupled(place, num_ranks, has_noise=self._has_noise)
        is_judged = node in self._request.block.parents
        return self._text.sampled(place, num_ranks, is_right=self._is_right(node), is_judged=is_judged)

    def _count_ranks(self, growth: Growth) -> None:
        for parent, rank in zip(growth.parents, growth.ranks, strict=True):
            self._num_ranks[parent] = max(self._num_ranks[parent], self._request.block.parents.count(parent) + rank + 1)

    def grow(self, node: int, parent: int, token: int) -> None:
        """A node of the growth has got its token."""
        self._places[node] = self._text.after(self._places[parent], token)

    def _is_right(self, node: int) -> bool:
        """Whether verification would accept the sample drawn after `node`."""
        place, (depth, length) = self._places[node], self._block_lens.get(node, (0, 0))
        if self._verification is Verification.BLOCK and length:
            num_accepted = self._text.law.num_accepted_of_block(place.seed, place.index - depth, length)
            if num_accepted is not None:
                return depth < num_accepted
        return self._text.is_accepted(place)


def _block_lens(request: DraftRequest, growth: Growth) -> Mapping[int, tuple[int, int]]:
    """For each node that a sample is drawn after: guesses before that sample in its block, and the block's length."""
    num_block, parents = len(request.block), growth.parents
    tops: dict[int, int] = {} if request.is_table else {ROOT: ROOT}
    depths: dict[int, int] = {} if request.is_table else {ROOT: 0}
    for node, parent in enumerate(parents, start=num_block):
        if request.is_table and parent < num_block:
            tops[node], depths[node] = node, 0
        else:
            tops[node], depths[node] = tops[parent], depths[parent] + 1
    longest: dict[int, int] = {}
    for node, top in tops.items():
        longest[top] = max(longest.get(top, 0), depths[node])
    return {node: (depths[node], longest[top]) for node, top in tops.items()}


@dataclass(eq=False)
class DraftJob(Job[DraftRequest, DraftReply]):
    """A tree in the making."""

    sprout: Sprout = field(kw_only=True)
    says: Says = field(kw_only=True)
    numbers: dict[int, int] = field(kw_only=True)
    """Of the sprout's nodes that are held: their number in the held tree."""
    frontier: list[int] = field(default_factory=list)

    def look_ahead(self) -> None:
        """Decide what the next pass takes."""
        self.frontier = [] if self.sprout.is_done else self.sprout.frontier()
        for node in self.frontier:
            if node >= len(self.request.block):
                self.says.grow(node, self.sprout.parent(node), self.sprout.tokens[node])

    def hold(self, node: int, candidates: Candidates) -> None:
        """A node has been computed."""
        tree = self.held.tree
        if node == ROOT:
            tree.root = candidates
            return
        parent = self.sprout.parent(node)
        number = ROOT if parent == ROOT else self.numbers[parent]
        self.numbers[node] = tree.add(number, self.sprout.tokens[node], candidates)

    def drafted(self, now_s: float) -> Drafted:
        grown, num_held = self.sprout.grown(), self.request.num_committed
        return Drafted(
            self.request.stamp,
            grown.tokens,
            num_held,
            grown.q,
            grown.confidence,
            grown.entropy,
            self.timing(now_s),
        )


@dataclass(eq=False)
class SteadyJob(Job[DraftRequest, DraftReply]):
    """A session that is grown for, until its next message."""

    had_part: bool = False
    """In the pass under way, or in the last."""

    @property
    def ends(self) -> bool:
        """Whether growth ends by itself."""
        return self.steady.num_passes > 0

    @property
    def may_feed(self) -> bool:
        return not self.pending and self.held.grower.best_reach > 0.0

    def grown(self, now_s: float) -> GrownTree:
        """All that has grown, where growth has ended."""
        return GrownTree(self.request.stamp, self.held.grower.tell(), self.request.num_committed, self.timing(now_s))

    @property
    def steady(self) -> Steady:
        assert isinstance(self.request.growth, Steady), "others are DraftJobs"
        return self.request.growth


class SimDraft(SimEngine[DraftRequest, DraftReply]):
    """Guesses by the text's law of agreement."""

    def __init__(self, engine_id: str, epoch: int, text: Text, law: EngineLaw, *, has_noise: bool = True) -> None:
        """`has_noise`: it ranks its candidates with the noise that it shares with the target."""
        super().__init__(engine_id, epoch, text, law)
        self._has_noise = has_noise
        self._feeding: list[HeldTokens] = []
        """In the pass under way."""
        self._since_s: float | None = None
        """When the last pass ended, if another followed at once: as real engines count, from pass to pass."""

    def _begin(
        self, request: DraftRequest, held: HeldTokens, now_s: float, answer: asyncio.Future[DraftReply | WorkerLost]
    ) -> DraftJob | SteadyJob | DraftReply:
        if isinstance(request.growth, Steady):
            return self._begin_steady(request, request.growth, held, now_s, answer)
        rebased = held.rebase_to_draft(request)
        pending, numbers = rebased.pending, dict(rebased.nodes)
        place = self._text.place(held.log, held.spec, pending)
        says = Says(self._text, place, request, held.spec, self._has_noise)
        known = [*numbers, *([ROOT] if not pending and held.tree.root is not None else [])]
        sprout = Sprout(request, says.samples, {node: says.after(node) for node in known})
        job = DraftJob(request, held, pending, now_s, answer, sprout=sprout, says=says, numbers=numbers)
        job.look_ahead()
        return job if pending or job.frontier else job.drafted(now_s)

    def _begin_steady(
        self,
        request: DraftRequest,
        steady: Steady,
        held: HeldTokens,
        now_s: float,
        answer: asyncio.Future[DraftReply | WorkerLost],
    ) -> SteadyJob | GrownTree:
        job = SteadyJob(request, held, held.rebase_to_grow(request, steady).pending, now_s, answer)
        if job.ends:
            return job.grown(now_s) if not job.pending and held.grower.has_ended else job
        self._tell(job)
        return job

    def _has_work(self) -> bool:
        return any(not isinstance(job, SteadyJob) or job.pending or job.may_feed for job in self._jobs)

    def _plan(self) -> list[tuple[Job[DraftRequest, DraftReply], int, int]]:
        """Steady growth shares what a pass has room for, best first over all sessions."""
        growing = [job for job in self._jobs if isinstance(job, SteadyJob)]
        _feed([job for job in growing if job.may_feed])
        self._feeding = [job.held for job in growing if job.held.grower.feeding]
        idle = [job for job in growing if not job.pending and not job.held.grower.feeding]
        for job in growing:
            job.had_part = job not in idle
        jobs, self._jobs = self._jobs, [job for job in self._jobs if job not in idle]
        try:
            return super()._plan()
        finally:
            self._jobs = jobs

    def _num_guesses(self, job: Job[DraftRequest, DraftReply]) -> int:
        if isinstance(job, SteadyJob):
            return len(job.held.grower.feeding)
        assert isinstance(job, DraftJob)
        return sum(node != ROOT for node in job.frontier)

    def _end_pass(self, jobs: Sequence[Job[DraftRequest, DraftReply]], now_s: float) -> None:
        for job in jobs:
            self._advance(job, now_s)

    def _advance(self, job: Job[DraftRequest, DraftReply], now_s: float) -> None:
        if isinstance(job, SteadyJob):
            self._advance_steady(job)
            return
        assert isinstance(job, DraftJob)
        found = {node: job.says.after(node) for node in job.frontier}
        for node, candidates in found.items():
            job.hold(node, candidates)
        if found:
            job.sprout.take(found)
        job.look_ahead()
        if not job.frontier:
            self._conclude(job, job.drafted(now_s))

    async def _step(self) -> None:
        """What a pass says of nodes that were pruned meanwhile is lost, and nothing else."""
        loop, num_before = asyncio.get_running_loop(), self.num_rows
        began_s = loop.time() if self._since_s is None else self._since_s
        await super()._step()
        for held in self._feeding:
            if held.grower.feeding:
                self._take_nodes(held)
        timing = Timing(0.0, (now_s := loop.time()) - began_s, 1, self.num_rows - num_before)
        for job in [job for job in self._jobs if isinstance(job, SteadyJob) and not job.pending and job.had_part]:
            job.held.grower.made_pass()
            if not job.ends:
                self._tell(job, timing)
            elif job.held.grower.has_ended:
                self._conclude(job, job.grown(now_s))
        self._since_s = now_s if self._has_work() else None

    def _advance_steady(self, job: SteadyJob) -> None:
        """The last committed token was computed."""
        if not job.held.grower.has_root:
            self._take_nodes(job.held)

    def _take_nodes(self, held: HeldTokens) -> None:
        """What the draft says after each of the nodes that are being fed."""
        grower, places = held.grower, {0: self._text.place(held.log, held.spec)}
        at = [self._place_of(grower, node, places) for node in grower.being_fed]
        said = [self._text.coupled(place, MAX_TOLD + 1, has_noise=self._has_noise) for place in at]
        held.hold(said)
        grower.take(said)

    def _place_of(self, grower: Grower, node: int, known: dict[int, Place]) -> Place:
        if node not in known:
            known[node] = self._text.after(self._place_of(grower, grower.parents[node], known), grower.tokens[node])
        return known[node]

    def _tell(self, job: SteadyJob, timing: Timing | None = None) -> None:
        told = job.held.grower.tell()
        if (listener := self._listeners.get(job.request.stamp)) is not None:
            num_held = job.request.num_committed - len(job.pending)
            is_over = not job.pending and job.held.grower.has_fed_all
            listener(Sprouted(job.request.stamp, told, num_held, timing, is_over))


def _feed(jobs: Sequence[SteadyJob]) -> None:
    """In the next pass: what each that ends by itself wants, and of all others the likeliest."""
    for job in jobs:
        if job.ends:
            job.held.grower.feed_pass(job.steady.rows_per_pass)
    others = [job for job in jobs if not job.ends]
    num_rows = max((job.steady.rows_per_pass for job in others), default=0)
    feed_likeliest([job.held.grower for job in others], num_rows)
