"""The speaker port: the draft engine chooses the nodes of a pass, and a speaker says what may follow each.

Today one model speaks, alone or in a cascade; a drafter that says several positions in one pass, or several models in
one engine, would be further speakers, and neither the engine nor the draft tree would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Protocol

from torch import Tensor

from core.speculation import Candidates
from workers.sampling import Place, propose
from workers.speaker.text_index import TextIndex
from workers.step import Readback

Said = list[list[Candidates | None]]
"""Of each session what may follow each of its rows; None for a row whose scores are unsound."""


class Speaker(Protocol):
    """Says what may follow."""

    @property
    def num_ahead(self) -> int:
        """Rows that it may want computed along for one session, at most."""
        ...

    def ahead(self, index: TextIndex, text: Sequence[int], path: Sequence[int], most: int) -> Sequence[int]:
        """At most `most` tokens that may follow `text` and `path` in a row, whose rows are computed in the same pass.

        What is said after one of them counts if growth goes on with that token, and is dropped if not: so a wrong one
        costs its row, and none can change what grows. `index` is the session's own.
        """
        ...

    def says(self, logits: Tensor, places: Sequence[Sequence[Place]]) -> Said:
        """What may follow the rows of each session, of which `places` tells how they are sampled. `logits` [R, V] has
        all of them, in order.
        """
        ...


class ModelSpeaker:
    """The draft model's own candidates, of nothing but the chosen nodes."""

    num_ahead = 0

    def __init__(self, q_top_tokens: int) -> None:
        self._q_top_tokens = q_top_tokens

    def ahead(self, index: TextIndex, text: Sequence[int], path: Sequence[int], most: int) -> Sequence[int]:  # noqa: ARG002
        """A model says one token at a time."""
        return ()

    def says(self, logits: Tensor, places: Sequence[Sequence[Place]]) -> Said:
        readback = Readback()
        propose_all = propose(logits, list(chain.from_iterable(places)), self._q_top_tokens, readback)
        readback.wait()
        rows = iter(propose_all())
        return [list(islice(rows, len(of_session))) for of_session in places]
