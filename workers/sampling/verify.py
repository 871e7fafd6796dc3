"""The batched implementation of each verification rule, by the rule's name.

Knows log p on its device, blocks and noise; must not know models or sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from core.speculation import TokenTree
from workers.sampling import chains, coupled, drawn_trees, relaxed
from workers.sampling.batched import BatchedRule, Decide
from workers.sampling.logits import Row
from workers.step import Uploads

BATCHED_RULES: Final[Mapping[str, BatchedRule]] = {
    "greedy": coupled.verify,
    "coupled": coupled.verify,
    "rejection": chains.verify,
    "block": partial(chains.verify, is_block=True),
    "recursive_rejection": drawn_trees.reject_recursively,
    "sequential_selection": drawn_trees.select_in_sequence,
    "lenient_greedy": relaxed.verify_lenient,
    "lenient_coupled": relaxed.verify_lenient,
    "lenient_rejection": partial(chains.verify, is_lenient=True),
    "typical": relaxed.verify_typical,
}


def verify(rule: str, blocks: Sequence[TokenTree], rows: Sequence[Row], vocab_size: int, uploads: Uploads) -> Decide:
    """Prepare the decision of each block by the rule with this name; shapes as in `BatchedRule`.

    Raises: ValueError for a tree under a rule that takes chains only.
    """
    return BATCHED_RULES[rule](blocks, rows, vocab_size, uploads)
