"""A target engine without a model: it accepts what equals its own text, and takes its time for it."""

from __future__ import annotations

import asyncio

from core.errors import WorkerLost
from core.protocol import HeldTokens
from core.records import TokenLogprobs, Verdict, VerifyReply, VerifyRequest
from core.trees import ROOT
from simulation.engines import Job, SimEngine

VerifyJob = Job[VerifyRequest, VerifyReply]


class SimTarget(SimEngine[VerifyRequest, VerifyReply]):
    """Under all three verifications it follows the block down its own text.

    In rejection and block mode the draft has tossed the coin already: its sample is the text's token exactly where a
    real target would accept it (`simulation.draft`).
    """

    def _begin(
        self, request: VerifyRequest, held: HeldTokens, now_s: float, answer: asyncio.Future[VerifyReply | WorkerLost]
    ) -> VerifyJob:
        return Job(request, held, held.rebase_to_verify(request).pending, now_s, answer)

    def _num_guesses(self, job: VerifyJob) -> int:
        return len(job.request.block)

    def _advance(self, job: VerifyJob, now_s: float) -> None:
        block, log, spec = job.request.block, job.held.log, job.held.spec
        place = self._text.place(log, spec)
        path: list[int] = []
        tokens = [place.next_token]
        while (node := block.child(path[-1] if path else ROOT, place.next_token)) is not None:
            path.append(node)
            place = self._text.after(place, place.next_token)
            tokens.append(place.next_token)
        log.extend(tokens[:-1])
        logprobs = tuple(map(logprob_of, tokens)) if spec.num_logprobs is not None else ()
        self._conclude(job, Verdict(job.request.stamp, tuple(path), tokens[-1], len(log), logprobs, job.timing(now_s)))


def logprob_of(token: int) -> TokenLogprobs:
    """A figure that tells to which token it belongs."""
    return TokenLogprobs(-token / 64.0)
