"""One session's guessers: each is asked, checked, believed as far as it has been right, and left out once it fails.

Knows the committed text and what is proposed; must not know the tree, nor what is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.speculation import MAX_GUESSES, ROOT, Asker, Guesser, Guesses, Keeper, SourceWorth, TokenTree
from orchestrator.guessers.breaker import Breaker

Proposal = tuple[str, Guesses]
"""A source, and what it proposes."""
Question = tuple[str, TokenTree]
"""A source, and the nodes after which it wants to know the target's token."""


class Panel:
    """All guessers of one session. Nothing that one of them does gets further than here, but sound guesses."""

    def __init__(
        self, guessers: Mapping[str, Guesser], breakers: Mapping[str, Breaker], worth: SourceWorth, vocab_size: int
    ) -> None:
        self._guessers = dict(guessers)
        self._askers = {source: each for source, each in guessers.items() if isinstance(each, Asker)}
        self._breakers = breakers
        self._worth = worth
        self._vocab_size = vocab_size
        self._proposed: list[Proposal] = []
        """For the text as it is, with the chances that the sources themselves gave."""
        self.failures: Counter[str] = Counter()
        """By source; it has not been asked since."""

    def __repr__(self) -> str:
        return f"<Panel of {', '.join(self._guessers) or 'nobody'}>"

    def ask(self, text: Sequence[int]) -> list[Proposal]:
        """What each proposes, with chances as they have proved to be."""
        self._proposed = [
            (source, guesses)
            for source, guesser in tuple(self._guessers.items())
            if (guesses := self._answer(source, guesser, text)) is not None
        ]
        return [(source, self._calibrated(source, guesses)) for source, guesses in self._proposed]

    def _answer(self, source: str, guesser: Guesser, text: Sequence[int]) -> Guesses | None:
        """None where it proposes nothing, or nonsense."""
        try:
            guesses = guesser.propose(text)
            guesses.check(self._vocab_size)
        except Exception as error:  # noqa: BLE001  whatever is wrong with it, the stream goes on
            self._leave_out(source, error)
            return None
        self._breakers[source].worked()
        return guesses if len(guesses) else None

    def _leave_out(self, source: str, error: Exception) -> None:
        self._guessers.pop(source, None)  # it may have been left out since it asked
        self._askers.pop(source, None)
        self.failures[source] += 1
        self._breakers[source].failed(error)

    def questions(self, text: Sequence[int]) -> Question | None:
        """What a source asks the target about, beside the block; of several sources the first that has been named."""
        for source, asker in tuple(self._askers.items()):
            try:
                tree = asker.questions(text)
                _check_questions(tree, self._vocab_size)
            except Exception as error:  # noqa: BLE001
                self._leave_out(source, error)
                continue
            return (source, tree) if len(tree) else None
        return None

    def answered(self, source: str, samples: Sequence[int]) -> None:
        """What the target said after the root and after each node of the questions of this source."""
        try:
            self._askers[source].answered(samples)
        except Exception as error:  # noqa: BLE001
            self._leave_out(source, error)

    def _calibrated(self, source: str, guesses: Guesses) -> Guesses:
        return replace(guesses, chances=self._worth.calibrated(source, guesses.chances))

    def saw(self, tokens: Sequence[int]) -> None:
        """These were committed behind the text of the last proposals."""
        for source, guesses in self._proposed:
            self._learn(source, guesses, tokens)
        self._proposed = []

    def ended(self, text: Sequence[int]) -> None:
        """The text is complete, or goes on no more: for guessers that keep outputs."""
        for source, guesser in tuple(self._guessers.items()):
            if isinstance(guesser, Keeper):
                try:
                    guesser.ended(text)
                except Exception as error:  # noqa: BLE001
                    self._leave_out(source, error)

    def _learn(self, source: str, guesses: Guesses, tokens: Sequence[int]) -> None:
        """From each place of the text that its guesses reached."""
        place: int | None = ROOT
        for token in tokens:
            nodes = [node for node, parent in enumerate(guesses.parents) if parent == place]
            if not nodes:
                return
            place = next((node for node in nodes if guesses.tokens[node] == token), None)
            claimed = sum([guesses.chances[node] for node in nodes])
            if claimed > 0.0:
                self._worth.see(source, claimed, is_right=place is not None)
            if place is None:
                return


def _check_questions(tree: TokenTree, vocab_size: int) -> None:
    """Raises: ValueError for what no block may have."""
    if len(tree) > MAX_GUESSES:
        raise ValueError(f"{len(tree)} questions, more than {MAX_GUESSES}")
    if len(tree) and not 0 <= min(tree.tokens) <= max(tree.tokens) < vocab_size:
        raise ValueError("a question about a token outside the vocabulary")
