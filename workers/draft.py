"""The draft engine: catches up with what was committed, then guesses what comes next.

Nothing it says can change the output, only how fast it comes: it uses the target's sampling parameters and, in coupled
mode, the target's noise, because that is how it guesses best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.config import EngineConfig
from core.records import (
    Drafted,
    DraftReply,
    DraftRequest,
    Refused,
    SparseDistribution,
    TokenTree,
    Verification,
)
from workers import sampling, weights
from workers.engine import Engine, Job
from workers.runtime import ModelRuntime
from workers.sampling import Row
from workers.sequences import HeldSequence


@dataclass(eq=False, slots=True)
class DraftJob(Job[DraftRequest]):
    """A block in the making."""

    guesses: list[int] = field(default_factory=list)
    q: list[SparseDistribution] = field(default_factory=list)

    @property
    def needs_q(self) -> bool:
        spec = self.held.spec
        return spec.verification is not Verification.COUPLED and not spec.sampling.is_greedy

    def row(self) -> Row:
        spec, log = self.held.spec, self.held.log
        tokens = list(log.tokens) if spec.sampling.has_penalties else ()
        return Row(spec.sampling, len(log), tokens, spec.prompt_len)


class DraftEngine(Engine[DraftRequest, DraftReply]):
    """Guesses for many sessions at once: each step extends every block in the making by one token."""

    def __init__(self, runtime: ModelRuntime, config: EngineConfig, epoch: int, q_top_tokens: int) -> None:
        super().__init__(runtime, config, epoch)
        self._q_top_tokens = q_top_tokens

    @classmethod
    def load(cls, config: EngineConfig, epoch: int, q_top_tokens: int, progress: Callable[[str], None]) -> DraftEngine:
        """Raises: StartupError."""
        return cls(ModelRuntime(weights.load(config, progress), config), config, epoch, q_top_tokens)

    @staticmethod
    def _num_guesses(request: DraftRequest) -> int:
        return max(0, request.num_tokens - 1)  # the last guess is not fed back

    def _new_job(self, ticket: int, request: DraftRequest, held: HeldSequence, pending: list[int]) -> DraftJob:
        return DraftJob(ticket, request, held, pending, wants_logits=request.num_tokens > 0)

    def _finish(self, jobs: Sequence[Job[DraftRequest]], logits: Tensor) -> None:
        guessing: list[DraftJob] = []
        for job in jobs:
            assert isinstance(job, DraftJob)
            if job.wants_logits:
                guessing.append(job)
            else:
                self._complete(job)
        if not guessing:
            return
        is_bad = sampling.bad_rows(logits).tolist()
        sound = [index for index in range(len(guessing)) if not is_bad[index]]
        for job, bad in zip(guessing, is_bad, strict=True):
            if bad:
                self._answer(job, Refused(job.request.stamp, "the draft model gave NaN for this sequence"))
        if sound:
            self._guess([guessing[index] for index in sound], logits[torch.tensor(sound, device=logits.device)])

    def _guess(self, jobs: Sequence[DraftJob], logits: Tensor) -> None:
        """One further guess for each job."""
        rows = [job.row() for job in jobs]
        log_q = sampling.process(logits, rows)
        coupled = [index for index, job in enumerate(jobs) if not job.needs_q]
        if coupled:
            tokens = sampling.sample_coupled(log_q[coupled], [rows[index] for index in coupled]).tolist()
            for index, token in zip(coupled, tokens, strict=True):
                jobs[index].guesses.append(token)
        self._guess_with_q(
            [(job, row, log_q[index]) for index, (job, row) in enumerate(zip(jobs, rows, strict=True)) if job.needs_q]
        )
        for job in jobs:
            self._go_on(job)

    def _guess_with_q(self, items: Sequence[tuple[DraftJob, Row, Tensor]]) -> None:
        if not items:
            return
        places = [len(job.guesses) for job, _, _ in items]
        log_q = torch.stack([log_q for _, _, log_q in items])
        drawn = sampling.draft_sample(log_q, [row for _, row, _ in items], places, self._q_top_tokens)
        for (job, _, _), (token, q) in zip(items, drawn, strict=True):
            job.guesses.append(token)
            job.q.append(q)

    def _go_on(self, job: DraftJob) -> None:
        if len(job.guesses) == job.request.num_tokens:
            self._complete(job)
        else:
            job.pending = job.guesses[-1:]

    def _complete(self, job: DraftJob) -> None:
        request = job.request
        self._answer(job, Drafted(request.stamp, TokenTree.chain(job.guesses, job.q), request.num_committed))
