"""Verifies the blocks of a step by their rules, also where the logits are NaN or infinite.

Knows jobs, logits and rules; must not know KV, messages or continuations. One upload carries all inputs and one
readback all results. Only log probabilities, and blocks that are verified again, need another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import inf, isfinite

from torch import Tensor

from core.records import Refused, TokenLogprobs
from core.rules import Outcome, Rule
from core.speculation import EMPTY_BLOCK, ROOT, TokenTree
from workers.engine.jobs import VerifyJob
from workers.grammar import FIELD
from workers.live import VerdictEnd
from workers.sampling import Row, prepare_adjustment, sampler, verify
from workers.sampling.batched import Decide
from workers.step import Readback, Uploads, upload

JUDGED_SCORES = 1 << 24
"""Maximum number of scores judged together: a hundred rows of a large vocabulary. Top-p truncation takes 48 bytes for
each; for a thousand rows at once, this would exceed the memory that the KV cache of a GPU leaves."""
_UNSOUND = (
    "NaN or infinite scores of the target for this sequence: its logits, or its masks, penalties and bias on them"
)
BAD_WORDS = "sampling.bad_words"
"""Path of the field in the proto."""
_NOTHING_LEFT = "forbid every token that may come next"


@dataclass(frozen=True, slots=True)
class JudgedJob:
    """A job whose logits have been computed, with its outcome or refusal once decided."""

    job: VerifyJob
    logits: Tensor
    """Logits of this part of the step; `start` and `rows` index into it."""
    start: int
    """Index of the first row of this job in `logits`."""
    rows: list[Row]
    """Sampling inputs of the root, then of each node of the block."""
    block: TokenTree
    outcome: Outcome | None = None
    is_refused: bool = False
    """Whether the row of the root has no distribution."""
    may_hold_nan: bool = False
    """Whether any row had no distribution, so that its KV may hold NaN."""
    is_forbidden: bool = False
    """Whether the row of the root has finite logits, and the request's masks allow no token there."""

    @property
    def is_open(self) -> bool:
        """Whether neither an outcome nor a refusal is decided yet."""
        return self.outcome is None and not self.is_refused

    @property
    def rule(self) -> Rule:
        return self.job.held.spec.rule

    def decided(self, outcome: Outcome) -> JudgedJob:
        """Copy with this outcome. `replace` would take several times as long, in each step of each stream."""
        return JudgedJob(
            self.job, self.logits, self.start, self.rows, self.block, outcome, self.is_refused, self.may_hold_nan
        )

    def refusal(self) -> Refused:
        """Refusal with its cause: the grammar, the bad words, or NaN or infinite scores."""
        stamp, grammar, mask = self.job.request.stamp, self.job.held.grammar, self.rows[0].mask
        if grammar is None or grammar.problem is None or mask is None or mask.any():
            if self.is_forbidden and self.job.held.spec.sampling.bad_words:
                return Refused(stamp, _NOTHING_LEFT, is_final=True, field=BAD_WORDS)
            return Refused(stamp, _UNSOUND, is_final=True)
        return Refused(stamp, f"cannot be followed: {grammar.problem}", is_final=True, field=FIELD)

    def end(self, outcome: Outcome) -> VerdictEnd:
        """The part of this verdict that learning from live traffic keeps."""
        held, block = self.job.held, self.block
        tokens = [*(block.tokens[node] for node in outcome.path), outcome.next_token]
        node = outcome.path[-1] if outcome.path else ROOT
        is_guessed = node in block.parents
        is_missed = is_guessed or not len(block)
        return VerdictEnd(
            held.session, held.spec, held.log.tokens, tokens, is_guessed, is_missed, self.logits, self.start + 1 + node
        )

    def logprobs(self, outcome: Outcome, readback: Readback) -> Callable[[], Sequence[TokenLogprobs]]:
        """Log probabilities of the output tokens, from the rows of the root and of each accepted node.

        Call the result after the readback.
        """
        num_top = self.job.held.spec.num_logprobs
        if num_top is None:
            return tuple
        index = [self.start, *(self.start + 1 + node for node in outcome.path)]
        tokens = [*(self.job.block.tokens[node] for node in outcome.path), outcome.next_token]
        return sampler.logprobs(self.logits[upload(index, self.logits.device)], tokens, num_top, readback)


def judge(jobs: Sequence[VerifyJob], logits: Tensor) -> list[JudgedJob]:
    """Verify the blocks of these jobs by their rows of `logits` [R, V]. Each job gets an outcome or is refused."""
    decided: list[JudgedJob] = []
    for part, of_part in _parts(jobs, logits):
        items = list(_items(part, of_part))
        uploads = Uploads(logits.device)
        adjust = prepare_adjustment([row for item in items for row in item.rows], logits.shape[1], uploads)
        scores = cache(partial(adjust, of_part))
        while items:
            settled = _settle_all(items, of_part, scores, uploads)
            decided += [item for item in settled if not item.is_open]
            items = [item for item in settled if item.is_open]
    return decided


def _parts(jobs: Sequence[VerifyJob], logits: Tensor) -> Iterator[tuple[Sequence[VerifyJob], Tensor]]:
    """Split the jobs of a step, with their rows of `logits` [R, V], into parts of at most JUDGED_SCORES; at least one
    job each."""
    first = first_row = end_row = 0
    for index, job in enumerate(jobs):
        num_rows = 1 + len(job.block)
        if first < index and (end_row + num_rows - first_row) * logits.shape[1] > JUDGED_SCORES:
            yield jobs[first:index], logits[first_row:end_row]
            first, first_row = index, end_row
        end_row += num_rows
    if jobs:
        yield jobs[first:], logits[first_row:end_row] if first_row else logits


def _items(jobs: Sequence[VerifyJob], logits: Tensor) -> Iterator[JudgedJob]:
    start = 0
    for job in jobs:
        yield JudgedJob(job, logits, start, job.draws(), job.block)
        start += 1 + len(job.block)


def _settle_all(
    items: Sequence[JudgedJob], logits: Tensor, adjusted: Callable[[], Tensor], uploads: Uploads
) -> list[JudgedJob]:
    """Verify the items once, rule by rule; some may stay open. Call `adjusted` for the scores after the upload."""
    by_rule: dict[str, list[JudgedJob]] = {}
    for item in items:
        by_rule.setdefault(item.rule.name, []).append(item)
    deciding = [(of_rule, _verify(name, of_rule, logits.shape, uploads)) for name, of_rule in by_rule.items()]
    uploads.send()
    readback, scores = Readback(), adjusted()
    bad_rows = _find_bad_rows(logits, scores, readback)
    readers = [(of_rule, decide(scores, readback)) for of_rule, decide in deciding]
    readback.wait()
    is_bad, are_logits_bad = bad_rows()
    settled = []
    for item, outcome in chain.from_iterable(zip(of_rule, outcomes(), strict=True) for of_rule, outcomes in readers):
        where = slice(item.start, item.start + len(item.rows))
        settled.append(_settle(item, outcome, is_bad[where], are_logits_bad[where]))
    return settled


def _find_bad_rows(logits: Tensor, scores: Tensor, readback: Readback) -> Callable[[], tuple[list[bool], list[bool]]]:
    """For each row: whether it has no distribution, and whether its logits, not the masks, are the cause.

    Call the result after the readback.
    """
    of_logits, of_scores = readback.argmax(logits), readback.argmax(scores)

    def found() -> tuple[list[bool], list[bool]]:
        largest = list(zip(of_logits()[1], of_scores()[1], strict=True))
        is_bad = [not (isfinite(logit) and isfinite(score)) for logit, score in largest]
        return is_bad, [not (isfinite(logit) and score < inf) for logit, score in largest]

    return found


def _verify(rule: str, items: Sequence[JudgedJob], shape: Sequence[int], uploads: Uploads) -> Decide:
    """Decide blocks of one rule by scores of this shape. All are greedy, and need no distribution, or none is."""
    rows = [row for item in items for row in item.rows]
    num_rows, vocab_size = shape
    index = [item.start + row for item in items for row in range(len(item.rows))]
    where = uploads.add(index) if len(rows) < num_rows else None
    distribution = None if rows[0].sampling.is_greedy else sampler.prepare_distribution(rows, vocab_size, uploads)
    decide = verify.verify(rule, [item.block for item in items], rows, vocab_size, uploads)

    def decide_by(scores: Tensor, readback: Readback) -> Callable[[], list[Outcome]]:
        scores = scores if where is None else scores[where()]
        return decide(scores if distribution is None else distribution(scores), readback)

    return decide_by


def _settle(item: JudgedJob, outcome: Outcome, is_bad: Sequence[bool], are_logits_bad: Sequence[bool]) -> JudgedJob:
    """The decided item; or an open item with fewer guesses, to be verified again.

    `is_bad`: whether the row of the root, and of each guess, has no distribution. `are_logits_bad`: whether the model's
    logits are the cause.
    """
    scores = item.job.scores
    if not any(is_bad) and scores is None:
        return item.decided(outcome)
    root, *guesses = is_bad
    may_hold_nan = item.may_hold_nan or any(is_bad)
    has_nan = scores is not None and scores.has_nan
    is_forbidden = root and not are_logits_bad[0] and not has_nan
    item = replace(item, may_hold_nan=may_hold_nan, is_refused=root or has_nan, is_forbidden=is_forbidden)
    if item.is_refused:
        return item
    if not any(guesses):
        return replace(item, outcome=outcome)
    if any(are_logits_bad) or not item.rule.needs_q:
        # Keep the root alone: plain decoding might never reach the guess after which the model gave NaN.
        return replace(item, rows=item.rows[:1], block=EMPTY_BLOCK)
    if item.rule.takes_trees:
        return replace(item, outcome=_ending_before(item, outcome, guesses))
    if any(guesses[:-1]):
        # Keep the guesses of the chain up to the first without a distribution after it. Dropping that one too would
        # select draws by their values (docs/exactness.md, section 4).
        num_guesses = guesses.index(True) + 1
        return replace(item, rows=item.rows[: 1 + num_guesses], block=item.block.prefix(num_guesses))
    return replace(item, outcome=_with_last_as_next(item, outcome))


def _with_last_as_next(item: JudgedJob, outcome: Outcome) -> Outcome:
    """Outcome of a chain whose last guess is followed by no distribution. If accepted, that guess becomes the next
    token, so the tokens stay the same."""
    if len(outcome.path) < len(item.block):
        return outcome
    return outcome._replace(path=outcome.path[:-1], next_token=item.block.tokens[-1])


def _ending_before(item: JudgedJob, outcome: Outcome, is_bad: Sequence[bool]) -> Outcome:
    """Outcome that ends at the first accepted guess that no distribution follows; that guess becomes the next token.

    In a tree of draws, no verdict depends on the rows after it.
    """
    for place, node in enumerate(outcome.path):
        if is_bad[node]:
            return Outcome(outcome.path[:place], item.block.tokens[node])
    return outcome
