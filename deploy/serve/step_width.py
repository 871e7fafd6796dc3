"""Whether the blocks of all sessions that a target is to have fit into one of its passes."""

from __future__ import annotations

from math import ceil

from core.config import ServiceConfig


def excess_rows(config: ServiceConfig) -> str | None:
    """What to say where they do not fit, on a GPU; None where they do, or where no number of sessions is set.

    On a CPU every row of a pass costs time, so that nobody makes blocks so large.
    """
    target, block = config.target, config.speculation.max_block_tokens
    if target.autoscaling is None or target.engine.device == "cpu":
        return None
    limit, num_rows = target.engine.max_step_tokens, ceil(target.autoscaling.sessions) * (block + 1)
    if num_rows <= limit:
        return None
    return (
        f"target.engine.max_step_tokens ({limit}) has no room for blocks of speculation.max_block_tokens ({block}) of "
        f"all target.autoscaling.sessions ({target.autoscaling.sessions:g}): their {num_rows} rows take "
        f"{ceil(num_rows / limit)} passes, one after the other, where drafting is priced by one. Raise the first, or "
        f"lower one of the others"
    )
