"""The target engine: computes prefixes and verifies blocks. It decides the output tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from time import monotonic

from torch import Tensor

from core.config import EngineConfig
from core.continuations import Continuations, refusal_of_offer
from core.errors import ConfigError
from core.records import (
    MAX_FEATURE_TOKENS,
    Adapter,
    Continuation,
    EngineStats,
    Findings,
    Missing,
    Refused,
    TargetRequest,
    Verdict,
    VerifyReply,
    VerifyRequest,
    Want,
    is_sound,
)
from core.rules import Outcome
from core.speculation import TokenTree
from workers.engine.base import Engine
from workers.engine.beams import ScoringJob, score
from workers.engine.heads import HeadDraft, read_returned
from workers.engine.jobs import Job, Share, VerifyJob, scores_of
from workers.engine.judging import JudgedJob, judge
from workers.engine.kv_room import FirstComeKVRoom
from workers.engine.sequences import HeldSequence
from workers.heads import EngineHead, HeadWithKV, PrefixFeatures, load_engine_head
from workers.live import LearningBuffer, VerdictCollector, check_buffer
from workers.model import LoadedModel, LoraWeights, starting_adapters
from workers.parallel import Rank, load_runtime, log_rank_lost
from workers.runtime import ModelRuntime, Scores, report_layers
from workers.sampling.prompt_scores import store_scores
from workers.step import LayerShape, Readback, StepRows


class TargetEngine(Engine[VerifyRequest, VerifyReply]):
    """Verifies blocks of many sessions at once. Prefill is the verification of an empty block after a long suffix."""

    kv_room_type = FirstComeKVRoom
    _runtime: ModelRuntime

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        epoch: int,
        progress: Callable[[str], None],
        rank: Rank | None = None,
        on_loss: Callable[[str], None] = log_rank_lost,
    ) -> TargetEngine:
        """Load the engine; with several ranks it is rank 0 (`workers.parallel`).

        Raises: StartupError.
        """
        if config.learning_buffer is not None:  # before anything is loaded
            check_buffer(Path(config.learning_buffer).expanduser())
        heads: list[EngineHead | None] = []

        def load_head(loaded: LoadedModel) -> Sequence[LayerShape]:
            heads.append(load_engine_head(config, loaded, progress))
            head = heads[0].head if heads[0] is not None else None
            report_layers(head, loaded, config, progress)
            return head.shapes if isinstance(head, HeadWithKV) else ()

        runtime = load_runtime(config, progress, rank, on_loss, load_head)
        return cls(runtime, config, epoch, heads[0])

    def __init__(self, runtime: ModelRuntime, config: EngineConfig, epoch: int, head: EngineHead | None = None) -> None:
        super().__init__(runtime, config, epoch)
        self._head = head
        self._grown = None if head is None else HeadDraft.of(head, self.info, config)
        """The head, if it has KV of its own."""
        self.info = replace(self.info, head=head.name if head is not None else "")
        self._continuations = Continuations()
        buffer = LearningBuffer.of(config, epoch)
        self._learning = None if buffer is None else VerdictCollector(buffer)
        """Collects what drafts can learn from; None unless the settings have a buffer."""
        self.take_offers: Callable[[], None] = _nothing
        """Called before verdicts are made, to take continuations offered since the step began."""

    def add(self, request: TargetRequest, arrived_s: float | None = None) -> None:
        """Like `Engine.add`; also accepts an offered continuation."""
        session = request.stamp.lease
        if isinstance(request, Continuation):
            refused = self._refusal_of_offer(request)
            self._replies += self._continuations.offer(request) if refused is None else [refused]
            return
        self._replies += self._continuations.drop(session, before=request.stamp.round)
        super().add(request, arrived_s)

    def release(self, sessions: Sequence[str]) -> None:
        super().release(sessions)
        if self._learning is not None:
            self._learning.close(sessions)
        for session in sessions:
            self._replies += self._continuations.drop(session)
        if self._grown is not None:
            self._grown.release(sessions)

    def expire(self) -> list[str]:
        silent = super().expire()
        if self._learning is not None:
            self._learning.close(silent)
        for session in self._continuations.sessions:
            if self._store.find(session) is None:
                self._replies += self._continuations.drop(session)
        if self._grown is not None:
            self._grown.expire()
        return silent

    def close(self) -> None:
        super().close()
        if self._learning is not None:
            self._learning.end()

    def stats(self) -> EngineStats:
        stats = super().stats()
        if self._learning is None:
            return stats
        buffer = self._learning.buffer
        return replace(stats, num_kept_tokens=buffer.num_kept, num_unkept_tokens=buffer.num_lost)

    def warm_up(self, progress: Callable[[str], None], machine: str = "", known: Findings | None = None) -> Findings:
        """Like `Engine.warm_up`; also loads the adapters of the settings."""
        findings = super().warm_up(progress, machine, known)
        if self._grown is not None:
            self._grown.warm_up(progress)
        for adapter in starting_adapters(self._config):
            progress(f"loading adapter {adapter.name}")
            found = self.add_adapter(self.read_adapter(adapter))
            self.info = replace(self.info, adapters=(*self.info.adapters, found))
        return findings

    def read_adapter(self, adapter: Adapter) -> LoraWeights:
        """Read and check an adapter's files. May run on another thread than steps do. Raises: StartupError."""
        return self._runtime.read_adapter(adapter)

    def add_adapter(self, weights: LoraWeights) -> Adapter:
        """Serve an adapter from now on. Returns it, with its digest. Raises: StartupError."""
        adapter, numbers = weights.adapter, self._adapters
        if adapter.digest in numbers:
            return adapter
        most = self._config.max_adapters
        if len(numbers) >= most:
            raise ConfigError(
                f"adapter {adapter.name!r}: {most} adapters are loaded, which is max_adapters: unload one"
            )
        number = next(each for each in count(1) if each not in numbers.values())
        self._runtime.add_adapter(number, weights)
        numbers[adapter.digest] = number
        return adapter

    def drop_adapter(self, digest: str) -> bool:
        """Free an adapter, unless sessions use it. Returns whether it is gone."""
        number = self._adapters.get(digest)
        if number is None:
            return True
        if any(held.adapter == number for held in self._store):
            return False
        del self._adapters[digest]
        self._runtime.drop_adapter(number)
        return True

    def _lose(self, session: str) -> None:
        for job in [job for job in self._jobs if job.held.session == session]:
            self._answer(job, Missing(job.request.stamp, 0))

    def _refusal_of_offer(self, offer: Continuation) -> Refused | None:
        held = self._store.find(offer.stamp.lease)
        return refusal_of_offer(
            offer,
            held,
            epoch=self.epoch,
            has_ended=self._store.has_ended(offer.stamp.lease),
            is_verifying=any(job.held is held for job in self._jobs),
            vocab_size=self.info.vocab_size,
        )

    def _needed_guesses(self, request: VerifyRequest) -> TokenTree:
        return request.block

    def _begin(self, request: VerifyRequest, held: HeldSequence, arrived_s: float) -> None:
        scores = scores_of(request)
        if scores is not None:
            self._store.truncate(held, 0)
        is_scoring = bool(held.spec.num_likeliest)
        rebased = held.rebase_to_score(request) if is_scoring else held.rebase_to_verify(request)
        self._store.keep_rows(held, rebased.num_tokens, rebased.guesses)
        held.num_guesses = len(request.block) - len(held.tree)
        pending = [*self._store.rewind(held), *rebased.pending]
        prefix = self._wanted_prefix(request, len(pending))
        kind = ScoringJob if is_scoring else VerifyJob
        self._jobs.append(kind(request, held, pending, arrived_s, scores=scores, prefix=prefix))

    def _wanted_prefix(self, request: VerifyRequest, num_pending: int) -> PrefixFeatures | None:
        """Store for features of the tokens before the root, if a head reads them.

        The head in this engine knows those of tokens that were computed before: it gets them with each verdict.
        """
        is_read_here = self._grown is not None and Want.GUESSES in request.wants and num_pending > 1
        if is_read_here or Want.PREFIX_FEATURES in request.wants:
            return PrefixFeatures(max(0, request.num_committed - 1 - MAX_FEATURE_TOKENS))
        return None

    def _undo(self, job: Job[VerifyRequest], num_tokens: int, pending: list[int]) -> None:
        super()._undo(job, num_tokens, pending)
        if isinstance(job, VerifyJob) and job.scores is not None:  # some scores may have been consumed
            job.restart()
            self._store.truncate(job.held, 0)

    def _store_scores(self, shares: Sequence[Share], batch: Sequence[StepRows], scores: Scores) -> Scores:
        if not any(rows.wants_all for rows in batch):
            return scores
        scored, start = [], 0
        for share, rows in zip(shares, batch, strict=True):
            job = share.job
            assert isinstance(job, VerifyJob), "a target has no other jobs"
            following = job.pending[1 : share.num_tokens + 1]
            if job.prefix is not None and rows.wants_all and scores.features is not None:
                job.prefix.store(len(job.held.log), scores.features[start : start + len(rows.tokens)])
            start += rows.num_wanted
            scored.append((rows, job.scores, len(job.held.log), following, share.is_last))
        return scores.take(store_scores(scored, scores.logits))

    def _finish(self, jobs: Sequence[VerifyJob], scores: Scores) -> bool:
        scoring = [job for job in jobs if isinstance(job, ScoringJob)]
        if not scoring:
            return self._judge(jobs, scores)
        owners = [job for job in jobs for _ in range(job.num_logits)]
        rows = [row for row, job in enumerate(owners) if isinstance(job, ScoringJob)]
        others = [row for row, job in enumerate(owners) if not isinstance(job, ScoringJob)]
        self._score(scoring, scores.take(rows).logits if others else scores.logits)
        if others:
            self._judge([job for job in jobs if job not in scoring], scores.take(others))
        return True

    def _score(self, jobs: Sequence[ScoringJob], logits: Tensor) -> None:
        """Answer the messages of beam searches. Their nodes stay, with their KV."""
        for job, found in zip(jobs, score(jobs, logits), strict=True):
            if not all(map(is_sound, found)):
                self._runtime.cache.mark_nan(job.held.kv)
            job.hold(found)
            reply = job.reply()
            if isinstance(reply, Verdict):
                self._prefixes.publish(job.held)
            else:
                self._store.forget_guesses(job.held)
            self._answer(job, reply)

    def _judge(self, jobs: Sequence[VerifyJob], scores: Scores) -> bool:
        judged: list[tuple[JudgedJob, Outcome]] = []
        for item in judge(jobs, scores.logits):
            if item.may_hold_nan:
                self._runtime.cache.mark_nan(item.job.held.kv)
            if item.outcome is not None:
                judged.append((item, item.outcome))
            else:
                self._roll_back(item.job, ())
                self._answer(item.job, item.refusal())
        if jobs:
            first_rows = accumulate((1 + len(job.block) for job in jobs), initial=0)
            self._conclude(judged, scores.features, dict(zip(jobs, first_rows, strict=False)))
        return bool(jobs)

    def _conclude(
        self,
        judged: Sequence[tuple[JudgedJob, Outcome]],
        features: Tensor | None,
        first_rows: Mapping[VerifyJob, int],
    ) -> None:
        """Answer these jobs of one pass, and verify the offered continuations of their verdicts."""
        readback = Readback()
        logprob_readers = [item.logprobs(outcome, readback) for item, outcome in judged]
        rows = [item.job.committed_rows(first_rows[item.job], outcome) for item, outcome in judged]
        returned_of = read_returned(rows, features, readback, self.info.feature_width, self._grown or self._head)
        learn = self._read_to_learn(judged, readback)
        readback.wait()
        learn()
        for item, outcome in judged:
            self._roll_back(item.job, outcome.path)
            self._prefixes.publish(item.job.held)
        began_s = monotonic()
        returned = returned_of([(item.job.held, outcome.next_token) for item, outcome in judged])
        guessing_s = monotonic() - began_s if self._head is not None else 0.0
        verified = [(item.job.request, item.job.held.log, outcome) for item, outcome in judged]
        self.take_offers()
        continued, following, refused = self._continuations.after_pass(verified, self._can_go_on)
        for (item, outcome), logprobs, number, for_heads in zip(
            judged, logprob_readers, continued, returned, strict=True
        ):
            timing = item.job.timing(guessing_s)
            self._answer(item.job, item.job.verdict(outcome, tuple(logprobs()), timing, number, *for_heads))
        self._replies += refused
        for request in following:
            super().add(request)

    def _read_to_learn(self, judged: Sequence[tuple[JudgedJob, Outcome]], readback: Readback) -> Callable[[], None]:
        """Read what the buffer keeps of these verdicts. Call the result after the readback, before the roll-back."""
        if self._learning is None:
            return _nothing
        return self._learning.read([item.end(outcome) for item, outcome in judged if not item.may_hold_nan], readback)

    def _can_go_on(self, committed: Sequence[int], request: VerifyRequest) -> bool:
        """Whether the offered block may be verified: not after an end-of-sequence token, which may end the output."""
        is_end = not set(committed).isdisjoint(self.info.eos_token_ids)
        return not is_end and self._refusal_of(request, self._store.find(request.stamp.lease)) is None

    def _roll_back(self, job: VerifyJob, path: Sequence[int]) -> None:
        """Keep only the KV of the accepted path: later rows must not attend to rejected tokens."""
        held = job.held
        self._runtime.cache.compact(held.kv, len(held.log), path)
        held.log.extend(job.block.tokens[node] for node in path)
        self._runtime.cache.states.drop_early(held.kv, len(held.log))


def _nothing() -> None:
    """Default of `take_offers`: without a thread, offers arrive only between steps."""
