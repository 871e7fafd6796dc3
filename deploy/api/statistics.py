"""The effect of speculation on a completion, by the names in replies."""

from __future__ import annotations

from typing import Any

from core.records import SourceStats, SpeculationStats


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
    """The fields of the proto's SourceStats."""
    return {
        "name": source.name,
        "drafted_tokens": source.num_drafted_tokens,
        "accepted_tokens": source.num_accepted_tokens,
        "failures": source.num_failures,
    }
