"""The draft's candidates for the token after each row: in order, with its confidence and, if it samples, its draws.

Knows logits, sampling parameters and noise, through `workers.sampling.sampler`; must not know trees, models or
sessions. There are three kinds of rows, which differ in the order of candidates and in the distribution: greedy,
coupled, and drawn (verified against q).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import torch
from torch import Tensor

from core import noise
from core.noise import Purpose
from core.records import Sampling, Verification
from core.speculation import MAX_RANKS, NO_Q, NO_TOKEN, Candidates, SparseDistribution
from workers.noise import gumbel_at
from workers.sampling import sampler
from workers.sampling.draft_vocabulary import DraftVocabulary
from workers.sampling.logits import LogitsTransform, Row, is_adjusted, prepare_adjustment
from workers.step import Readback, Uploads


class Kind(Enum):
    """How the candidates of a row are ordered."""

    GREEDY = auto()
    """Ordered by logits. Confidence is taken at temperature 1, because q itself is one-hot."""
    COUPLED = auto()
    """Ordered by log q plus the noise that the target uses, so that the first candidate is the sample of q."""
    DRAWN = auto()
    """Ordered by q, cut to its likeliest tokens. Samples are drawn from the cut q."""

    @classmethod
    def of(cls, spec: Sampling, verification: Verification) -> Kind:
        if spec.is_greedy:
            return cls.GREEDY
        return cls.DRAWN if verification.rule.needs_q else cls.COUPLED


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row of the draft's logits, and the candidates wanted from it."""

    row: Row
    kind: Kind
    sample: int | None = None
    """Row index of the noise for the draw (`core.noise.row_of`); None if nothing is drawn."""
    num_draws: int = 1
    """Number of guesses to draw."""
    with_replacement: bool = False
    """Whether draws are made with replacement (`Rule.with_replacement`)."""
    num_ranks: int = MAX_RANKS
    """Number of candidates wanted from a greedy or coupled row; each costs time on the engine's thread."""


CPU_CACHE_NUMBERS = 1 << 18
"""Numbers that fit into the cache of one CPU core: 1 MiB of float32."""
GPU_NUMBERS = 1 << 24
"""Numbers of one batch on a GPU: a hundred rows of a large vocabulary. Top-p truncation takes 48 bytes for each."""
_Draw: TypeAlias = tuple[int, SparseDistribution]
_CandidatesReader: TypeAlias = Callable[[], list[Candidates | None]]
_DrawAll: TypeAlias = Callable[[Tensor, Tensor, Readback], Callable[[], list[_Draw]]]
"""(q [R, M] after `cut`, its token ids, readback) -> draws. Call it after the upload, and its result after the
readback."""
_NO_DRAW: _Draw = (NO_TOKEN, NO_Q)


def propose(
    logits: Tensor,
    draft_rows: Sequence[DraftRow],
    q_top_tokens: int,
    readback: Readback,
    tokens: DraftVocabulary | None = None,
) -> _CandidatesReader:
    """Candidates of each row of `logits` [R, V]; call the result after the readback.

    None for a row without a distribution: after bias and penalties its largest score is NaN or infinite. `tokens`:
    those of the columns; None if they are all token ids in order.
    """
    if tokens is not None and any(is_adjusted(draft_row.row) for draft_row in draft_rows):
        logits, tokens = tokens.spread(logits), None  # bias, penalties and grammars are by token id
    uploads = Uploads(logits.device)
    tokens = tokens or DraftVocabulary(logits.shape[1])
    batches = [
        (index, _rows(index, uploads), _of_kind(batch[0].kind, batch, tokens, q_top_tokens, uploads))
        for index in _batches(draft_rows, logits)
        for batch in [[draft_rows[i] for i in index]]
    ]
    uploads.send()
    readers = [(index, of_kind(rows(logits), readback)) for index, rows, of_kind in batches]

    def found() -> list[Candidates | None]:
        by_row = {i: candidates for index, batch in readers for i, candidates in zip(index, batch(), strict=True)}
        return [by_row[i] for i in range(len(draft_rows))]

    return found


def _rows(index: Sequence[int], uploads: Uploads) -> Callable[[Tensor], Tensor]:
    """Select these rows of logits; as a view if they are contiguous."""
    first, end = index[0], index[-1] + 1
    if end - first == len(index):
        return lambda logits: logits[first:end]
    there = uploads.add(list(index))
    return lambda logits: logits[there()]


def _batches(draft_rows: Sequence[DraftRow], logits: Tensor) -> Iterator[list[int]]:
    """Indices of rows, in batches of one kind.

    On a CPU a batch fits into the cache, because otherwise each operator would go through memory. On a GPU its
    intermediate results fit into the memory that the KV cache leaves.
    """
    numbers = CPU_CACHE_NUMBERS if logits.device.type == "cpu" else GPU_NUMBERS
    most = max(1, numbers // logits.shape[1])
    for kind in Kind:
        index = [i for i, draft_row in enumerate(draft_rows) if draft_row.kind is kind]
        yield from (index[start : start + most] for start in range(0, len(index), most))


def _of_kind(
    kind: Kind, draft_rows: Sequence[DraftRow], tokens: DraftVocabulary, q_top_tokens: int, uploads: Uploads
) -> Callable[[Tensor, Readback], _CandidatesReader]:
    """(logits [R, V], readback) -> candidates. Call it after the upload."""
    rows = [draft_row.row for draft_row in draft_rows]
    adjust = prepare_adjustment(rows, tokens.size, uploads)
    if kind is Kind.GREEDY:
        return lambda logits, readback: _ranked(adjust(logits), None, tokens, draft_rows, readback)
    distribution = sampler.prepare_distribution(rows, tokens.num_columns, uploads)
    if kind is Kind.DRAWN:
        draw = _draws(draft_rows, uploads)
        return lambda logits, readback: _drawn(adjust(logits), distribution, draw, tokens, q_top_tokens, readback)
    perturb = sampler.prepare_perturbation(rows, tokens.size, uploads, tokens.token_ids)

    def coupled(logits: Tensor, readback: Readback) -> _CandidatesReader:
        log_q = distribution(adjust(logits))
        return _ranked(perturb(log_q), log_q, tokens, draft_rows, readback)

    return coupled


def _ranked(
    scores: Tensor,
    log_q: Tensor | None,
    tokens: DraftVocabulary,
    draft_rows: Sequence[DraftRow],
    readback: Readback,
) -> _CandidatesReader:
    """The best candidates by score [R, V], with the entropy of q. Without `log_q`, q is the softmax of the scores.

    `log_q` is overwritten. A row whose largest score is NaN or infinite gets None.
    """
    values, ids = sampler.largest(scores, max(draft_row.num_ranks for draft_row in draft_rows))
    log_p = scores.log_softmax(dim=-1)
    shares = log_p.gather(1, ids).exp_()
    entropy = _entropy(log_p if log_q is None else log_q)
    readers = [readback.add(tensor) for tensor in (values, tokens.ids_of(ids), shares, entropy)]
    return lambda: [_of_row(*parts) for parts in zip(*(values() for values in readers), strict=True)]


def _of_row(values: list[float], ids: list[int], shares: list[float], entropy: float) -> Candidates | None:
    """Candidates of one row. The lowest id wins a tie for the first place, as with `argmax`, unless more ids tie than
    there are candidates."""
    if not math.isfinite(values[0]):
        return None
    num_first, num_ranks = values.count(values[0]), len(values) - values.count(-math.inf)
    if num_first > 1:
        ids = [*sorted(ids[:num_first]), *ids[num_first:]]
    return Candidates(tuple(ids[:num_ranks]), shares[0], entropy, shares=tuple(shares[:num_ranks]))


def _entropy(log_p: Tensor) -> Tensor:
    """Entropy in nats of each row of log p [R, V], which is overwritten.  # [R]"""
    # `softmax` because torch's `exp` takes 4 to 27 times as long for numbers whose result is 0, as outside of a head's
    # vocabulary. In place, because a tensor of this size costs more than the product.
    weighted = log_p.softmax(dim=-1).mul_(log_p.clamp_(min=-80.0))
    return weighted.sum(dim=-1).neg_()


def _drawn(
    scores: Tensor,
    distribution: LogitsTransform,
    draw: _DrawAll,
    tokens: DraftVocabulary,
    q_top_tokens: int,
    readback: Readback,
) -> _CandidatesReader:
    argmax = readback.argmax(scores)
    probs, columns = sampler.cut(distribution(scores), q_top_tokens)
    ids = tokens.ids_of(columns)
    draws = draw(probs, ids, readback)
    counts = (probs[:, :MAX_RANKS] > 0).sum(dim=1)
    readers = [readback.add(tensor) for tensor in (ids[:, :MAX_RANKS], counts, probs[:, 0], _entropy(probs.log()))]
    return lambda: [
        Candidates(tuple(row_ids[:count]), confidence, entropy, sampled, q) if math.isfinite(largest) else None
        for largest, row_ids, count, confidence, entropy, (sampled, q) in zip(
            argmax()[1], *(values() for values in readers), draws(), strict=True
        )
    ]


def _draws(draft_rows: Sequence[DraftRow], uploads: Uploads) -> _DrawAll:
    """Draws of each row. Rows with the same number of draws are drawn together."""
    together: list[tuple[list[int], Callable[[], Tensor], _DrawAll]] = []
    for num_draws, with_replacement in dict.fromkeys(
        (draft_row.num_draws, draft_row.with_replacement) for draft_row in draft_rows
    ):
        wanted = {
            i: noise.key(draft_row.row.sampling.seed, draft_row.row.position, draft_row.sample, Purpose.DRAFT)
            for i, draft_row in enumerate(draft_rows)
            if draft_row.sample is not None
            and (draft_row.num_draws, draft_row.with_replacement) == (num_draws, with_replacement)
        }
        if wanted:
            keys = list(wanted.values())
            draw = draw_guesses(keys, uploads, num_draws, with_replacement=with_replacement)
            together.append((list(wanted), uploads.add(list(wanted)), draw))

    def draw_all(probs: Tensor, ids: Tensor, readback: Readback) -> Callable[[], list[_Draw]]:
        readers = [(wanted, draw(probs[index()], ids[index()], readback)) for wanted, index, draw in together]

        def found() -> list[_Draw]:
            by_row = {i: each for wanted, drawn in readers for i, each in zip(wanted, drawn(), strict=True)}
            return [by_row.get(i, _NO_DRAW) for i in range(len(draft_rows))]

        return found

    return draw_all


def draw_guesses(
    keys: Sequence[noise.Key], uploads: Uploads, num_draws: int = 1, *, with_replacement: bool = False
) -> _DrawAll:
    """Draw from each q [R, M], after `cut`. Gives the first draw, and q with all draws.

    Without replacement, the draws are the tokens with the largest log q + noise, in order. With replacement, each draw
    has its own noise, `ROWS_APART` rows after that of the previous draw.
    """
    there = [uploads.add(_apart(keys, draw)) for draw in range(num_draws if with_replacement else 1)]

    def draw(probs: Tensor, ids: Tensor, readback: Readback) -> Callable[[], list[_Draw]]:
        log_probs = probs.double().log().float()
        perturbed = (log_probs + gumbel_at(each(), ids) for each in there)
        if with_replacement:
            order = torch.stack([scores.argmax(dim=-1) for scores in perturbed], dim=1)
        else:
            order = next(perturbed).topk(min(num_draws, ids.shape[1])).indices
        readers = [readback.add(tensor) for tensor in (order, ids, probs)]
        return lambda: [
            _one_place(picks, token_ids, row_probs)
            for picks, token_ids, row_probs in zip(*(values() for values in readers), strict=True)
        ]

    return draw


def _apart(keys: Sequence[noise.Key], draw: int) -> list[noise.Key]:
    return [(seed, position, row + noise.ROWS_APART * draw, purpose) for seed, position, row, purpose in keys]


def _one_place(picks: Sequence[int], token_ids: list[int], probs: list[float]) -> _Draw:
    """The first draw at one place, and its q. A single draw is not recorded in q; probability 0 is never drawn."""
    draws = tuple([token_ids[pick] for pick in picks if probs[pick] > 0.0])
    return (draws[0] if draws else NO_TOKEN), _sparse(token_ids, probs, draws if len(picks) > 1 else ())


def _sparse(token_ids: list[int], probs: list[float], draws: tuple[int, ...]) -> SparseDistribution:
    num_positive = bisect_left(probs, True, key=lambda prob: not prob > 0)  # in descending order
    return SparseDistribution(tuple(token_ids[:num_positive]), tuple(probs[:num_positive]), draws)
