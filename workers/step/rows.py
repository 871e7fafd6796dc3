"""What a forward pass is asked to do: rows of many sequences, one after the other.

Knows tokens and trees. Must not know models, nor how attention finds its KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.speculation import EMPTY_BLOCK, TokenTree
from workers.step.kv_cache import SequenceKV
from workers.step.plan import Span


@dataclass(frozen=True, slots=True)
class StepRows:
    """What one sequence adds in a step: `tokens`, then the guesses of `tree` below the last of them.

    The first `num_held` nodes of the tree are no rows of this step: earlier ones have left their KV right behind that
    of the tokens, in this order; and the tokens can be none. Invariant: where nodes are held, `tokens` is empty.
    """

    kv: SequenceKV
    tokens: Sequence[int]
    tree: TokenTree = EMPTY_BLOCK
    num_held: int = 0
    wants_logits: bool = True
    """False for all but the last chunk of a prefill."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.tree) - self.num_held

    @property
    def ids(self) -> tuple[int, ...]:
        """The token of each row."""
        return (*self.tokens, *self.tree.tokens[self.num_held :])

    @property
    def positions(self) -> list[int]:
        """Where each row stands in its sequence; a guess stands at its depth below the last token."""
        first = self.kv.num_tokens - self.num_held
        root = first + len(self.tokens) - 1
        return [*range(first, root + 1), *(root + depth for depth in self.tree.depths[self.num_held :])]


@dataclass(frozen=True, slots=True)
class Step:
    """A batch, laid out: nothing but integers, so that whoever has the same KV blocks can run it.

    It may have more rows than its spans, and ask for more than is wanted: padding.
    """

    ids: list[int]
    positions: list[int]
    wanted: list[int]
    """Rows whose logits are asked for."""
    spans: list[Span]


def lay_out(batch: Sequence[StepRows]) -> Step:
    """Each sequence's stretch of the flattened rows, and the rows whose logits are wanted."""
    step = Step([], [], [], [])
    for item in batch:
        first = len(step.ids)
        step.ids.extend(item.ids)
        step.positions.extend(item.positions)
        step.spans.append(Span(item.kv, first, len(item.tokens), item.tree.parents, item.num_held))
        if item.wants_logits:
            step.wanted.extend(range(first + max(0, len(item.tokens) - 1), first + item.num_rows))
    return step
