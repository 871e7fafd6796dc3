"""The target engine: computes prefixes and verifies blocks. Its tokens are the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, isfinite
from typing import NamedTuple

from torch import Tensor

from core.config import EngineConfig
from core.continuations import Continuations, refusal_of_offer
from core.records import (
    Continuation,
    Missing,
    Refused,
    SequenceSpec,
    TargetRequest,
    TokenLogprobs,
    Verdict,
    VerifyReply,
    VerifyRequest,
)
from core.rules import Outcome, Rule
from core.speculation import EMPTY_BLOCK, TokenTree
from workers.engine.base import Engine
from workers.engine.jobs import Job, Share, VerifyJob, scores_of
from workers.engine.room import FirstComeRoom
from workers.engine.sequences import HeldSequence
from workers.grammar import FIELD
from workers.parallel import Rank, load_runtime, log_loss
from workers.runtime import ModelRuntime
from workers.sampling import Row, adjusted, sampler, verify
from workers.sampling.prompt_scores import take_scores
from workers.step import Readback, StepRows, upload

JUDGED_SCORES = 1 << 24
"""Scores that are judged at a time: those of a hundred rows of a large vocabulary. Truncation by top-p takes 48 bytes
for each, so that a step of a thousand rows would take more memory than is left beside the KV cache of a GPU."""
_UNSOUND = (
    "NaN or infinite scores of the target for this sequence: its logits, or its masks, penalties and bias on them"
)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A job whose logits have been computed."""

    job: VerifyJob
    start: int
    """Index of its first row in the logits of its part of the step."""
    rows: list[Row]
    """Of the root, then of each node of the block."""
    block: TokenTree

    @property
    def rule(self) -> Rule:
        """The rule that decides on the block."""
        return self.job.held.spec.rule


@dataclass(frozen=True, slots=True)
class _Scored:
    """The logits of a step, before and after masks, bias and penalties."""

    logits: Tensor
    scores: Tensor

    def soundness(self, readback: Readback) -> Callable[[], tuple[list[bool], list[bool]]]:
        """Which rows give no distribution, and in which of them it is not the masks that leave no token.

        To be called after the readback.
        """
        of_logits, of_scores = readback.argmax(self.logits), readback.argmax(self.scores)

        def found() -> tuple[list[bool], list[bool]]:
            largest = list(zip(of_logits()[1], of_scores()[1], strict=True))
            is_bad = [not (isfinite(logit) and isfinite(score)) for logit, score in largest]
            return is_bad, [not (isfinite(logit) and score < inf) for logit, score in largest]

        return found


class _Sound(NamedTuple):
    """A job that gets a verdict."""

    item: _Judged
    outcome: Outcome
    logits: Tensor
    """In which the item's rows are."""


class TargetEngine(Engine[VerifyRequest, VerifyReply]):
    """Verifies blocks of many sessions at once. Prefill is the verification of an empty block after a long suffix."""

    room_type = FirstComeRoom

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        epoch: int,
        progress: Callable[[str], None],
        rank: Rank | None = None,
        on_loss: Callable[[str], None] = log_loss,
    ) -> TargetEngine:
        """The engine; with several ranks it is rank 0 (`workers.parallel`).

        Raises: StartupError.
        """
        return cls(load_runtime(config, progress, rank, on_loss), config, epoch)

    def __init__(self, runtime: ModelRuntime, config: EngineConfig, epoch: int) -> None:
        super().__init__(runtime, config, epoch)
        self._continuations: Continuations[int] = Continuations()
        self.take_offers: Callable[[], None] = _nothing
        """Called before verdicts are given, to take continuations offered since the step began."""

    def add(self, ticket: int, request: TargetRequest) -> None:
        """As `Engine.add`; also takes the offer of a continuation."""
        session = request.stamp.session
        if isinstance(request, Continuation):
            refused = self._refusal_of_offer(request)
            self._answers += self._continuations.offer(ticket, request) if refused is None else [(ticket, refused)]
            return
        self._answers += self._continuations.drop(session, before=request.stamp.round)
        super().add(ticket, request)

    def release(self, sessions: Sequence[str]) -> None:
        super().release(sessions)
        for session in sessions:
            self._answers += self._continuations.drop(session)

    def expire(self) -> list[str]:
        silent = super().expire()
        for session in self._continuations.sessions:
            if self._store.find(session) is None:
                self._answers += self._continuations.drop(session)
        return silent

    def _lose(self, session: str) -> None:
        for job in [job for job in self._jobs if job.held.session == session]:
            self._answer(job, Missing(job.request.stamp, 0))

    def _refusal_of_offer(self, offer: Continuation) -> Refused | None:
        held = self._store.find(offer.stamp.session)
        return refusal_of_offer(
            offer,
            held,
            epoch=self.epoch,
            has_ended=self._store.has_ended(offer.stamp.session),
            is_verifying=any(job.held is held for job in self._jobs),
            vocab_size=self.info.vocab_size,
        )

    def _needed_guesses(self, request: VerifyRequest) -> TokenTree:
        return request.block

    def _begin(self, ticket: int, request: VerifyRequest, held: HeldSequence) -> None:
        scores = scores_of(request)
        if scores is not None:
            self._store.truncate(held, 0)
        rebased = held.rebase_to_verify(request)
        self._store.follow(held, rebased.num_tokens, rebased.guesses)
        held.num_guesses = len(request.block)
        self._jobs.append(VerifyJob(ticket, request, held, rebased.pending, scores=scores))

    def _undo(self, job: Job[VerifyRequest], num_tokens: int, pending: list[int]) -> None:
        super()._undo(job, num_tokens, pending)
        if isinstance(job, VerifyJob) and job.scores is not None:  # of which some may have been taken
            job.begin_again()
            self._store.truncate(job.held, 0)

    def _take_scores(self, shares: Sequence[Share], batch: Sequence[StepRows], logits: Tensor) -> Tensor:
        if not any(rows.wants_all for rows in batch):
            return logits
        asked = []
        for share, rows in zip(shares, batch, strict=True):
            job = share.job
            assert isinstance(job, VerifyJob), "a target has no others"
            following = job.pending[1 : share.num_tokens + 1]
            asked.append((rows, job.scores, len(job.held.log), following, share.is_last))
        return take_scores(asked, logits)

    def _finish(self, jobs: Sequence[VerifyJob], logits: Tensor) -> bool:
        sound: list[_Sound] = []
        for part, of_part in _parts(jobs, logits):
            left = list(_stretches(part))
            scored = _Scored(of_part, adjusted(of_part, [row for item in left for row in item.rows]))
            while left:
                left = self._judge(left, scored, sound)
        if jobs:
            self._conclude(sound)
        return bool(jobs)

    def _judge(self, items: Sequence[_Judged], scored: _Scored, sound: list[_Sound]) -> list[_Judged]:
        """Decide on the jobs: refuse what is unsound, and add the others to `sound` with their outcomes.

        Returns those with a guess after which nothing can be drawn, to be verified again. All that decides is read back
        at once. The host waits a second time only for log probabilities.
        """
        readback = Readback()
        soundness = scored.soundness(readback)
        by_rule: dict[str, list[_Judged]] = {}
        for item in items:
            by_rule.setdefault(item.rule.name, []).append(item)
        asked = [(of_rule, self._ask(name, of_rule, scored.scores, readback)) for name, of_rule in by_rule.items()]
        readback.wait()
        is_bad, is_spoilt = soundness()
        again: list[_Judged] = []
        for item, outcome in chain.from_iterable(zip(of_rule, outcomes(), strict=True) for of_rule, outcomes in asked):
            where = slice(item.start, item.start + len(item.rows))
            root, *guesses = is_bad[where]
            has_spoilt = any(is_spoilt[where])
            if root or any(guesses):
                self._runtime.cache.suspect(item.job.held.kv)
            if root or (item.job.scores is not None and item.job.scores.is_unsound):
                self._roll_back(item.job, ())
                self._answer(item.job, _unsound(item))
            elif any(guesses) and (has_spoilt or not item.rule.needs_q):
                again.append(_without_guesses(item))
            elif any(guesses) and item.rule.takes_trees:
                sound.append(_Sound(item, _ending_before(item, outcome, guesses), scored.logits))
            elif any(guesses[:-1]):
                again.append(_up_to(item, guesses.index(True) + 1))
            elif any(guesses):
                sound.append(_Sound(item, _with_last_as_next(item, outcome), scored.logits))
            else:
                sound.append(_Sound(item, outcome, scored.logits))
        return again

    @staticmethod
    def _ask(rule: str, items: Sequence[_Judged], scores: Tensor, readback: Readback) -> Callable[[], list[Outcome]]:
        """Verify the blocks of one rule. All of them are greedy or none is; greedy rules need scores alone."""
        rows = [row for item in items for row in item.rows]
        if len(rows) < scores.shape[0]:
            index = [item.start + row for item in items for row in range(len(item.rows))]
            scores = scores[upload(index, scores.device)]
        blocks = [item.block for item in items]
        log_p = scores if rows[0].sampling.is_greedy else sampler.distribution(scores, rows)
        return verify.verify(rule, blocks, log_p, rows, readback)

    def _conclude(self, judged: Sequence[_Sound]) -> None:
        """Answer these jobs, of one pass."""
        readback = Readback()
        asked = [_logprobs(item, outcome, logits, readback) for item, outcome, logits in judged]
        readback.wait()
        for item, outcome, _ in judged:
            self._roll_back(item.job, outcome.path)
            self._prefixes.publish(item.job.held)
        verified = [(item.job.request, item.job.held.log, outcome) for item, outcome, _ in judged]
        self.take_offers()
        continued, following, refused = self._continuations.after_pass(verified, self._can_go_on)
        for (item, outcome, _), logprobs, number in zip(judged, asked, continued, strict=True):
            self._answer(item.job, self._verdict(item.job, outcome, tuple(logprobs()), number))
        self._answers += refused
        for ticket, request in following:
            super().add(ticket, request)

    @staticmethod
    def _verdict(job: VerifyJob, outcome: Outcome, logprobs: tuple[TokenLogprobs, ...], continued: int) -> Verdict:
        return Verdict(
            job.request.stamp,
            outcome.path,
            outcome.next_token,
            len(job.held.log),
            logprobs,
            job.timing(),
            continued,
            tuple(job.scores.found) if job.scores is not None else (),
            outcome.num_relaxed,
            job.samples_of(outcome),
            job.num_adopted,
        )

    def _can_go_on(self, committed: Sequence[int], request: VerifyRequest) -> bool:
        """Whether the offered block may be verified: not after an end-of-sequence token, which may end the output."""
        is_end = not set(committed).isdisjoint(self.info.eos_token_ids)
        return not is_end and self._refusal_of(request, self._store.find(request.stamp.session)) is None

    def _roll_back(self, job: VerifyJob, path: Sequence[int]) -> None:
        """Keep the KV of the accepted path alone: rejected tokens must not be attended to again."""
        held = job.held
        self._runtime.cache.compact(held.kv, len(held.log), path)
        held.log.extend(job.block.tokens[node] for node in path)


def _nothing() -> None:
    """The default for `take_offers`: without a thread, offers come between steps."""


def _parts(jobs: Sequence[VerifyJob], logits: Tensor) -> Iterator[tuple[Sequence[VerifyJob], Tensor]]:
    """The jobs of a step with their rows of `logits` [R, V], as many at a time as have JUDGED_SCORES; one at least."""
    first = first_row = end_row = 0
    for index, job in enumerate(jobs):
        num_rows = 1 + len(job.block)
        if first < index and (end_row + num_rows - first_row) * logits.shape[1] > JUDGED_SCORES:
            yield jobs[first:index], logits[first_row:end_row]
            first, first_row = index, end_row
        end_row += num_rows
    if jobs:
        yield jobs[first:], logits[first_row:end_row]


def _stretches(jobs: Sequence[VerifyJob]) -> Iterator[_Judged]:
    start = 0
    for job in jobs:
        yield _Judged(job, start, job.draws(), job.block)
        start += 1 + len(job.block)


def _unsound(item: _Judged) -> Refused:
    """Nothing can be drawn after the root: its grammar cannot be followed, or the model is broken."""
    stamp, grammar, mask = item.job.request.stamp, item.job.held.grammar, item.rows[0].mask
    if grammar is None or grammar.problem is None or mask is None or mask.any():
        return Refused(stamp, _UNSOUND, is_final=True)
    return Refused(stamp, f"cannot be followed: {grammar.problem}", is_final=True, field=FIELD)


def _without_guesses(item: _Judged) -> _Judged:
    """The same with the root alone: plain decoding might never reach the guess after which the model gave NaN."""
    return replace(item, rows=item.rows[:1], block=EMPTY_BLOCK)


def _up_to(item: _Judged, num_guesses: int) -> _Judged:
    """The same with the first guesses of a chain only. Leaving out the last of them as well would select draws by their
    values (docs/exactness.md, section 4)."""
    return replace(item, rows=item.rows[: 1 + num_guesses], block=item.block.prefix(num_guesses))


def _with_last_as_next(item: _Judged, outcome: Outcome) -> Outcome:
    """The same tokens, where nothing can be drawn after the last guess of a chain: if accepted, it is the next
    token."""
    if len(outcome.path) < len(item.block):
        return outcome
    return outcome._replace(path=outcome.path[:-1], next_token=item.block.tokens[-1])


def _ending_before(item: _Judged, outcome: Outcome, is_bad: Sequence[bool]) -> Outcome:
    """The same tokens up to the first accepted guess after which nothing can be drawn, which becomes the next token. In
    a tree of draws no verdict depends on what follows it."""
    for place, node in enumerate(outcome.path):
        if is_bad[node]:
            return Outcome(outcome.path[:place], item.block.tokens[node])
    return outcome


def _logprobs(
    item: _Judged, outcome: Outcome, logits: Tensor, readback: Readback
) -> Callable[[], Sequence[TokenLogprobs]]:
    """Log probabilities of each emitted token, from the row that drew it: the root's, then each accepted node's."""
    spec: SequenceSpec = item.job.held.spec
    if spec.num_logprobs is None:
        return tuple
    index = [item.start, *(item.start + 1 + node for node in outcome.path)]
    tokens = [*(item.job.block.tokens[node] for node in outcome.path), outcome.next_token]
    return sampler.logprobs(logits[upload(index, logits.device)], tokens, spec.num_logprobs, readback)
