"""Adds to verdicts the features of their tokens, and the guesses of the head in the target's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from core.records import Features
from core.speculation import NO_GUESSES, Guesses
from workers.engine.heads.head_draft import Extended, HeadDraft
from workers.heads import CommittedRows, EngineHead, read_features, read_guesses
from workers.step import Readback


def read_returned(
    verdicts: Sequence[CommittedRows],
    features: Tensor | None,
    readback: Readback,
    width: int,
    head: HeadDraft | EngineHead | None,
) -> Callable[[Sequence[Extended]], list[tuple[Features | None, Guesses]]]:
    """Features and a head's guesses for each verdict. Call the result after the readback, with the sequences.

    `width`: numbers per token of the features; 0 for a target that returns none.
    """
    if features is None:
        return lambda _: [(None, NO_GUESSES)] * len(verdicts)
    carrying = [each for each in verdicts if each.wants_features and width]
    features_of = read_features(features, carrying, range(width), readback)
    if isinstance(head, HeadDraft):
        guesses_of = head.read(features, verdicts, readback)
    else:
        guesses_of = read_guesses(features, verdicts, head, readback)

    def found(extended: Sequence[Extended]) -> list[tuple[Features | None, Guesses]]:
        carried = dict(zip(map(id, carrying), features_of(), strict=True))
        return [(carried.get(id(each)), guesses) for each, guesses in zip(verdicts, guesses_of(extended), strict=True)]

    return found
