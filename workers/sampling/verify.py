"""The table of the rules' batched twins, by the rules' names.

Knows log p on its device, blocks and noise; must not know models or sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from core.speculation import TokenTree
from workers.sampling import chains, coupled, lenient, typical
from workers.sampling.sampler import Row
from workers.sampling.twin import Outcomes, Twin
from workers.step import Readback

TWINS: Final[Mapping[str, Twin]] = {
    "greedy": coupled.follow_argmax,
    "coupled": coupled.follow_samples,
    "rejection": chains.reject,
    "block": chains.reject_blocks,
    "lenient_greedy": lenient.follow_argmax_leniently,
    "lenient_coupled": lenient.follow_leniently,
    "lenient_rejection": chains.reject_leniently,
    "typical": typical.follow_typical,
}


def verify(rule: str, blocks: Sequence[TokenTree], log_p: Tensor, rows: Sequence[Row], readback: Readback) -> Outcomes:
    """What the rule of this name makes of each block. Raises: ValueError for a shape that it does not take."""
    return TWINS[rule](blocks, log_p, rows, readback)
