"""Progress of one request through the engine, from its arrival to its reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Generic, TypeVar

from core.records import DraftRequest, Features, Timing, TokenLogprobs, Verdict, VerifyRequest, Want
from core.rules import Outcome
from core.speculation import ROOT, Guesses, TokenTree
from core.text import BlockHash
from workers.engine.sequences import HeldSequence
from workers.heads import CommittedRows, PrefixFeatures
from workers.sampling import Row
from workers.sampling.logits import is_argmax
from workers.sampling.prompt_scores import SCORED_ROWS, PromptScores
from workers.step import StepRows

MIN_PREFIX_FEATURES = 64
"""Number of tokens that a target computes again for their features although it has their KV: a head attends to no
others. They cost one pass."""
Request = TypeVar("Request", bound=VerifyRequest | DraftRequest)


@dataclass(eq=False, slots=True)
class Job(ABC, Generic[Request]):
    """A request in progress. Its guesses are computed in the step of its last pending token."""

    request: Request
    held: HeldSequence
    pending: list[int]
    arrived_s: float
    """Monotonic time from which its wait is counted."""
    started_s: float | None = None
    num_passes: int = 0
    num_rows: int = 0
    num_sessions: int = 0
    prompt_hashes: list[BlockHash] = field(default_factory=list)
    """Block hashes of the job's tokens; empty until `workers.engine.prefix_cache` computes them for an empty
    sequence."""
    num_adopted: int = 0
    """Number of tokens whose KV was adopted from the prefix cache."""

    @property
    @abstractmethod
    def num_tree_rows(self) -> int:
        """Number of guesses computed with the last pending token; at least one if no token is pending."""

    @property
    def is_urgent(self) -> bool:
        """Whether a round waits for this job."""
        return True

    @property
    def is_ready(self) -> bool:
        """Whether the grammar of the output, if any, has been compiled."""
        return self.held.grammar is None or self.held.grammar.is_ready

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the grammar."""
        if self.held.grammar is not None:
            self.held.grammar.wait(timeout_s)

    @property
    def has_begun(self) -> bool:
        """Whether the job took part in an earlier step."""
        return self.num_passes > 0

    @property
    def max_chunk_tokens(self) -> int:
        """Maximum number of pending tokens in one step."""
        return len(self.pending)

    @property
    def may_adopt(self) -> bool:
        """Whether the job may adopt KV from the prefix cache."""
        return True

    @property
    def num_recomputed(self) -> int:
        """Number of tokens before the last that are computed even if the prefix cache has their KV."""
        return 0

    @property
    def features(self) -> Features | None:
        """The target's features, if the engine runs a head."""
        return None

    @abstractmethod
    def last_rows(self) -> StepRows:
        """Rows of the pending tokens and of their guesses."""

    def rows(self, share: Share) -> StepRows:
        """Rows of this job in a step, for the given share."""
        if share.is_last:
            return self.last_rows()
        held, tokens = self.held, self.pending[: share.num_tokens]
        return StepRows(
            held.kv, tokens, wants_logits=False, features=self.features, adapter=held.adapter, source=held.source
        )

    def advance(self, num_tokens: int) -> None:
        """Record that the KV of the first `num_tokens` pending tokens was computed or adopted."""
        self.held.log.extend(self.pending[:num_tokens])
        self.pending = self.pending[num_tokens:]

    def restart(self) -> None:
        """Mark the computed tokens as pending again, because their KV is about to be freed."""
        self.pending = [*self.held.log.tokens, *self.pending]
        self.started_s = None  # the time until the restart counts as waiting

    def record_step(self, started_s: float, num_rows: int, num_sessions: int) -> None:
        """Record a step with `num_rows` rows of all jobs that began at `started_s`, with `num_sessions` sessions
        open."""
        self.started_s = started_s if self.started_s is None else self.started_s
        self.num_passes += 1
        self.num_rows += num_rows
        self.num_sessions = num_sessions

    def timing(self, guessing_s: float = 0.0) -> Timing:
        now_s = monotonic()
        started_s = now_s if self.started_s is None else self.started_s
        waited_s, computed_s = started_s - self.arrived_s, now_s - started_s
        return Timing(waited_s, computed_s, self.num_passes, self.num_rows, self.num_sessions, guessing_s)


@dataclass(frozen=True, slots=True)
class Share:
    """A job's part of one step: its next `num_tokens` tokens; guesses are included with the last token."""

    job: Job[Any]
    num_tokens: int
    is_last: bool

    @property
    def num_rows(self) -> int:
        return self.num_tokens + (self.job.num_tree_rows if self.is_last else 0)

    @property
    def num_states(self) -> int:
        """Number of states of recurrent layers that it writes, as `StepRows.num_states`."""
        return self.num_rows - max(0, self.num_tokens - 1)

    @property
    def is_as_planned(self) -> bool:
        """Whether the job has lost no KV since the share was planned."""
        return self.num_tokens <= len(self.job.pending) and self.is_last == (self.num_tokens == len(self.job.pending))

    @property
    def num_kv_rows(self) -> int:
        """Number of KV rows of the job's sequence after this step."""
        return self.job.held.kv.num_tokens + self.num_rows


@dataclass(eq=False, slots=True)
class VerifyJob(Job[VerifyRequest]):
    """A prefix to extend, and a block of guesses to verify after it."""

    scores: PromptScores | None = None
    """Prompt scores, if log probabilities of the prompt were requested."""
    prefix: PrefixFeatures | None = None
    """Features of the tokens before the root, if a head reads them."""

    @property
    def max_chunk_tokens(self) -> int:
        return len(self.pending) if self.scores is None else SCORED_ROWS

    @property
    def may_adopt(self) -> bool:
        return self.scores is None

    def rows(self, share: Share) -> StepRows:
        rows = Job.rows(self, share)  # a class with slots has no super() without arguments
        end = len(self.held.log) + share.num_tokens - share.is_last
        has_features = self.prefix is not None and end > self.prefix.first
        is_read = self.scores is not None or has_features
        return replace(rows, wants_logits=True, wants_all=True) if is_read else rows

    def restart(self) -> None:
        Job.restart(self)
        if self.scores is not None:
            self.scores.restart()

    @property
    def num_recomputed(self) -> int:
        return 0 if self.prefix is None else MIN_PREFIX_FEATURES

    @property
    def block(self) -> TokenTree:
        return self.request.block

    @property
    def num_tree_rows(self) -> int:
        return len(self.request.block.tokens)

    @property
    def num_logits(self) -> int:
        """Number of rows of logits in its last step."""
        return 1 + len(self.block)

    def last_rows(self) -> StepRows:
        return StepRows(self.held.kv, self.pending, self.block, adapter=self.held.adapter, source=self.held.source)

    def draws(self, nodes: Sequence[int] | None = None) -> list[Row]:
        """Sampling inputs of the root, then of each node of the block, or of these."""
        spec, num_committed = self.held.spec, len(self.held.log)
        chosen = range(len(self.block)) if nodes is None else nodes
        masks = self.held.masks(lambda: _paths(self.block, (), chosen))
        if is_argmax(spec.sampling) and masks is None:
            row = Row(spec.sampling, num_committed, (), spec.prompt_len, lenience=spec.lenience)
            return [row] * (1 + len(chosen))
        unread: list[Sequence[int]] = [()] * (1 + len(chosen))
        paths = _paths(self.block, self.held.seen_tokens, chosen) if spec.sampling.reads_tokens else unread
        of_all = self.block.depths
        depths = (0, *(of_all[node] for node in chosen))
        return [
            Row(spec.sampling, num_committed + depth, path, spec.prompt_len, mask, spec.lenience)
            for depth, path, mask in zip(depths, paths, masks or [None] * len(paths), strict=True)
        ]

    def committed_rows(self, first_row: int, outcome: Outcome) -> CommittedRows:
        """The verdict's rows that heads need; `first_row` is the root's row in the pass. The log ends with the root."""
        rows = [first_row, *(first_row + 1 + node for node in outcome.path)]
        wants = self.request.wants
        guess = self._row_below_next(outcome) if Want.GUESSES in wants else None
        root = len(self.held.log) - 1
        prefix = None if self.prefix is None else self.prefix.before(root)
        return CommittedRows(rows, root, Want.FEATURES in wants, guess, prefix)

    def _row_below_next(self, outcome: Outcome) -> Callable[[int], Row]:
        """Sampling input of the token at a depth below the next one, as the target will draw it.

        Tokens in between are not known to heads, so penalties ignore them. Rules that need q get greedy guesses.
        """
        spec, log = self.held.spec, self.held.log.tokens
        path = [*(self.block.tokens[node] for node in outcome.path), outcome.next_token]
        sampling = replace(spec.sampling, temperature=0.0) if spec.needs_q else spec.sampling
        seen = [*log, *path] if sampling.reads_tokens else ()
        first = len(log) + len(path)
        return lambda depth: Row(sampling, first + depth, seen, spec.prompt_len)

    def verdict(
        self,
        outcome: Outcome,
        logprobs: tuple[TokenLogprobs, ...],
        timing: Timing,
        continued: int,
        features: Features | None,
        guesses: Guesses,
    ) -> Verdict:
        """The reply, once the log has the accepted guesses. `features`, `guesses`: what heads read and have made."""
        return Verdict(
            self.request.stamp,
            outcome.path,
            outcome.next_token,
            len(self.held.log),
            logprobs,
            timing,
            continued,
            tuple(self.scores.found) if self.scores is not None else (),
            outcome.num_relaxed,
            self._samples_of(outcome),
            self.num_adopted,
            features,
            guesses,
        )

    def _samples_of(self, outcome: Outcome) -> tuple[int, ...]:
        """Tokens sampled after each node, if the request wants them and the whole block was judged; otherwise empty."""
        is_whole = len(outcome.samples) == 1 + len(self.block)
        return outcome.samples if is_whole and Want.SAMPLES in self.request.wants else ()


def _paths(block: TokenTree, committed: Sequence[int], nodes: Sequence[int]) -> list[Sequence[int]]:
    """Tokens from `committed` to the root and to each of these nodes."""
    return [list(committed), *([*committed, *_path(block, node)] for node in nodes)]


def _path(block: TokenTree, node: int) -> list[int]:
    """Tokens from below the root to a node."""
    path: list[int] = []
    while node != ROOT:
        path.append(block.tokens[node])
        node = block.parents[node]
    return path[::-1]


def scores_of(request: VerifyRequest) -> PromptScores | None:
    """Scores for a request that asks for prompt log probabilities and contains the whole prompt; otherwise None."""
    spec = request.spec
    if request.base.num_tokens or spec is None or spec.num_prompt_logprobs is None:
        return None
    return PromptScores(spec.num_prompt_logprobs, spec.prompt_len)
