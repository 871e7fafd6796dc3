"""A target engine without a model. It accepts guesses that equal its own text and takes pass times from a law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core.continuations import Continuations, refusal_of_offer
from core.protocol import HeldTokens
from core.records import (
    MAX_FEATURE_TOKENS,
    Continuation,
    Features,
    Refused,
    SequenceSpec,
    Stamp,
    TokenLogprobs,
    Verdict,
    VerifyReply,
    VerifyRequest,
    Want,
)
from core.rules import Outcome
from core.speculation import NO_GUESSES, ROOT, Guesses, TokenTree
from simulation.engines.base import Job, SimEngine
from simulation.engines.features import features_of
from simulation.engines.hardware import EngineLaw
from simulation.engines.texts import Text, TextPosition

VerifyJob = Job[VerifyRequest]
HEAD_DEPTH = 3
"""Number of guesses of a head in the target's engine."""


class SimTarget(SimEngine[VerifyRequest, VerifyReply]):
    """A target that follows a block as long as it equals its own text. Under relaxed rules it may leave that text.

    In rejection and block mode the draft has already run the acceptance test: its sample equals the text's token
    exactly if a real target would accept it (`simulation.engines.draft`).
    It returns what heads want, if it is asked to: features, and the guesses of a head of its own.
    """

    def __init__(self, engine_id: str, epoch: int, text: Text, law: EngineLaw) -> None:
        super().__init__(engine_id, epoch, text, law)
        self._continuations = Continuations()

    def _begin(self, request: VerifyRequest, held: HeldTokens, now_s: float) -> VerifyJob:
        pending = held.rebase_to_verify(request).pending
        return Job(request, held, pending, now_s, num_held=len(held.log))

    def _num_guesses(self, job: VerifyJob) -> int:
        return len(job.request.block)

    def _end_pass(self, jobs: Sequence[VerifyJob], now_s: float) -> None:
        judged = [(job, *self._judge(job)) for job in jobs]
        verified = [(job.request, job.held.log, outcome) for job, outcome, _ in judged]
        continued, following, refused = self._continuations.after_pass(verified, lambda *_: True)
        for (job, outcome, logprobs), number in zip(judged, continued, strict=True):
            verdict = _verdict(job, outcome, logprobs, number, now_s)
            self._conclude(job, replace(verdict, features=_features(job, outcome), guesses=self._guesses(job, outcome)))
        self._refuse(refused)
        for request in following:
            self._put(request)

    def _judge(self, job: VerifyJob) -> tuple[Outcome, tuple[TokenLogprobs, ...]]:
        block, log, spec = job.request.block, job.held.log, job.held.spec
        first = position = self._text.position(log, spec)
        path: list[int] = []
        tokens: list[int] = []
        num_relaxed = 0
        while (node := self._accepted(block, path[-1] if path else ROOT, position, spec)) is not None:
            path.append(node)
            tokens.append(block.tokens[node])
            num_relaxed += tokens[-1] != position.next_token
            position = self._text.accepted(position, tokens[-1])
        tokens.append(position.next_token)
        log.extend(tokens[:-1])
        logprobs = tuple(map(logprob_of, tokens)) if spec.num_logprobs is not None else ()
        samples = self._text.samples(block, first) if Want.SAMPLES in job.request.wants else ()
        return Outcome(tuple(path), tokens[-1], num_relaxed, samples), logprobs

    def _accepted(self, block: TokenTree, parent: int, position: TextPosition, spec: SequenceSpec) -> int | None:
        """The accepted child: the text's own token, or else one that a relaxed rule tolerates."""
        own = block.child(parent, position.next_token)
        if own is not None or spec.rule.is_lossless:
            return own
        children = (node for node in range(parent + 1, len(block)) if block.parents[node] == parent)
        return next((node for node in children if self._text.tolerates(position, block.tokens[node], spec)), None)

    def _guesses(self, job: VerifyJob, outcome: Outcome) -> Guesses:
        """The guesses of a head in this engine: a chain below the verdict's next token."""
        if Want.GUESSES not in job.request.wants:
            return NO_GUESSES
        position = self._text.accepted(self._text.position(job.held.log, job.held.spec), outcome.next_token)
        tokens = list[int]()
        for _ in range(HEAD_DEPTH):
            tokens.append(self._text.coupled(position, 1).ranked[0])
            position = self._text.after(position, tokens[-1])
        return Guesses.chain(tokens, [0.5] * HEAD_DEPTH)

    # Continuations

    def _put(self, request: Any) -> None:
        if not isinstance(request, Continuation) or self.is_dead:
            self._refuse(self._continuations.drop(request.stamp.lease, before=request.stamp.round))
            super()._put(request)
            return
        session = request.stamp.lease
        held = self._sessions.get(session)
        refusal = refusal_of_offer(
            request,
            held,
            epoch=self.epoch,
            has_ended=session in self._ended,
            is_verifying=any(job.held is held for job in self._jobs),
            vocab_size=self._text.vocab_size,
        )
        self._refuse(self._continuations.offer(request) if refusal is None else [refusal])

    def _refuse(self, refused: Sequence[Refused]) -> None:
        for refusal in refused:
            self._reply(refusal)

    def has(self, stamp: Stamp) -> bool:
        return super().has(stamp) or stamp.lease in self._continuations.sessions

    def kill(self) -> None:
        super().kill()
        self._continuations = Continuations()

    def release(self, sessions: Sequence[str]) -> None:
        super().release(sessions)
        for session in sessions:
            self._refuse(self._continuations.drop(session))


def _features(job: VerifyJob, outcome: Outcome) -> Features | None:
    """Features of the root and of the accepted path, and of the tokens before that this message has brought."""
    wants, log = job.request.wants, job.held.log
    if Want.FEATURES not in wants:
        return None
    root = len(log) - len(outcome.path) - 1
    first = min(root, max(job.num_held, root - MAX_FEATURE_TOKENS)) if Want.PREFIX_FEATURES in wants else root
    return features_of(log, first, len(log))


def _verdict(
    job: VerifyJob, outcome: Outcome, logprobs: tuple[TokenLogprobs, ...], continued: int, now_s: float
) -> Verdict:
    return Verdict(
        job.request.stamp,
        outcome.path,
        outcome.next_token,
        len(job.held.log),
        logprobs,
        job.timing(now_s),
        continued,
        num_relaxed=outcome.num_relaxed,
        samples=outcome.samples,
    )


def logprob_of(token: int) -> TokenLogprobs:
    """A made-up log probability that identifies its token."""
    return TokenLogprobs(-token / 64.0)
