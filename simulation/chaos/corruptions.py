"""Corrupt replies that a broken engine or network may send.

Each corruption takes a valid reply and a random source. Any part of a draft's reply may be wrong, without an effect on
the output. A target's reply may be wrong only where a session can detect it: its tokens are the output, so a wrong but
valid token cannot be detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from core.records import DraftUpdate, Features, Missing, Stamp, Verdict
from core.speculation import NO_Q, ROOT, Guesses, NewNodes

TargetCorruption = Callable[[Verdict, Random], Verdict | Missing]
DraftCorruption = Callable[[DraftUpdate, Random], DraftUpdate | Missing]
FeatureCorruption = Callable[[Features, Random], Features | None]


def _somewhere(values: tuple[float, ...], value: float, random: Random) -> tuple[float, ...]:
    index = random.randrange(len(values)) if values else 0
    return (*values[:index], value, *values[index + 1 :])


def _tokens(tokens: tuple[int, ...], token: int, random: Random) -> tuple[int, ...]:
    index = random.randrange(len(tokens)) if tokens else 0
    return (*tokens[:index], token, *tokens[index + 1 :])


def _other_epoch(stamp: Stamp) -> Stamp:
    return replace(stamp, epoch=stamp.epoch + 1)


TARGET_CORRUPTIONS: dict[str, TargetCorruption] = {
    "a path that is none": lambda v, r: replace(v, path=(r.randrange(300, 400), *v.path)),
    "a path upside down": lambda v, _: replace(v, path=(*(v.path or (0, 1, 2))[::-1], 0)),
    "a token outside the vocabulary": lambda v, r: replace(v, next_token=r.choice((10**6, -1))),
    "too much held": lambda v, r: replace(v, held=v.held + r.randrange(1, 1000)),
    "it goes on with nothing": lambda v, _: replace(v, continued=10**6),
    "it does not go on": lambda v, _: replace(v, continued=0),
    "too little held": lambda v, r: replace(v, held=max(0, v.held - r.randrange(1, 1000))),
    "less than nothing held": lambda v, _: replace(v, held=-1),
    "samples of no block": lambda v, _: replace(v, samples=(*v.samples, 1) if v.samples else (1,) * 999),
    "samples outside the vocabulary": lambda v, r: replace(v, samples=(r.choice((10**6, -1)), *v.samples[1:])),
    "another epoch": lambda v, _: replace(v, stamp=_other_epoch(v.stamp)),
    "missing": lambda v, r: Missing(v.stamp, r.choice((0, v.held, -1, 10**6))),
}


def _raise(*_: Any) -> Guesses:
    raise RuntimeError("a guesser that is broken")


GUESSER_CORRUPTIONS: dict[str, Callable[[Guesses, Random], Any]] = {
    "other guesses": lambda _, r: Guesses.chain([r.randrange(1, 16) for _ in range(3)], [1.0] * 3),
    "guesses outside the vocabulary": lambda _, r: Guesses.chain([1, r.choice((10**6, -7))], [0.9, 0.9]),
    "guesses below nothing": lambda _, r: Guesses((r.choice((-5, 3)),), (1,), (0.9,)),
    "guesses whose chance is no number": lambda _, __: Guesses.chain([1], [math.nan]),
    "a flood of guesses": lambda _, __: Guesses.chain([1] * 10_000, [1.0] * 10_000),
    "no guesses but nonsense": lambda _, r: r.choice((None, 7, "guesses")),
    "an error": _raise,
}
"""Values returned in place of a guesser's proposal."""


def _with_columns(draft_update: Any, **changes: Any) -> Any:
    """Replace columns of the new nodes. Raises: ValueError if the record itself rejects the change."""
    return replace(draft_update, new_nodes=replace(draft_update.new_nodes, **changes))


DRAFT_CORRUPTIONS: dict[str, DraftCorruption] = {
    "growth outside the vocabulary": lambda s, r: _with_columns(
        s, tokens=_tokens(tuple(s.new_nodes.tokens.tolist()), r.choice((10**6, -7)), r)
    ),
    "other growth": lambda s, r: _with_columns(s, tokens=tuple(r.randrange(1, 40) for _ in s.new_nodes.tokens)),
    "growth all below one": lambda s, _: _with_columns(s, parents=(ROOT,) * len(s.new_nodes)),
    "growth below what comes later": lambda s, _: _with_columns(s, parents=(10**6,) * len(s.new_nodes)),
    "growth below nothing": lambda s, _: _with_columns(s, parents=(-5,) * len(s.new_nodes)),
    "growth without a chance": lambda s, r: _with_columns(
        s, chances=_somewhere(tuple(s.new_nodes.chances.tolist()), r.choice((0.0, 2.0)), r)
    ),
    "growth whose chance is no number": lambda s, r: _with_columns(
        s, chances=_somewhere(tuple(s.new_nodes.chances.tolist()), math.nan, r)
    ),
    "growth that leaves out": lambda s, r: replace(s, new_nodes=NewNodes(s.new_nodes.first + r.randrange(1, 9))),
    "growth that was told": lambda s, _: replace(s, new_nodes=NewNodes(0, (ROOT,), (1,), (0,), (0.5,), (0.5,))),
    "too much held": lambda s, r: replace(s, held=s.held + r.randrange(1, 1000)),
    "too little held": lambda s, r: replace(s, held=s.held - r.randrange(1, 1000)),
    "growth that is over": lambda s, _: replace(s, is_over=True),
    "draws from nothing": lambda s, _: _with_columns(s, q=()),
    "draws from what is no law": lambda s, _: _with_columns(s, q=(NO_Q,) * len(s.new_nodes)),
    "a law too many": lambda s, _: _with_columns(s, q=(*s.new_nodes.q, NO_Q)),
    "another epoch": lambda s, _: replace(s, stamp=_other_epoch(s.stamp)),
    "missing": lambda s, r: Missing(s.stamp, r.choice((0, s.held, -1, 10**6))) if s.is_over else s,
}


def _moved(features: Features, num_tokens: int) -> Features:
    return replace(features, first=features.first + num_tokens)


FEATURE_CORRUPTIONS: dict[str, FeatureCorruption] = {
    "lost": lambda _, __: None,
    "doubled": lambda f, _: replace(f, rows=2 * f.rows),
    "of the round before": lambda f, _: _moved(f, -f.num_tokens),
    "moved by a token": lambda f, r: _moved(f, r.choice((-1, 1))),
    "too few": lambda f, _: replace(f, rows=f.rows[2 * f.width :]),
    "cut off": lambda f, r: replace(f, rows=f.rows[: r.randrange(len(f.rows))]),
    "of another width": lambda f, r: replace(f, width=r.choice((0, 1, f.width - 1, 2 * f.width))),
}
"""Corruptions of features that both ends of a link can detect."""

VERDICT_FEATURE_CORRUPTIONS: dict[str, FeatureCorruption] = {
    **FEATURE_CORRUPTIONS,
    "NaN": lambda f, _: replace(f, rows=b"\xc0\x7f" + f.rows[2:]),
    "infinite": lambda f, _: replace(f, rows=f.rows[:-2] + b"\x80\xff"),
}
"""Corruptions that a session must detect: a head that reads such numbers guesses nothing from then on."""
