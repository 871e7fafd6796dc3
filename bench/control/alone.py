"""Guessers without a service: each is asked at every place of each text, as a session would that came by there."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.speculation import ROOT, Asker, Guesser, Guesses
from deploy.measure import Recording

NewGuesser = Callable[[Recording], Guesser]
"""Makes one session's, for a text."""


@dataclass(frozen=True, slots=True)
class Alone:
    """What it finds, and costs."""

    alpha: float
    """Share of places whose first guess is the token; a place without a guess counts as a wrong one."""
    guess_us: float
    """Processor time of one answer, in microseconds: the mean over all places."""
    memory_kb: float
    """Of one session, at the end of the first text."""


def alone(new: NewGuesser, texts: Sequence[Recording]) -> Alone:
    """Over all places of all texts."""
    num_places, num_right, elapsed_s = 0, 0, 0.0
    for text in texts:
        guesser, tokens = new(text), list(text.prompt)
        for token in text.output:
            began_s = time.thread_time()
            guesses = _asked(guesser, tokens)
            elapsed_s += time.thread_time() - began_s
            num_places, num_right = num_places + 1, num_right + (_first(guesses) == token)
            tokens.append(token)
    memory_kb = _memory_bytes(new, texts[0]) / 1e3
    return Alone(num_right / num_places, 1e6 * elapsed_s / num_places, memory_kb)


def _asked(guesser: Guesser, tokens: Sequence[int]) -> Guesses:
    """One that asks the target hears what stands elsewhere in the text: it costs what the right answers would."""
    guesses = guesser.propose(tokens)
    if isinstance(guesser, Asker):
        questions = guesser.questions(tokens)
        guesser.answered([tokens[(7 * node) % len(tokens)] for node in range(1 + len(questions))])
    return guesses


def _first(guesses: Guesses) -> int | None:
    """The likeliest token below the root."""
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
