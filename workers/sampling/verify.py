"""The batched implementation of each rule of verification, by the rule's name.

Knows log p on its device, blocks and noise; must not know models or sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from core.speculation import TokenTree
from workers.sampling import chains, coupled, drawn_trees, relaxed
from workers.sampling.batched import BatchedRule, Outcomes
from workers.sampling.sampler import Row
from workers.step import Readback

BATCHED_RULES: Final[Mapping[str, BatchedRule]] = {
    "greedy": coupled.follow_argmax,
    "coupled": coupled.follow_samples,
    "rejection": chains.reject,
    "block": chains.reject_blocks,
    "recursive_rejection": drawn_trees.reject_recursively,
    "sequential_selection": drawn_trees.select_in_sequence,
    "lenient_greedy": relaxed.follow_argmax_leniently,
    "lenient_coupled": relaxed.follow_leniently,
    "lenient_rejection": chains.reject_leniently,
    "typical": relaxed.follow_typical,
}


def verify(rule: str, blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """Verify each block by the rule with this name; shapes as in `BatchedRule`.

    Raises: ValueError for a tree under a rule that takes chains only.
    """
    return BATCHED_RULES[rule](blocks, log_p, rows, readback)
