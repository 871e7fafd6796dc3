"""Trees, growth and distributions of core.speculation as protobuf, and back; each decoder checks what it makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from core.speculation import EMPTY_BLOCK, Measure, SparseDistribution, Steady, TokenTree
from protos.outrider.link.v1 import link_pb2 as pb

_MEASURES = {
    Measure.LEAD: pb.MEASURE_LEAD,
    Measure.CONFIDENCE: pb.MEASURE_CONFIDENCE,
    Measure.ENTROPY: pb.MEASURE_ENTROPY,
}
_BY_NUMBER = {number: measure for measure, number in _MEASURES.items()}


def encode_tree(tree: TokenTree) -> pb.TokenTree | None:
    """None for the empty one."""
    if not len(tree):
        return None
    return pb.TokenTree(tokens=tree.tokens, parents=tree.parents, q=encode_distributions(tree.q))


def decode_tree(message: pb.TokenTree) -> TokenTree:
    """Raises: ValueError when it is no tree."""
    if not message.tokens and not message.parents:
        return EMPTY_BLOCK
    return TokenTree(tuple(message.tokens), tuple(message.parents), decode_distributions(message.q))


def encode_distributions(distributions: Sequence[SparseDistribution]) -> pb.Distributions | None:
    """None where there are none."""
    if not distributions:
        return None
    return pb.Distributions(
        lengths=[len(each.token_ids) for each in distributions],
        token_ids=chain.from_iterable(each.token_ids for each in distributions),
        probs=chain.from_iterable(each.probs for each in distributions),
    )


def decode_distributions(message: pb.Distributions) -> tuple[SparseDistribution, ...]:
    """Raises: ValueError when lengths and entries do not agree."""
    if not message.lengths:
        return ()
    if not sum(message.lengths) == len(message.token_ids) == len(message.probs):
        raise ValueError("distributions whose lengths are not those of their entries")
    return tuple(_split(message))


def _split(message: pb.Distributions) -> Iterator[SparseDistribution]:
    token_ids, probs = tuple(message.token_ids), tuple(message.probs)
    start = 0
    for length in message.lengths:
        yield SparseDistribution(token_ids[start : start + length], probs[start : start + length])
        start += length


def encode_steady(steady: Steady) -> pb.Steady:
    """All of its fields."""
    offset, slope = steady.sureness
    return pb.Steady(
        rows_per_pass=steady.rows_per_pass,
        max_depth=steady.max_depth,
        min_reach=steady.min_reach,
        sureness_offset=offset,
        sureness_slope=slope,
        tail=steady.tail,
        is_anew=steady.is_anew,
        num_passes=steady.num_passes,
        fanout=steady.fanout,
        measure=_MEASURES[steady.measure],
        min_sureness=steady.min_sureness,
    )


def decode_steady(message: pb.Steady) -> Steady:
    """Raises: ValueError, or KeyError, when it is none."""
    return Steady(
        message.rows_per_pass,
        message.max_depth,
        message.min_reach,
        (message.sureness_offset, message.sureness_slope),
        tuple(message.tail),
        message.is_anew,
        message.num_passes,
        message.fanout,
        _BY_NUMBER[message.measure],
        message.min_sureness,
    )
