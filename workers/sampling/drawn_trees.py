"""Verification of a batch of trees of draws: the twins of recursive rejection and of sequential selection.

What is as wide as the vocabulary stays on the device. A trial depends on p where q is not zero, and on how much of p is
elsewhere; so a few numbers for each draw come to the host, all at once, where the reference's own walk decides
(`core.rules.drawn_trees`).
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
from core.rules.drawn_trees import SURE, Drawn, draws_of, walk
from core.rules.sequential_selection import NUM_HALVINGS
from core.speculation import TokenTree
from workers.sampling.gumbel import gumbel_rows
from workers.sampling.sampler import Row
from workers.sampling.twin import Outcomes, of_nodes, starts_of
from workers.step import Readback, upload


@dataclass(frozen=True, slots=True)
class _Places:
    """Where something was drawn, over all blocks, padded to the widest."""

    rows: Tensor
    """Of p.  # [P]"""
    ids: Tensor
    """Tokens that q gives.  # [P, M]"""
    q: Tensor
    """Their probabilities; 0 is padding.  # [P, M]"""
    picks: Tensor
    """Places of the draws among the tokens.  # [P, K]"""
    num_draws: Tensor
    """# [P]"""


class _Trials(NamedTuple):
    chances: Tensor
    """Of each trial.  # [P, K]"""
    inside: Tensor
    """Residual of the tokens that q gives.  # [P, M]"""
    scale: Tensor
    """Residual over p of all others.  # [P]"""


_Judge: TypeAlias = Callable[[_Places, Tensor, Tensor], _Trials]
"""(places, p where q gives something [P, M], p of all else [P]) -> as `core.rules.drawn_trees.Judge`."""


def reject_recursively(blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """The twin of recursive rejection."""
    return _verify(blocks, log_p, rows, readback, _recursively, draws_anew=False)


def select_in_sequence(blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """The twin of sequential selection."""
    return _verify(blocks, log_p, rows, readback, _in_sequence, draws_anew=True)


def _verify(
    blocks: Sequence[TokenTree],
    log_p: Tensor,
    rows: Sequence[Row],
    readback: Readback,
    judge: _Judge,
    *,
    draws_anew: bool,
) -> Outcomes:
    starts = starts_of(blocks)
    drawn_at = [draws_of(block, log_p.shape[1], draws_anew=draws_anew) for block in blocks]
    by_row = {
        start + 1 + place: drawn
        for start, of_block in zip(starts, drawn_at, strict=True)
        for place, drawn in of_block.items()
    }
    p = log_p.double().softmax(dim=-1)
    asked_chances = None
    if by_row:
        places = _padded(by_row, p)
        judged = _judge(places, p, judge)
        asked_chances = readback.ask(judged.chances)
        p = _with_residuals(p, places, judged)
    asked = readback.ask(_draws(p, _keys(blocks, rows, by_row)))

    def outcomes() -> list[Outcome]:
        chances = dict(zip(by_row, asked_chances.values, strict=True)) if asked_chances is not None else {}
        next_tokens = of_nodes(asked.values, blocks)
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


def _chances_at(
    chances: Mapping[int, Sequence[float]], drawn_at: Mapping[int, Drawn], start: int, place: int
) -> Sequence[float]:
    return chances[start + 1 + place][: len(drawn_at[place].tokens)]


def _token_at(next_tokens: Sequence[int], place: int, depth: int) -> int:  # noqa: ARG001
    return next_tokens[place + 1]


def _padded(by_row: Mapping[int, Drawn], p: Tensor) -> _Places:
    width = max(len(drawn.ids) for drawn in by_row.values())
    most = max(len(drawn.tokens) for drawn in by_row.values())
    ids, picks = np.zeros((len(by_row), width), np.int64), np.zeros((len(by_row), most), np.int64)
    q = np.zeros((len(by_row), width))
    for i, drawn in enumerate(by_row.values()):
        ids[i, : len(drawn.ids)], q[i, : len(drawn.ids)] = drawn.ids, drawn.probs
        picks[i, : len(drawn.tokens)] = [drawn.ids.index(token) for token in drawn.tokens]
    num_draws = np.array([len(drawn.tokens) for drawn in by_row.values()])
    return _Places(*(upload(each, p.device) for each in (np.array(list(by_row)), ids, q, picks, num_draws)))


def _judge(places: _Places, p: Tensor, judge: _Judge) -> _Trials:
    at_places = p[places.rows]
    inside = at_places.gather(1, places.ids).masked_fill(places.q == 0.0, 0.0)
    outside = (at_places.sum(dim=-1) - inside.sum(dim=-1)).clamp(min=0.0)
    return judge(places, inside, outside)


def _recursively(places: _Places, inside: Tensor, outside: Tensor) -> _Trials:
    """As `core.rules.recursive_rejection.judge_recursively`, trial by trial, for all places at once."""
    q, scale, chances = places.q, inside.new_ones(len(inside)), inside.new_zeros(places.picks.shape)
    for trial in range(places.picks.shape[1]):
        pick = places.picks[:, trial : trial + 1]
        q_left = q / q.sum(dim=-1, keepdim=True)
        residual = (inside - q_left).clamp(min=0.0)
        mass = residual.sum(dim=-1) + outside * scale
        is_spent = mass <= NEGLIGIBLE_MASS
        chance = (inside.gather(1, pick) / q_left.gather(1, pick)).squeeze(1)
        chances[:, trial] = chance.masked_fill(is_spent, SURE)
        has_failed = (places.num_draws > trial) & ~is_spent
        inside = (residual / mass[:, None]).where(has_failed[:, None], inside)
        scale = (scale / mass).where(has_failed, scale)
        q = q.scatter(1, pick, 0.0).where(has_failed[:, None], q)
    return _Trials(chances, inside, scale)


def _in_sequence(places: _Places, inside: Tensor, outside: Tensor) -> _Trials:
    """As `core.rules.sequential_selection.judge_in_sequence`, for all places at once."""
    q, rho = places.q, _division_factors(places, inside)
    passing = (inside / rho[:, None]).minimum(q)
    beta = passing.sum(dim=-1)
    factor = ((1.0 - (1.0 - beta) ** places.num_draws) / beta).where(beta > 0.0, rho)
    residual = (inside - factor[:, None] * passing).clamp(min=0.0)
    is_spent = residual.sum(dim=-1) + outside <= NEGLIGIBLE_MASS
    is_same = (inside - q).clamp(min=0.0).sum(dim=-1) + outside <= NEGLIGIBLE_MASS
    chances = inside.gather(1, places.picks) / (rho[:, None] * q.gather(1, places.picks))
    return _Trials(
        chances.masked_fill(is_same[:, None], SURE),
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
    """p, and in its place the residual where something was drawn.  # [R, V]"""
    p[places.rows] *= judged.scale[:, None]
    is_token = places.q > 0.0
    rows = places.rows[:, None].expand_as(places.ids)
    return p.index_put_((rows[is_token], places.ids[is_token]), judged.inside[is_token])


def _draws(law: Tensor, keys: Sequence[noise.Key]) -> Tensor:
    """# [R]"""
    return (law.log().float() + gumbel_rows(keys, law.shape[1], law.device)).argmax(dim=-1)


def _keys(blocks: Sequence[TokenTree], rows: Sequence[Row], by_row: Mapping[int, Drawn]) -> list[noise.Key]:
    depths = [depth for block in blocks for depth in (0, *block.depths)]
    return [
        noise.key(row.sampling.seed, row.position, depth, Purpose.RESIDUAL if i in by_row else Purpose.BONUS)
        for i, (row, depth) in enumerate(zip(rows, depths, strict=True))
    ]
