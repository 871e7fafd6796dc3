"""Parts shared by gRPC and HTTP replies: one-line error messages, and statistics by the proto's names."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from core.errors import OutriderError
from core.records import SourceStats, SpeculationStats

logger = logging.getLogger(__name__)

MAX_DETAILS_CHARS = 500
"""gRPC's trailers must fit in 8 KiB, and a character may take twelve bytes."""


def message_of(error: Exception) -> str:
    """The error in one line. An unexpected error is logged, and the line shows only the id of the log entry."""
    if isinstance(error, OutriderError):
        return shortened(str(error))
    error_id = secrets.token_hex(8)
    logger.error("internal error %s", error_id, exc_info=error)
    return f"an internal error happened; the server's log has it as {error_id}"


def shortened(text: str) -> str:
    """The line, cut to `MAX_DETAILS_CHARS`."""
    return text if len(text) <= MAX_DETAILS_CHARS else text[: MAX_DETAILS_CHARS - 3] + "..."


def speculation_fields(stats: SpeculationStats) -> dict[str, Any]:
    """The fields of the proto's SpeculationStats."""
    return {
        "target_passes": stats.num_rounds,
        "draft_passes": stats.num_draft_rounds,
        "drafted_tokens": stats.num_drafted_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "accepted_per_position": stats.accepted_per_position,
        "draft_failures": stats.num_draft_failures,
        "target_failures": stats.num_target_failures,
        "hits": stats.num_hits,
        "misses": stats.num_misses,
        "draft_time_s": stats.draft_time_s,
        "hidden_draft_time_s": stats.hidden_draft_time_s,
        "lookup_tokens": stats.num_lookup_tokens,
        "continued_passes": stats.num_continued,
        "sources": [_source_fields(source) for source in stats.sources],
        "relaxed_tokens": stats.num_relaxed_tokens,
    }


def _source_fields(source: SourceStats) -> dict[str, Any]:
    return {
        "name": source.name,
        "drafted_tokens": source.num_drafted_tokens,
        "accepted_tokens": source.num_accepted_tokens,
        "failures": source.num_failures,
    }
