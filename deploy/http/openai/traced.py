"""Trace fields of a choice: the calls by the proto's names, and the source of each token.

Pure functions. Texts are added to ids, so that a page needs no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from core.records import CallTrace, Chunk, Timing, VerifiedBlock

TARGET = "target"
"""Source of a token that was not guessed."""
TextOf = Callable[[int], str]


def traced_fields(chunks: Sequence[Chunk], text_of: TextOf) -> dict[str, Any]:
    """The tokens of these chunks, and the calls that produced them."""
    return {
        "tokens": [token for chunk in chunks for token in _tokens(chunk, text_of)],
        "trace": [_call(call, text_of) for chunk in chunks for call in chunk.trace],
    }


def _tokens(chunk: Chunk, text_of: TextOf) -> Iterator[dict[str, Any]]:
    sources = [source for call in chunk.trace if call.verified is not None for source in _origins(call.verified)]
    if chunk.score is not None:  # a beam has no blocks, and all its tokens were chosen by the target's scores
        sources = [TARGET] * len(chunk.token_ids)
    for token_id, source in zip(chunk.token_ids, sources, strict=False):  # an output may end within a verdict
        yield {"id": token_id, "text": text_of(token_id), "source": source}


def _origins(block: VerifiedBlock) -> list[str]:
    return [*(block.sources[node] for node in block.path), TARGET]


def _call(call: CallTrace, text_of: TextOf) -> dict[str, Any]:
    return {
        "call": call.call.value,
        "sent_s": call.sent_s,
        "received_s": call.received_s,
        "guesses": call.num_guesses,
        "used": call.num_used,
        "timing": None if call.timing is None else _timing(call.timing),
        "verified": None if call.verified is None else _verified(call.verified, text_of),
    }


def _timing(timing: Timing) -> dict[str, Any]:
    """Timing without the engine's number of sessions, which would reveal other callers' activity."""
    return {
        "waited_s": timing.waited_s,
        "computed_s": timing.computed_s,
        "passes": timing.num_passes,
        "rows": timing.num_rows,
    }


def _verified(block: VerifiedBlock, text_of: TextOf) -> dict[str, Any]:
    return {
        "token_ids": block.tokens,
        "texts": [text_of(token_id) for token_id in block.tokens],
        "parents": block.parents,
        "sources": block.sources,
        "path": block.path,
        "next_token_id": block.next_token,
        "next_text": text_of(block.next_token),
    }
