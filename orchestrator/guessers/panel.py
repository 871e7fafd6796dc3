"""One session's guessers. Each is queried, validated, calibrated by its past precision, and disabled when it fails.

Knows the committed text and the proposals; must not know the tree, nor what is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from core.speculation import (
    MAX_GUESSES,
    NO_Q,
    ROOT,
    DeliveredGuesser,
    Guesser,
    Guesses,
    HistoryGuesser,
    QuestioningGuesser,
    SamplingGuesser,
    SourcePrecision,
    SparseDistribution,
    TokenTree,
    check_distribution,
)
from orchestrator.guessers.breaker import Breaker
from orchestrator.guessers.drawing import draw_chain

Proposal = tuple[str, Guesses]
"""A source and its proposal."""
Question = tuple[str, TokenTree]
"""A source, and the nodes after which it requests the target's token."""


class Panel:
    """All guessers of one session. Only valid guesses leave the panel, whatever a guesser does."""

    def __init__(
        self,
        guessers: Mapping[str, Guesser],
        breakers: Mapping[str, Breaker],
        precision: SourcePrecision,
        vocab_size: int,
    ) -> None:
        self._guessers = dict(guessers)
        self._questioning = {source: each for source, each in guessers.items() if isinstance(each, QuestioningGuesser)}
        self._sampling = {source: each for source, each in guessers.items() if isinstance(each, SamplingGuesser)}
        self._delivered = {source: each for source, each in guessers.items() if isinstance(each, DeliveredGuesser)}
        self._breakers = breakers
        self._precision = precision
        self._vocab_size = vocab_size
        self._proposed: list[Proposal] = []
        """Proposals for the current text, with the sources' own probabilities."""
        self._undrawn: dict[str, SparseDistribution] = {}
        """Distributions of the next token, by source, from which nothing was drawn."""
        self.failures: Counter[str] = Counter()
        """Number of failures by source. A failed source is disabled."""

    def ask(self, text: Sequence[int]) -> list[Proposal]:
        """Return each guesser's proposal, with calibrated probabilities."""
        return self._ask(tuple(self._guessers), text)

    def _ask(self, sources: Iterable[str], text: Sequence[int]) -> list[Proposal]:
        self._proposed = [
            (source, guesses)
            for source in sources
            if (guesses := self._answer(source, self._guessers[source], text)) is not None
        ]
        return [(source, self._calibrated(source, guesses)) for source, guesses in self._proposed]

    def draw(self, text: Sequence[int], seed: int, goes_on: Callable[[Sequence[float]], bool]) -> list[Proposal]:
        """Return proposals for verification that needs q: those of guessers without distributions, or one chain drawn
        from one guesser.

        The first guesses decide between the two, before anything is drawn. `goes_on` gets the path probabilities up to
        the guess that may be drawn next.
        """
        found = self._ask([source for source in self._guessers if source not in self._sampling], text)
        self._undrawn = {
            source: q for source in tuple(self._sampling) if (q := self._distribution(source, text)).token_ids
        }
        source = max(self._undrawn, key=self._first_chance, default="")
        if not source or self._first_chance(source) < _most_at_root(found):
            return found
        drawn = self._draw_from(source, text, seed, goes_on)
        if not len(drawn):
            return found
        del self._undrawn[source]
        self._proposed.append((source, drawn))
        return [(source, self._calibrated(source, drawn))]

    def _first_chance(self, source: str) -> float:
        """Return the calibrated probability of the source's likeliest first guess."""
        return self._precision.calibrated(source, [max(self._undrawn[source].probs)])[0]

    def _draw_from(
        self, source: str, text: Sequence[int], seed: int, goes_on: Callable[[Sequence[float]], bool]
    ) -> Guesses:
        root = self._undrawn[source]

        def distribution_after(drawn: Sequence[int]) -> SparseDistribution:
            return self._distribution(source, text, drawn) if drawn else root

        def is_worth_it(chances: Sequence[float]) -> bool:
            calibrated = self._precision.calibrated(source, chances)
            return len(chances) <= MAX_GUESSES and goes_on(list(accumulate(calibrated, mul)))

        return draw_chain(distribution_after, is_worth_it, seed, len(text))

    def _distribution(self, source: str, text: Sequence[int], drawn: Sequence[int] = ()) -> SparseDistribution:
        """Return the source's distribution of the next token; `NO_Q` if it has none or an invalid one."""
        guesser = self._sampling.get(source)
        if guesser is None:
            return NO_Q
        try:
            distribution = guesser.distribution(text, drawn)
            if distribution.token_ids:
                check_distribution(distribution, self._vocab_size)
        except Exception as error:  # noqa: BLE001  as below
            self._leave_out(source, error)
            return NO_Q
        self._breakers[source].worked()
        return distribution

    def _answer(self, source: str, guesser: Guesser, text: Sequence[int]) -> Guesses | None:
        """Return the guesser's proposal; None if it is empty or invalid."""
        try:
            guesses = guesser.propose(text)
            guesses.check(self._vocab_size)
        except Exception as error:  # noqa: BLE001  whatever is wrong with it, the stream goes on
            self._leave_out(source, error)
            return None
        self._breakers[source].worked()
        return guesses if len(guesses) else None

    def _leave_out(self, source: str, error: Exception) -> None:
        self._guessers.pop(source, None)  # it may have been disabled since the question
        self._questioning.pop(source, None)
        self._sampling.pop(source, None)
        self._delivered.pop(source, None)
        self.failures[source] += 1
        self._breakers[source].failed(error)

    def questions(self, text: Sequence[int]) -> Question | None:
        """Return a source's questions to the target. If several sources ask, the first configured one is used."""
        for source, guesser in tuple(self._questioning.items()):
            try:
                tree = guesser.questions(text)
                _check_questions(tree, self._vocab_size)
            except Exception as error:  # noqa: BLE001
                self._leave_out(source, error)
                continue
            return (source, tree) if len(tree) else None
        return None

    def answered(self, source: str, samples: Sequence[int]) -> None:
        """Pass on the target's tokens after the root and after each node of this source's questions."""
        try:
            self._questioning[source].answered(samples)
        except Exception as error:  # noqa: BLE001
            self._leave_out(source, error)

    def _calibrated(self, source: str, guesses: Guesses) -> Guesses:
        return replace(guesses, chances=self._precision.calibrated(source, guesses.chances))

    def observe(self, tokens: Sequence[int]) -> None:
        """Calibrate the sources on the tokens committed after the last proposals."""
        for source, guesses in self._proposed:
            self._learn(source, guesses, tokens)
        for source, q in self._undrawn.items():
            self._learn(source, _likeliest_of(q), tokens[:1])
        self._proposed, self._undrawn = [], {}

    def ended(self, text: Sequence[int]) -> None:
        """Report the final text to guessers that keep outputs."""
        for source, guesser in tuple(self._guessers.items()):
            if isinstance(guesser, HistoryGuesser):
                try:
                    guesser.ended(text)
                except Exception as error:  # noqa: BLE001
                    self._leave_out(source, error)

    @property
    def awaits_guesses(self) -> bool:
        """Whether a guesser proposes what verdicts carry."""
        return bool(self._delivered)

    def deliver(self, guesses: Guesses, num_tokens: int) -> None:
        """Pass on the guesses of a verdict below a text of `num_tokens` tokens."""
        for guesser in self._delivered.values():
            guesser.deliver(guesses, num_tokens)

    def _learn(self, source: str, guesses: Guesses, tokens: Sequence[int]) -> None:
        """Calibrate a source at each position that its guesses reached."""
        end: int | None = ROOT
        for token in tokens:
            nodes = [node for node, parent in enumerate(guesses.parents) if parent == end]
            if not nodes:
                return
            end = next((node for node in nodes if guesses.tokens[node] == token), None)
            claimed = sum([guesses.chances[node] for node in nodes])
            if claimed > 0.0:
                self._precision.observe(source, claimed, is_right=end is not None)
            if end is None:
                return


def _most_at_root(proposals: Sequence[Proposal]) -> float:
    """Return the probability of the likeliest first guess."""
    below = [
        chance
        for _, guesses in proposals
        for chance, parent in zip(guesses.chances, guesses.parents, strict=True)
        if parent == ROOT
    ]
    return max(below, default=0.0)


def _likeliest_of(q: SparseDistribution) -> Guesses:
    """Return the likeliest tokens of a distribution as a proposal.

    Without a draw, they are the best estimate of a draw's value. Several equally likely tokens count as one guess,
    which is right if any of them is committed.
    """
    most = max(q.probs)
    tokens = tuple(token for token, prob in zip(q.token_ids, q.probs, strict=True) if prob == most)
    return Guesses((ROOT,) * len(tokens), tokens, (most, *[0.0] * (len(tokens) - 1)))


def _check_questions(tree: TokenTree, vocab_size: int) -> None:
    """Validate questions.

    Raises: ValueError if a block cannot contain them.
    """
    if len(tree) > MAX_GUESSES:
        raise ValueError(f"{len(tree)} questions, more than {MAX_GUESSES}")
    if len(tree) and not 0 <= min(tree.tokens) <= max(tree.tokens) < vocab_size:
        raise ValueError("a question about a token outside the vocabulary")
