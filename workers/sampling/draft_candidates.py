"""What the draft says about the token after each row: candidates in order, how sure it is, and its own draw.

Knows logits, sampling parameters and noise, by `workers.sampling.sampler`; must not know trees, models or sessions.
Three kinds of rows differ in what orders their candidates and which law is theirs: greedy ones, coupled ones, and those
that are verified against q.
"""

from __future__ import annotations

import math
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
from workers.sampling import sampler
from workers.sampling.gumbel import gumbel_at
from workers.sampling.sampler import Row
from workers.step import Readback, upload


class Kind(Enum):
    """How a row's candidates are found."""

    GREEDY = auto()
    """By logits; how sure they are is read off the law at temperature 1, because q itself is one-hot."""
    COUPLED = auto()
    """By log q and the noise that the target draws with, so that the first is the token that q's own sample is."""
    DRAWN = auto()
    """By q cut to its likeliest tokens; where a sample is wanted it is drawn from just that."""

    @classmethod
    def of(cls, spec: Sampling, verification: Verification) -> Kind:
        if spec.is_greedy:
            return cls.GREEDY
        return cls.DRAWN if verification.rule.needs_q else cls.COUPLED


@dataclass(frozen=True, slots=True)
class Place:
    """Which row this is, and what is wanted of it."""

    row: Row
    kind: Kind
    sample: int | None = None
    """Row of the noise of the guess to draw (`core.noise.row_of`); None where none is drawn."""
    num_draws: int = 1
    """Guesses to draw there."""
    draws_anew: bool = False
    """Whether two of them may be the same (`Rule.draws_anew`)."""
    num_ranks: int = MAX_RANKS
    """Candidates that are of use, where they are ordered by score: each takes time on the engine's thread."""


CPU_CACHE_NUMBERS = 1 << 18
"""A megabyte, which is a core's own cache."""
_Draw: TypeAlias = tuple[int, SparseDistribution]
_Found: TypeAlias = Callable[[], list[Candidates]]
_Sound: TypeAlias = Callable[[], list[Candidates | None]]
_NO_DRAW: _Draw = (NO_TOKEN, NO_Q)


def propose(logits: Tensor, places: Sequence[Place], q_top_tokens: int, readback: Readback) -> _Sound:
    """The candidates of each row of `logits` [R, V], when they have been read back.

    None for a row whose scores, after bias and penalties, give no distribution (`sampler.bad_rows`).
    """
    asked = [
        (index, _of_kind(batch[0].kind, _rows(logits, index), batch, q_top_tokens, readback))
        for index in _batches(places, logits)
        for batch in [[places[i] for i in index]]
    ]

    def found() -> list[Candidates | None]:
        by_row = {i: candidates for index, batch in asked for i, candidates in zip(index, batch(), strict=True)}
        return [by_row[i] for i in range(len(places))]

    return found


def _rows(logits: Tensor, index: Sequence[int]) -> Tensor:
    """These rows, in place where they adjoin."""
    first, end = index[0], index[-1] + 1
    return logits[first:end] if end - first == len(index) else logits[upload(list(index), logits.device)]


def _batches(places: Sequence[Place], logits: Tensor) -> Iterator[list[int]]:
    """Rows of one kind; on a CPU no more of them than its cache holds, or each step would go through memory."""
    most = max(1, CPU_CACHE_NUMBERS // logits.shape[1]) if logits.device.type == "cpu" else len(places)
    for kind in Kind:
        index = [i for i, place in enumerate(places) if place.kind is kind]
        yield from (index[start : start + most] for start in range(0, len(index), most))


def _of_kind(kind: Kind, logits: Tensor, places: Sequence[Place], q_top_tokens: int, readback: Readback) -> _Sound:
    rows = [place.row for place in places]
    scores = sampler.adjusted(logits, rows)
    if kind is Kind.GREEDY:
        return _ranked(scores, None, places, readback)
    log_q = sampler.distribution(scores, rows)
    if kind is Kind.COUPLED:
        return _ranked(sampler.perturbed(log_q, rows), log_q, places, readback)
    is_bad = readback.ask(sampler.bad_rows(scores))
    found = _drawn(log_q, places, q_top_tokens, readback)
    return lambda: [
        None if is_unsound else candidates for is_unsound, candidates in zip(is_bad.values, found(), strict=True)
    ]


def _ranked(scores: Tensor, log_q: Tensor | None, places: Sequence[Place], readback: Readback) -> _Sound:
    """The first candidates by score [R, V], and the entropy of q: of the softmax of the scores, where `log_q` is None.

    The largest score tells whether a row is sound: what makes NaN or infinity of it has done so to all of `log_q`.
    """
    values, ids = sampler.largest(scores, max(place.num_ranks for place in places))
    log_p = scores.log_softmax(dim=-1)
    entropy = _entropy(log_p if log_q is None else log_q)
    asked = [readback.ask(tensor) for tensor in (values, ids, log_p.gather(1, ids).exp_(), entropy)]
    return lambda: [_of_row(*parts) for parts in zip(*(wanted.values for wanted in asked), strict=True)]


def _of_row(values: list[float], ids: list[int], shares: list[float], entropy: float) -> Candidates | None:
    """Of several that come first alike, the first is the lowest, as `argmax` has it, unless there are more of them than
    candidates: then it is any."""
    if not math.isfinite(values[0]):
        return None
    num_first, num_ranks = values.count(values[0]), len(values) - values.count(-math.inf)
    if num_first > 1:
        ids = [*sorted(ids[:num_first]), *ids[num_first:]]
    return Candidates(tuple(ids[:num_ranks]), shares[0], entropy, shares=tuple(shares[:num_ranks]))


def _entropy(log_p: Tensor) -> Tensor:
    """In nats, of each row of log p [R, V]. What is clamped weighs nothing.  # [R]"""
    entropies: Tensor = -torch.linalg.vecdot(log_p.exp(), log_p.clamp(min=-80.0))
    return entropies


def _drawn(log_q: Tensor, places: Sequence[Place], q_top_tokens: int, readback: Readback) -> _Found:
    probs, ids = sampler.cut(log_q, q_top_tokens)
    draws = _draws(probs, ids, places, readback)
    counts = (probs[:, :MAX_RANKS] > 0).sum(dim=1)
    asked = [readback.ask(tensor) for tensor in (ids[:, :MAX_RANKS], counts, probs[:, 0], _entropy(probs.log()))]
    return lambda: [
        Candidates(tuple(row_ids[:count]), confidence, entropy, sampled, q)
        for row_ids, count, confidence, entropy, (sampled, q) in zip(
            *(wanted.values for wanted in asked), draws(), strict=True
        )
    ]


def _draws(probs: Tensor, ids: Tensor, places: Sequence[Place], readback: Readback) -> Callable[[], list[_Draw]]:
    """What is drawn at each place; the places that want as many draws together."""
    asked: list[tuple[list[int], Callable[[], list[_Draw]]]] = []
    for num_draws, draws_anew in dict.fromkeys((place.num_draws, place.draws_anew) for place in places):
        wanted = {
            i: noise.key(place.row.sampling.seed, place.row.position, place.sample, Purpose.DRAFT)
            for i, place in enumerate(places)
            if place.sample is not None and (place.num_draws, place.draws_anew) == (num_draws, draws_anew)
        }
        if wanted:
            index, keys = upload(list(wanted), ids.device), list(wanted.values())
            draw = draw_guesses(probs[index], ids[index], keys, readback, num_draws, draws_anew=draws_anew)
            asked.append((list(wanted), draw))

    def found() -> list[_Draw]:
        by_row = {i: each for wanted, drawn in asked for i, each in zip(wanted, drawn(), strict=True)}
        return [by_row.get(i, _NO_DRAW) for i in range(len(places))]

    return found


def draw_guesses(
    probs: Tensor,
    ids: Tensor,
    keys: Sequence[noise.Key],
    readback: Readback,
    num_draws: int = 1,
    *,
    draws_anew: bool = False,
) -> Callable[[], list[_Draw]]:
    """What is drawn from each q [R, M], which is `cut` already: the first draw, and that q with all of them, when they
    have been read back.

    Without `draws_anew` the draws are the largest scores log q + noise, in order: the law of drawing one after the
    other, none twice. With it each has noise of its own, from the same key on in steps of `ROWS_APART`.
    """
    log_probs = probs.double().log().float()
    if draws_anew:
        picks = [(log_probs + gumbel_at(_apart(keys, draw), ids)).argmax(dim=-1) for draw in range(num_draws)]
        order = torch.stack(picks, dim=1)
    else:
        order = (log_probs + gumbel_at(keys, ids)).topk(min(num_draws, ids.shape[1])).indices
    asked = [readback.ask(tensor) for tensor in (order, ids, probs)]
    return lambda: [
        _one_place(picks, token_ids, row_probs)
        for picks, token_ids, row_probs in zip(*(wanted.values for wanted in asked), strict=True)
    ]


def _apart(keys: Sequence[noise.Key], draw: int) -> list[noise.Key]:
    return [(seed, position, row + noise.ROWS_APART * draw, purpose) for seed, position, row, purpose in keys]


def _one_place(picks: Sequence[int], token_ids: list[int], probs: list[float]) -> _Draw:
    """Of one alone the guess itself tells. What has no chance is not drawn: of a row without a law nothing."""
    draws = tuple([token_ids[pick] for pick in picks if probs[pick] > 0.0])
    return (draws[0] if draws else NO_TOKEN), _sparse(token_ids, probs, draws if len(picks) > 1 else ())


def _sparse(token_ids: list[int], probs: list[float], draws: tuple[int, ...]) -> SparseDistribution:
    num_positive = sum(prob > 0 for prob in probs)  # they come likeliest first
    return SparseDistribution(tuple(token_ids[:num_positive]), tuple(probs[:num_positive]), draws)
