"""Converts trees, tree specs, distributions, guesses and features to protobuf and back. Decoders check them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeVar

from core.records import Features
from core.speculation import EMPTY_BLOCK, NO_GUESSES, Guesses, Measure, SparseDistribution, TokenTree, TreeSpec
from protos.outrider.link.v1 import link_pb2 as pb

BYTES_A_NUMBER: Final = 4
_Entry = TypeVar("_Entry", int, float)
_BY_NUMBER = {pb.Measure.Value(f"MEASURE_{measure.name}"): measure for measure in Measure}


def encode_tree(tree: TokenTree) -> pb.TokenTree | None:
    """The tree as protobuf; None if it is empty."""
    if not len(tree):
        return None
    return pb.TokenTree(tokens=tree.tokens, parents=tree.parents, q=encode_distributions(tree.q))


def decode_tree(message: pb.TokenTree) -> TokenTree:
    """Raises: ValueError if parents and tokens do not form a tree."""
    if not message.tokens and not message.parents:
        return EMPTY_BLOCK
    return TokenTree(tuple(message.tokens), tuple(message.parents), decode_distributions(message.q))


def encode_distributions(distributions: Sequence[SparseDistribution]) -> pb.Distributions | None:
    """The distributions, each encoded once even if nodes share it; None if there are none."""
    if not distributions:
        return None
    each_once = list({id(each): each for each in distributions}.values())
    places = {id(each): place for place, each in enumerate(each_once)}
    has_draws = any(each.draws for each in each_once)
    return pb.Distributions(
        lengths=[len(each.token_ids) for each in each_once],
        token_ids=_packed("i", [each.token_ids for each in each_once]),
        probs=_packed("f", [each.probs for each in each_once]),
        draw_lengths=[len(each.draws) for each in each_once] if has_draws else (),
        draws=chain.from_iterable(each.draws for each in each_once),
        of_nodes=[places[id(each)] for each in distributions] if len(each_once) < len(distributions) else (),
    )


def decode_distributions(message: pb.Distributions) -> tuple[SparseDistribution, ...]:
    """Raises: ValueError if lengths and entries do not match."""
    if not message.lengths:
        return ()
    draw_lengths = message.draw_lengths or [0] * len(message.lengths)
    has_all = BYTES_A_NUMBER * sum(message.lengths) == len(message.token_ids) == len(message.probs)
    has_draws = len(draw_lengths) == len(message.lengths) and sum(draw_lengths) == len(message.draws)
    if not has_all or not has_draws or max(message.of_nodes, default=0) >= len(message.lengths):
        raise ValueError("the lengths of distributions do not match their entries")
    token_ids: Iterator[tuple[int, ...]] = _unpacked("i", message.token_ids, message.lengths)
    probs: Iterator[tuple[float, ...]] = _unpacked("f", message.probs, message.lengths)
    each_once = tuple(map(SparseDistribution, token_ids, probs, _split(tuple(message.draws), draw_lengths)))
    return tuple(each_once[place] for place in message.of_nodes) or each_once


def encode_guesses(guesses: Guesses) -> pb.Guesses | None:
    """The guesses as protobuf, without distributions; None if there are none."""
    if not len(guesses):
        return None
    return pb.Guesses(tokens=guesses.tokens, parents=guesses.parents, chances=guesses.chances)


def decode_guesses(message: pb.Guesses) -> Guesses:
    if not message.tokens and not message.parents:
        return NO_GUESSES
    return Guesses(tuple(message.parents), tuple(message.tokens), tuple(message.chances))


def encode_features(features: Features | None) -> pb.Features | None:
    if features is None:
        return None
    return pb.Features(first=features.first, width=features.width, rows=features.rows)


def decode_features(message: pb.Features) -> Features:
    """Raises: ValueError if the bytes are no whole rows."""
    features = Features(message.first, message.width, message.rows)
    if not features.num_tokens or len(features.rows) != 2 * features.width * features.num_tokens:
        raise ValueError(f"{len(features.rows)} bytes of features are no rows of {features.width} numbers")
    return features


def _packed(kind: str, columns: Sequence[Sequence[float]]) -> bytes:
    return struct.pack(f"<{sum(map(len, columns))}{kind}", *chain.from_iterable(columns))


def _unpacked(kind: str, packed: bytes, lengths: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    start = 0
    for length in lengths:
        yield struct.unpack_from(f"<{length}{kind}", packed, start)
        start += BYTES_A_NUMBER * length


def _split(values: tuple[_Entry, ...], lengths: Sequence[int]) -> Iterator[tuple[_Entry, ...]]:
    start = 0
    for length in lengths:
        yield values[start : start + length]
        start += length


def encode_tree_spec(tree_spec: TreeSpec) -> pb.TreeSpec:
    offset, slope = tree_spec.calibration
    return pb.TreeSpec(
        rows_per_pass=tree_spec.rows_per_pass,
        max_depth=tree_spec.max_depth,
        min_path_prob=tree_spec.min_path_prob,
        calibration_offset=offset,
        calibration_slope=slope,
        tail=tree_spec.tail,
        reports_all=tree_spec.reports_all,
        num_passes=tree_spec.num_passes,
        fanout=tree_spec.fanout,
        measure=f"MEASURE_{tree_spec.measure.name}",
        min_confidence=tree_spec.min_confidence,
    )


def decode_tree_spec(message: pb.TreeSpec) -> TreeSpec:
    """Raises: ValueError; KeyError for an unknown measure."""
    return TreeSpec(
        message.rows_per_pass,
        message.max_depth,
        message.min_path_prob,
        (message.calibration_offset, message.calibration_slope),
        tuple(message.tail),
        message.reports_all,
        message.num_passes,
        message.fanout,
        _BY_NUMBER[message.measure],
        message.min_confidence,
    )
