"""The port for proposers: the draft engine chooses the nodes of a pass, a proposer gives the candidates after each.

A drafter that proposes several positions in one pass, or several models in one engine, would be another proposer; the
engine and the draft tree would not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Protocol

from torch import Tensor

from core.speculation import Candidates
from workers.proposer.text_index import TextIndex
from workers.sampling import DraftRow, propose
from workers.step import Readback

Proposals = list[list[Candidates | None]]
"""The candidates of each row, by session; None for a row whose scores are NaN or infinite."""


class Proposer(Protocol):
    """Proposes candidates for the next token of each row."""

    @property
    def num_ahead(self) -> int:
        """Largest number of rows that `ahead` may add for one session."""
        ...

    def ahead(self, index: TextIndex, text: Sequence[int], path: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` consecutive tokens that may follow `text` and `path`; their rows are computed in the same pass.

        The candidates after such a token are used only if the tree continues with that token. A wrong token costs its
        row and cannot change the tree. `index` belongs to the session.
        """
        ...

    def propose(self, logits: Tensor, rows: Sequence[Sequence[DraftRow]]) -> Proposals:
        """The candidates of the rows of each session; `logits` [R, V] holds the rows of all sessions, in order."""
        ...


class ModelProposer:
    """Proposes the draft model's own candidates, with no tokens ahead."""

    num_ahead = 0

    def __init__(self, q_top_tokens: int) -> None:
        self._q_top_tokens = q_top_tokens

    def ahead(self, index: TextIndex, text: Sequence[int], path: Sequence[int], most: int) -> Sequence[int]:  # noqa: ARG002
        """None: a model proposes one token at a time."""
        return ()

    def propose(self, logits: Tensor, rows: Sequence[Sequence[DraftRow]]) -> Proposals:
        readback = Readback()
        propose_all = propose(logits, list(chain.from_iterable(rows)), self._q_top_tokens, readback)
        readback.wait()
        candidates = iter(propose_all())
        return [list(islice(candidates, len(of_session))) for of_session in rows]
