"""Guessers without a service: each is asked at every position of each text, as in a session without accepted
guesses."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.speculation import ROOT, Guesser, Guesses, QuestioningGuesser
from deploy.measure import Recording

NewGuesser = Callable[[Recording], Guesser]
"""Creates the guesser of one session, for a text."""


@dataclass(frozen=True, slots=True)
class GuesserCost:
    """Acceptance and costs of one guesser."""

    alpha: float
    """Share of positions whose likeliest guess is right; a position without a guess counts as wrong."""
    guess_us: float
    """Mean processor time of one answer, in microseconds."""
    memory_kb: float
    """Memory of one session at the end of the first text, in kB."""


def measure_guesser(new: NewGuesser, texts: Sequence[Recording]) -> GuesserCost:
    """Measure over all positions of all texts."""
    num_positions, num_right, elapsed_s = 0, 0, 0.0
    for text in texts:
        guesser, tokens = new(text), list(text.prompt)
        for token in text.output:
            began_s = time.thread_time()
            guesses = _asked(guesser, tokens)
            elapsed_s += time.thread_time() - began_s
            num_positions, num_right = num_positions + 1, num_right + (_first(guesses) == token)
            tokens.append(token)
    memory_kb = _memory_bytes(new, texts[0]) / 1e3
    return GuesserCost(num_right / num_positions, 1e6 * elapsed_s / num_positions, memory_kb)


def _asked(guesser: Guesser, tokens: Sequence[int]) -> Guesses:
    """Ask for guesses. Questions are answered with tokens from elsewhere in the text, which cost the same."""
    guesses = guesser.propose(tokens)
    if isinstance(guesser, QuestioningGuesser):
        questions = guesser.questions(tokens)
        guesser.answered([tokens[(7 * node) % len(tokens)] for node in range(1 + len(questions))])
    return guesses


def _first(guesses: Guesses) -> int | None:
    """The likeliest child of the root, or None."""
    below = [node for node, parent in enumerate(guesses.parents) if parent == ROOT]
    return guesses.tokens[max(below, key=lambda node: guesses.chances[node])] if below else None


def _memory_bytes(new: NewGuesser, text: Recording) -> int:
    tokens = [*text.prompt, *text.output]
    tracemalloc.start()
    guesser = new(text)
    for end in range(len(text.prompt), len(tokens) + 1):
        _asked(guesser, tokens[:end])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held
