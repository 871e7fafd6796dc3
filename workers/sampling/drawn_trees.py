"""Batched verification of trees of draws, by recursive rejection or sequential selection.

Tensors as wide as the vocabulary stay on the device. A trial depends only on p where q > 0, and on the mass of p
elsewhere. A few numbers for each draw are read back at once; `walk` of the reference (`core.rules.drawn_trees`) decides
by them on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from core import noise
from core.noise import Purpose
from core.rules import NEGLIGIBLE_MASS, Outcome
from core.rules.drawn_trees import CERTAIN, Drawn, draws_of, walk
from core.rules.sequential_selection import NUM_HALVINGS
from core.speculation import TokenTree
from workers.noise import prepare_gumbel_rows
from workers.sampling.batched import Decide, Outcomes, of_nodes, starts_of
from workers.sampling.logits import Row
from workers.step import Readback, Uploads


@dataclass(frozen=True, slots=True)
class _Places:
    """The P places of all blocks, padded to the widest."""

    rows: Tensor
    """Index of the place's row in p.  # [P]"""
    ids: Tensor
    """Tokens with q > 0.  # [P, M]"""
    q: Tensor
    """Their probabilities q; 0 is padding.  # [P, M]"""
    picks: Tensor
    """Indices of the draws into `ids`.  # [P, K]"""
    num_draws: Tensor
    """# [P]"""
    tokens: Tensor
    """Indices into flattened `ids` that are not padding. To find them on the device would make the host wait."""


class _Trials(NamedTuple):
    chances: Tensor
    """Acceptance probability of each trial.  # [P, K]"""
    inside: Tensor
    """Residual of the tokens with q > 0.  # [P, M]"""
    scale: Tensor
    """Residual over p for all other tokens.  # [P]"""


_Judge: TypeAlias = Callable[[_Places, Tensor, Tensor], _Trials]
"""(places, p where q > 0 [P, M], mass of p elsewhere [P]) -> trials, as `core.rules.drawn_trees.Judge`."""


def reject_recursively(blocks: Sequence[TokenTree], rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Decide:
    """Recursive rejection (`core.rules.recursive_rejection`)."""
    return _verify(blocks, rows, vocab_size, uploads, _recursively, with_replacement=False)


def select_in_sequence(blocks: Sequence[TokenTree], rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Decide:
    """Sequential selection (`core.rules.sequential_selection`)."""
    return _verify(blocks, rows, vocab_size, uploads, _in_sequence, with_replacement=True)


def _verify(
    blocks: Sequence[TokenTree],
    rows: Sequence[Row],
    vocab_size: int,
    uploads: Uploads,
    judge: _Judge,
    *,
    with_replacement: bool,
) -> Decide:
    starts = starts_of(blocks)
    drawn_at = [draws_of(block, vocab_size, with_replacement=with_replacement) for block in blocks]
    by_row = {
        start + 1 + place: drawn
        for start, of_block in zip(starts, drawn_at, strict=True)
        for place, drawn in of_block.items()
    }
    padded = _padded(by_row, uploads) if by_row else None
    gumbel = prepare_gumbel_rows(_keys(blocks, rows, by_row), vocab_size, uploads)

    def decide(log_p: Tensor, readback: Readback) -> Outcomes:
        places = padded() if padded else None
        residuals, chances_by_row = _try_draws(by_row, places, log_p.double().softmax(dim=-1), judge, readback)
        read_tokens = readback.add((residuals.log().float() + gumbel()).argmax(dim=-1))

        def outcomes() -> list[Outcome]:
            chances, next_tokens = chances_by_row(), of_nodes(read_tokens(), blocks)
            return [
                walk(
                    block,
                    drawn_at[i],
                    partial(_chances_at, chances, drawn_at[i], starts[i]),
                    partial(_token_at, next_tokens[i]),
                    rows[starts[i]].sampling.seed,
                    rows[starts[i]].position,
                )
                for i, block in enumerate(blocks)
            ]

        return outcomes

    return decide


def _try_draws(
    by_row: Mapping[int, Drawn], places: _Places | None, p: Tensor, judge: _Judge, readback: Readback
) -> tuple[Tensor, Callable[[], Mapping[int, Sequence[float]]]]:
    """p [R, V] with the residual in rows that have draws, and each trial's acceptance probability by row."""
    if places is None:
        return p, dict
    judged = _judge(places, p, judge)
    read_chances = readback.add(judged.chances)
    return _with_residuals(p, places, judged), lambda: dict(zip(by_row, read_chances(), strict=True))


def _chances_at(
    chances: Mapping[int, Sequence[float]], drawn_at: Mapping[int, Drawn], start: int, place: int
) -> Sequence[float]:
    return chances[start + 1 + place][: len(drawn_at[place].tokens)]


def _token_at(next_tokens: Sequence[int], place: int, depth: int) -> int:  # noqa: ARG001
    return next_tokens[place + 1]


def _padded(by_row: Mapping[int, Drawn], uploads: Uploads) -> Callable[[], _Places]:
    width = max(len(drawn.ids) for drawn in by_row.values())
    most = max(len(drawn.tokens) for drawn in by_row.values())
    ids, picks = np.zeros((len(by_row), width), np.int64), np.zeros((len(by_row), most), np.int64)
    q = np.zeros((len(by_row), width))
    for i, drawn in enumerate(by_row.values()):
        ids[i, : len(drawn.ids)], q[i, : len(drawn.ids)] = drawn.ids, drawn.probs
        picks[i, : len(drawn.tokens)] = [drawn.ids.index(token) for token in drawn.tokens]
    num_draws = np.array([len(drawn.tokens) for drawn in by_row.values()])
    tokens = np.flatnonzero(q > 0.0)
    uploaded = [uploads.add(each) for each in (np.array(list(by_row)), ids, q, picks, num_draws, tokens)]
    return lambda: _Places(*(there() for there in uploaded))


def _judge(places: _Places, p: Tensor, judge: _Judge) -> _Trials:
    at_places = p[places.rows]
    inside = at_places.gather(1, places.ids).masked_fill(places.q == 0.0, 0.0)
    outside = (at_places.sum(dim=-1) - inside.sum(dim=-1)).clamp(min=0.0)
    return judge(places, inside, outside)


def _recursively(places: _Places, inside: Tensor, outside: Tensor) -> _Trials:
    """`core.rules.recursive_rejection.judge_recursively`, trial by trial, for all places at once."""
    q, scale, chances = places.q, inside.new_ones(len(inside)), inside.new_zeros(places.picks.shape)
    for trial in range(places.picks.shape[1]):
        pick = places.picks[:, trial : trial + 1]
        q_left = q / q.sum(dim=-1, keepdim=True)
        residual = (inside - q_left).clamp(min=0.0)
        mass = residual.sum(dim=-1) + outside * scale
        is_spent = mass <= NEGLIGIBLE_MASS
        chance = (inside.gather(1, pick) / q_left.gather(1, pick)).squeeze(1)
        chances[:, trial] = chance.masked_fill(is_spent, CERTAIN)
        has_failed = (places.num_draws > trial) & ~is_spent
        inside = (residual / mass[:, None]).where(has_failed[:, None], inside)
        scale = (scale / mass).where(has_failed, scale)
        q = q.scatter(1, pick, 0.0).where(has_failed[:, None], q)
    return _Trials(chances, inside, scale)


def _in_sequence(places: _Places, inside: Tensor, outside: Tensor) -> _Trials:
    """`core.rules.sequential_selection.judge_in_sequence` for all places at once."""
    q, rho = places.q, _division_factors(places, inside)
    passing = (inside / rho[:, None]).minimum(q)
    beta = passing.sum(dim=-1)
    factor = ((1.0 - (1.0 - beta) ** places.num_draws) / beta).where(beta > 0.0, rho)
    residual = (inside - factor[:, None] * passing).clamp(min=0.0)
    is_spent = residual.sum(dim=-1) + outside <= NEGLIGIBLE_MASS
    is_same = (inside - q).clamp(min=0.0).sum(dim=-1) + outside <= NEGLIGIBLE_MASS
    chances = inside.gather(1, places.picks) / (rho[:, None] * q.gather(1, places.picks))
    return _Trials(
        chances.masked_fill(is_same[:, None], CERTAIN),
        inside.where(is_spent[:, None], residual),
        inside.new_ones(len(inside)),
    )


def _division_factors(places: _Places, inside: Tensor) -> Tensor:
    """`core.rules.sequential_selection.division_factor` of each place.  # [P]"""
    high = places.num_draws.to(inside.dtype)
    low = high.new_ones(len(high))
    for _ in range(NUM_HALVINGS):
        rho = (low + high) / 2.0
        beta = (inside / rho[:, None]).minimum(places.q).sum(dim=-1)
        is_enough = rho * beta >= 1.0 - (1.0 - beta) ** places.num_draws
        low, high = low.where(is_enough, rho), rho.where(is_enough, high)
    return high


def _with_residuals(p: Tensor, places: _Places, judged: _Trials) -> Tensor:
    """p, with the residual in rows that have draws; changes `p` in place.  # [R, V]"""
    p[places.rows] *= judged.scale[:, None]
    rows = places.rows[:, None].expand_as(places.ids)
    rows, ids, inside = (each.flatten()[places.tokens] for each in (rows, places.ids, judged.inside))
    return p.index_put_((rows, ids), inside)


def _keys(blocks: Sequence[TokenTree], rows: Sequence[Row], by_row: Mapping[int, Drawn]) -> list[noise.Key]:
    depths = [depth for block in blocks for depth in (0, *block.depths)]
    return [
        noise.key(row.sampling.seed, row.position, depth, Purpose.RESIDUAL if i in by_row else Purpose.BONUS)
        for i, (row, depth) in enumerate(zip(rows, depths, strict=True))
    ]
