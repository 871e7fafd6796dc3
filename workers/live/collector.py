"""Collects the places of a target's texts where no guess was right, with the target's likeliest tokens there.

Knows verdicts, tokens and logits; must not know jobs or files. Runs on the engine's thread, beside the readback of the
verdicts; nothing of it goes to a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from core.records import SequenceSpec
from workers.live.buffer import KeptText, LearningBuffer
from workers.step import Readback, upload

TOP_TOKENS = 16
"""Number of likeliest tokens kept of a missed place."""
CONTEXT_TOKENS = 128
"""Number of tokens kept before the first one that the target chose."""
PART_TOKENS = 512
"""Length of the parts in which a long text is kept."""
MIN_LOGPROB = -30.0
"""In place of lower ones, which a loss could not use."""

Read = Callable[[], list[list[float]]]


@dataclass(frozen=True, slots=True)
class VerdictEnd:
    """The end of one verdict: the place of the token that the target chose itself."""

    session: str
    spec: SequenceSpec
    before: Sequence[int]
    """Tokens before the verdict, up to the root of its block."""
    tokens: Sequence[int]
    """The accepted guesses, then the target's own token."""
    is_guessed: bool
    """Whether the block had guesses for this place; all of them were wrong."""
    is_missed: bool
    """Whether no guess was right there. False if the block ended before this place."""
    logits: Tensor
    row: int
    """Index of this place in `logits`."""

    @property
    def may_be_kept(self) -> bool:
        """Whether the caller allows it, and the model itself has chosen the text: no adapter, no draft's guess."""
        return self.spec.learning is not False and self.spec.adapter is None and self.spec.rule.is_lossless


@dataclass(slots=True)
class _KeptPart:
    """The part of a session's text that is being collected."""

    tokens: list[int]
    first: int
    end: int
    """Length of the session's whole text."""
    temperature: float
    missed: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    num_accepted: int = 0
    num_rejected: int = 0

    @classmethod
    def after(cls, context: Sequence[int], end: int, temperature: float) -> _KeptPart:
        tokens = list(context[-CONTEXT_TOKENS:])
        return cls(tokens, len(tokens), end, temperature)

    def add(self, place: VerdictEnd, top: tuple[list[int], list[float]] | None) -> None:
        self.tokens += place.tokens
        self.end += len(place.tokens)
        self.num_accepted += len(place.tokens) - 1
        self.num_rejected += place.is_guessed
        if top is not None:
            self.missed.append(len(self.tokens) - 1)
            self.top_ids.append(top[0])
            self.top_logprobs.append(top[1])

    def text(self) -> KeptText:
        tops = self.missed, self.top_ids, self.top_logprobs
        return KeptText(self.tokens, self.first, *tops, self.num_accepted, self.num_rejected, self.temperature)


class VerdictCollector:
    """The texts of one target's sessions, collected in parts."""

    def __init__(self, buffer: LearningBuffer) -> None:
        self.buffer = buffer
        self._parts: dict[str, _KeptPart] = {}

    def read(self, places: Iterable[VerdictEnd], readback: Readback) -> Callable[[], None]:
        """Read the likeliest tokens of these places. Call the result after the readback to keep them."""
        kept = [place for place in places if place.may_be_kept]
        tops = _tops([place for place in kept if place.is_missed], readback)

        def keep() -> None:
            found = tops()
            for place in kept:
                self._keep(place, found.get(id(place)))

        return keep

    def close(self, sessions: Iterable[str]) -> None:
        """Hand over what has been collected of these sessions, which end."""
        for session in sessions:
            if (part := self._parts.pop(session, None)) is not None:
                self.buffer.add(part.text())

    def end(self) -> None:
        """Keep all that has been collected; nothing may follow."""
        self.close(list(self._parts))
        self.buffer.close()

    def _keep(self, place: VerdictEnd, top: tuple[list[int], list[float]] | None) -> None:
        session, end = place.session, len(place.before)
        part = self._parts.get(session)
        if part is not None and (part.end != end or len(part.tokens) >= PART_TOKENS):
            self.close([session])
            part = None
        if part is None:
            part = _KeptPart.after(place.before[-CONTEXT_TOKENS:], end, place.spec.sampling.temperature)
            self._parts[session] = part
        part.add(place, top)


def _tops(places: Sequence[VerdictEnd], readback: Readback) -> Callable[[], dict[int, tuple[list[int], list[float]]]]:
    """The likeliest tokens of each place and their log probabilities, by the place's id, after the readback."""
    by_logits: dict[int, list[VerdictEnd]] = {}
    for place in places:
        by_logits.setdefault(id(place.logits), []).append(place)
    readers: list[tuple[list[VerdictEnd], Callable[[], list[list[int]]], Read]] = []
    for of_one in by_logits.values():
        logits = of_one[0].logits
        rows = logits[upload([place.row for place in of_one], logits.device)].float().log_softmax(-1)
        top = rows.topk(min(TOP_TOKENS, rows.shape[1]))
        readers.append((of_one, readback.add(top.indices), readback.add(top.values.clamp(min=MIN_LOGPROB))))

    def found() -> dict[int, tuple[list[int], list[float]]]:
        return {
            id(place): (ids, logprobs)
            for of_one, ids_of, logprobs_of in readers
            for place, ids, logprobs in zip(of_one, ids_of(), logprobs_of(), strict=True)
        }

    return found
