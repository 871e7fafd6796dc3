"""The table of the rules' batched twins, by the rules' names.

Knows log p on its device, blocks and noise; must not know models or sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from core.speculation import TokenTree
from workers.sampling import chains, coupled, drawn_trees, relaxed
from workers.sampling.sampler import Row
from workers.sampling.twin import Outcomes, Twin
from workers.step import Readback

TWINS: Final[Mapping[str, Twin]] = {
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
    """What the rule of this name makes of each block. Raises: ValueError for a shape that it does not take."""
    return TWINS[rule](blocks, log_p, rows, readback)
